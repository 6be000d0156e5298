"""Several nodes in this process: a rank and an agent each, and a way between agents on which things go wrong."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

import ray_dcp as dcp
from ray_dcp.format.names import BLOCK_NBYTES
from ray_dcp.protocol.coordinator.coordinator import Coordinator
from ray_dcp.protocol.node_agent import NodeAgent
from ray_dcp.protocol.rank.background import BackgroundSaves
from ray_dcp.staging.peers.peer import PeerFile, PeerGoneError, PeerLostError, peers_of
from tests.protocol.handed_saves import DirectLink
from tests.ranks import ThreadGroup, ThreadRanks, require_no_errors
from tests.slack import within

COLUMNS = BLOCK_NBYTES // 2
"""So many that a rank's row is two blocks, which are sealed."""


class OneNode:
    """An agent, as the ranks of its node and as the agents of other nodes have it."""

    def __init__(self, node: str, nodes: dict[str, OneNode], coordinator: Coordinator) -> None:
        self.node, self._nodes = node, nodes
        self.zone = ""
        self.is_lost = False
        self.on_read: Callable[[int], Any] = lambda number: None
        """What happens before a chunk is sent from here; it may raise, or return what is sent in its place."""
        self.on_offer: Callable[[], Any] = lambda: None
        self.num_reads = 0
        self.asked = 0
        self.agent = NodeAgent(
            DirectLink([coordinator], f"agent-{node}", patience_s=within(60)), pulse_s=within(60), others=self
        )

    # To ranks of the node: ``Deputies``.

    def ready(self, *, wait):
        return True

    def take(self, job, *, wait):
        return self.agent.take(job)

    def told(self, job, look):
        return self.agent.told(job.handed_over.call_id, job.handed_over.rank)

    def held(self, place):
        return self.agent.memory.held(place)

    def kept_under(self, root):
        return self.agent.kept_under(root)

    def held_by_peers(self, place, keys=()):
        self.asked += 1
        others = [one for one in self._others() if not one.is_lost]
        return [PeerFile(file, one) for one in others for file in one.agent.memory.held(place)]

    # To its agent: ``OtherNodes``.

    def keepers(self):
        return self._others()

    def find(self, node):
        if self.is_lost:
            raise PeerGoneError("it is this node that is lost")
        return self._nodes[node]

    def _others(self):
        names = peers_of(self.node, {name: one.zone for name, one in self._nodes.items()})
        return [self._nodes[name] for name in names]

    # To other nodes: ``Peer`` and ``CopyKeeper``.

    def begin(self, file, offset, nbytes):
        return functools.partial(self._read, file, offset, nbytes)

    def _read(self, file, offset, nbytes):
        self.num_reads += 1
        sent = None if self.is_lost else self.on_read(self.num_reads)
        if self.is_lost:
            raise PeerGoneError("it has not answered for 5 s")
        sent = sent or self.agent.memory.read(file, offset, nbytes)
        if sent is None:
            raise PeerLostError("it does not have the file in memory any more")
        return sent

    def take_copy(self, offer):
        self.on_offer()
        if self.is_lost:
            raise PeerGoneError("it has not answered for 5 s")
        return self.agent.copies.take(offer)

    def left(self, rank):
        self.agent.memory.left(rank)


class RanksOnNodes(ThreadRanks):
    """Ranks of which each has the agent of its node."""

    def __init__(self, nodes: list[OneNode], **options: Any) -> None:
        self.nodes = nodes
        super().__init__(len(nodes), **options)

    def call(self, rank, *args, **options):
        call = super().call(rank, *args, **options)
        call._deputies = self.nodes[rank]
        return call


class Nodes:
    """A group with one rank on each of some nodes."""

    def __init__(self, num_nodes: int) -> None:
        coordinator = Coordinator("threads")
        self.by_name: dict[str, OneNode] = {}
        for name in "abcdef"[:num_nodes]:
            self.by_name[name] = OneNode(name, self.by_name, coordinator)
        self.nodes = list(self.by_name.values())
        self.ranks = RanksOnNodes(self.nodes, coordinator=coordinator)
        self.groups = [ThreadGroup(self.ranks, rank) for rank in range(num_nodes)]
        for group in self.groups:
            group.background = BackgroundSaves(spares_newest=True)

    def save(self, place: Any, value: float) -> None:
        """Save, and have all copies made, or given up."""

        def save_rank(rank: int) -> None:
            state = state_of(rank, len(self.nodes), value)
            dcp.async_save(state, checkpoint_id=place, group=self.groups[rank]).result(within(60))

        require_no_errors(self.ranks.run(save_rank))
        self.settle()

    def settle(self) -> None:
        for node in self.nodes:
            assert node.agent.offers.wait(within(30))
        for node in self.nodes:
            assert node.agent.copies.wait(within(30))

    def load(self, place: Any, on_nodes: str, value: float) -> list[dcp.LoadReport]:
        """The reports of a load by new ranks on these nodes; all values are those of ``value``."""
        loading = RanksOnNodes([self.by_name[name] for name in on_nodes])
        width = COLUMNS // len(on_nodes)
        templates = [template_of(rank * width, width, len(self.nodes)) for rank in range(len(on_nodes))]
        reports = require_no_errors(loading.load(templates, place))
        for rank, template in enumerate(templates):
            expected = whole(len(self.nodes), value)["rows"][:, rank * width : (rank + 1) * width]
            assert torch.equal(template["rows"].chunks[(0, rank * width)], expected)
            assert torch.equal(template["small"], torch.arange(7.0) + value)
            assert template["python"] == {"value": value}
        return reports

    def sources(self, place: Any, on_nodes: str, value: float) -> list[set[str]]:
        """Where the bytes of each rank of such a load came from."""
        reports = self.load(place, on_nodes, value)
        return [{kind for kind, nbytes in report.nbytes_by_place.items() if nbytes} for report in reports]

    def lose(self, name: str) -> None:
        self.by_name[name].is_lost = True

    def close(self) -> None:
        for group in self.groups:
            group.background.buffers.close()
        for node in self.nodes:
            node.agent.copies.let_go()
            assert node.agent.copies.wait(within(30))
            node.agent.memory.close()


def whole(num_rows: int, value: float) -> dict[str, Any]:
    rows = torch.arange(float(num_rows * COLUMNS)).reshape(num_rows, COLUMNS) + value
    return {"rows": rows, "small": torch.arange(7.0) + value, "python": {"value": value}}


def state_of(rank: int, world_size: int, value: float) -> dict[str, Any]:
    state = whole(world_size, value)
    row = state["rows"][rank : rank + 1].clone()
    return {**state, "rows": dcp.LocalShards((world_size, COLUMNS), {(rank, 0): row})}


def template_of(first: int, width: int, num_rows: int) -> dict[str, Any]:
    rows = dcp.LocalShards((num_rows, COLUMNS), {(0, first): torch.full((num_rows, width), float("nan"))})
    return {"rows": rows, "small": torch.zeros(7), "python": None}
