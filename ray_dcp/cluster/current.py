"""``current_group``: the group that a save or load means when none is given."""

from __future__ import annotations

import sys
import threading
import uuid
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from ray_dcp.cluster.process import require_own_connection
from ray_dcp.errors import GroupError

if TYPE_CHECKING:
    from ray_dcp.cluster.group import RankGroup

_LAZY_JOIN_TIMEOUT_S = 1800.0
"""A group that is joined at its first save or load waits for the slowest rank to get there."""

_entered: ContextVar[tuple[RankGroup, ...]] = ContextVar("ray_dcp_entered_groups", default=())
_joined: RankGroup | None = None
_lazily_joined: dict[tuple[str, str], RankGroup] = {}
_lock = threading.RLock()


def current_group() -> RankGroup | None:
    """The group that ``group=None`` means; None for one process alone.

    In this order: the innermost ``with group:``; the group this process has joined; the run of a TorchTrainer
    worker; torch.distributed's default process group. The last two are joined by the first call of all their ranks.

    Raises ``GroupError`` where torch.distributed has several ranks and this process is not connected to Ray: each
    of them saving alone would be wrong.
    """
    if _entered.get():
        return _entered.get()[-1]
    if _joined is not None:
        return _joined
    return _train_group() or process_group_ranks(None)


def known_group() -> RankGroup | None:
    """The group that ``current_group`` gives, as far as this process has joined it by now. Makes no call."""
    if _entered.get():
        return _entered.get()[-1]
    if _joined is not None:
        return _joined
    lazily = tuple(_lazily_joined.values())
    return lazily[-1] if lazily else None


def process_group_ranks(process_group: Any) -> RankGroup | None:
    """The ranks of a torch.distributed process group (None: the default one) as a group; None if it has one rank."""
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized() or dist.get_world_size(process_group) < 2:
        return None
    require_own_connection()  # a fork has no connection of its own to the store either
    from ray_dcp.torch_private import default_process_group_store  # not before: this module starts without torch

    rank, world_size = dist.get_rank(process_group), dist.get_world_size(process_group)
    import ray

    if not ray.is_initialized():
        raise GroupError(
            f"torch.distributed has {world_size} ranks, but this process is not connected to Ray, through which they "
            "coordinate. Start Ray beside torchrun (`ray start --head`; on further nodes `ray start "
            '--address=HEAD:6379`) and call ray.init(address="auto") on every rank, or pass no_dist=True to act alone',
            group="torch.distributed",
        )
    members = "default" if process_group is None else "-".join(map(str, dist.get_process_group_ranks(process_group)))
    store = default_process_group_store()
    token = store.compare_set("ray_dcp/group", "", uuid.uuid4().hex).decode()
    name = f"torch-{token}-{members}"
    if (name, token) not in _lazily_joined:
        _close_groups_of_ended_process_groups(token)
        _require_one_cluster(store, rank)
    return _join_lazily(name, rank, world_size, token)


def _require_one_cluster(store: Any, rank: int) -> None:
    """Raise ``GroupError`` where ranks are in Ray clusters of their own, which would wait for each other in vain."""
    import ray

    node = ray.get_runtime_context().get_node_id()
    first = store.compare_set("ray_dcp/node", "", node).decode()
    if first != node and first not in {known["NodeID"] for known in ray.nodes()}:
        raise GroupError(
            f"rank {rank} is connected to another Ray cluster than the rank that came first: ray.init() without an "
            'address starts one for each process. Call ray.init(address="auto") on every rank',
            group="torch.distributed",
        )


def _close_groups_of_ended_process_groups(token: str) -> None:
    """Close groups of process groups that were destroyed: their coordinators would live on with this process."""
    with _lock:
        ended = [group for (name, old), group in _lazily_joined.items() if name.startswith("torch-") and old != token]
    for group in ended:
        group.close()


def _train_group() -> RankGroup | None:
    from ray_dcp.cluster.train_context import train_group_spec

    spec = train_group_spec()
    if spec is None:
        return None
    # A single worker joins, too: its newer generation shuts out a larger group that froze and comes back.
    return _join_lazily(spec.group, spec.rank, spec.world_size, spec.incarnation)


def _join_lazily(name: str, rank: int, world_size: int, incarnation: str) -> RankGroup:
    from ray_dcp.cluster.group import RankGroup

    require_own_connection()  # before the lock: another thread may have had it when this process was forked
    with _lock:
        key = (name, incarnation)
        if key not in _lazily_joined:
            before = _joined
            _lazily_joined[key] = RankGroup.join(
                name, rank=rank, world_size=world_size, timeout_s=_LAZY_JOIN_TIMEOUT_S, incarnation=incarnation
            )
            set_joined(before)
        return _lazily_joined[key]


def joined_groups() -> list[RankGroup]:
    """All groups that this process has joined and not closed, by itself or at its first save or load."""
    with _lock:
        joined = [*_lazily_joined.values(), *([_joined] if _joined is not None else [])]
    return list(dict.fromkeys(joined))


def set_joined(group: RankGroup | None) -> None:
    """Note that this process has joined ``group``, or no group (None); the one joined last counts."""
    global _joined
    _joined = group


def forget_joined(group: RankGroup) -> None:
    """Note that ``group`` is closed."""
    with _lock:
        for key in [key for key, joined in _lazily_joined.items() if joined is group]:
            del _lazily_joined[key]
    if _joined is group:
        set_joined(None)


def enter(group: RankGroup) -> None:
    _entered.set((*_entered.get(), group))


def leave(group: RankGroup) -> None:
    assert _entered.get()[-1] is group, "with-blocks are left in reverse order"
    _entered.set(_entered.get()[:-1])
