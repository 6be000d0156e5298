"""``PeerOffers``: has another node keep a copy of what a node agent has in memory. Nobody waits for that."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from ray_dcp.errors import ConfigError
from ray_dcp.settings import agents_from, count_from, memory_tier_from, require_count, variable_of
from ray_dcp.staging.peers.peer import PeerLostError
from ray_dcp.staging.peers.peer_copies import CopyOffer

_REPLICAS = variable_of("replicas")
logger = logging.getLogger(__name__)


def replicas_from(variables: Mapping[str, str], replicas: int | None = None) -> int:
    """On how many other nodes a copy of each file is kept in memory: ``replicas``, else as ``RAY_DCP_REPLICAS`` says.

    0 where nobody says, 1 at most. Raises ``ConfigError``, also where there is no memory of agents to copy from.
    """
    setting = "replicas"
    if replicas is None:
        setting = _REPLICAS
        replicas = count_from(setting, variables.get(setting) or "0")
    require_count(setting, replicas, least=0)
    if replicas > 1:
        raise ConfigError(setting, f"{replicas} copies are too many: 0 or 1 is kept on another node")
    if replicas and not (agents_from(variables) and memory_tier_from(variables)):
        off = variable_of("memory_tier" if agents_from(variables) else "agents")
        raise ConfigError(setting, f"copies are made of what node agents keep in memory, and {off} turns that off")
    return replicas


class CopyKeeper(Protocol):
    """The agent of another node, as it is asked to keep copies. Neither method waits for ever."""

    node: str

    def take_copy(self, offer: CopyOffer) -> bool:
        """See ``PeerCopies.take``. Raises ``PeerLostError`` where it does not answer."""
        ...

    def left(self, rank: int) -> None:
        """Tell it that a rank of this node has left its group in order; nobody waits for it."""
        ...


class PeerOffers:
    """The offers of one agent. ``others`` gives the group's other nodes, the one first that is to have the copy."""

    def __init__(self, others: Callable[[], Iterable[CopyKeeper]]) -> None:
        self._others = others
        self._changed = threading.Condition()
        self._open: dict[int, CopyOffer] = {}
        self._keepers: dict[int, CopyKeeper] = {}
        self._is_told = False
        self._thread: threading.Thread | None = None

    def offer(self, offer: CopyOffer) -> None:
        """Have the file kept elsewhere, too; of each rank the newest one counts."""
        with self._changed:
            self._open[offer.rank] = offer
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="agent-offers", daemon=True)
                try:
                    self._thread.start()
                except RuntimeError as error:  # the system has no thread to give; the next save tries again
                    self._thread = None
                    logger.warning("%s is not offered to another node: %s", offer.file.key, error)

    def left(self, rank: int) -> None:
        """Tell whoever has a copy of the file of ``rank`` that the rank has left its group in order."""
        with self._changed:
            keeper = self._keepers.pop(rank, None)
        if keeper is not None:
            keeper.left(rank)

    def wait(self, timeout_s: float) -> bool:
        """Whether everything is offered, within the time."""
        with self._changed:
            return self._changed.wait_for(lambda: self._thread is None, timeout_s)

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._open:
                    self._thread = None
                    self._changed.notify_all()
                    return
                offer = self._open.pop(next(iter(self._open)))
            try:
                self._place(offer)
            except Exception:
                logger.exception("%s is not copied to another node", offer.file.key)

    def _place(self, offer: CopyOffer) -> None:
        reasons = []
        for keeper in self._others():
            try:
                if keeper.take_copy(offer):
                    with self._changed:
                        self._keepers[offer.rank] = keeper
                    self._is_told = False
                    return
                reasons.append(f"node {keeper.node} has no rank in the save, or keeps nothing in memory")
            except PeerLostError as error:
                reasons.append(f"node {keeper.node}: {error}")
        if not self._is_told:
            self._is_told = True
            logger.warning("no copy of %s is kept on another node, so the loss of node %s would have it read from "
                           "storage: %s", offer.file.key, offer.node, "; ".join(reasons) or "its group has no other "
                           "node with an agent")  # fmt: skip


__all__ = ["CopyKeeper", "PeerOffers", "replicas_from"]
