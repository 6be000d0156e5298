"""Steps that are kept in memory alone: no store knows of them, and what is whole there is what a run goes on from."""

from __future__ import annotations

import importlib
import logging

import pytest
import torch

import ray_dcp as dcp
from ray_dcp.errors import ConfigError
from ray_dcp.format.names import parse_shard_file
from ray_dcp.pace.interval import FIRST_AFTER_STEPS
from ray_dcp.protocol.memory_steps import KeptSteps
from ray_dcp.staging.buffer_errors import StagingMemoryError, StepNotKeptError
from ray_dcp.staging.shared_buffer import SharedBuffer
from tests.protocol import nodes_in_process
from tests.protocol.nodes_in_process import Nodes, RanksOnNodes
from tests.protocol.test_loads_from_memory import COLUMNS, Node, state_of, template_of, whole
from tests.ranks import ThreadGroup, ThreadRanks, require_no_errors
from tests.slack import within
from tests.staging.own_process import descriptors


class Run:
    """Two ranks with a manager each, whose node has an agent, and whoever goes on from what they leave."""

    def __init__(self, root) -> None:
        self.root = root
        self.node = Node()
        self.memory = self.node.deputies.agent.memory
        self.managers = [dcp.CheckpointManager(root, group=group, memory_every=1) for group in self.node.groups]

    def save(self, step, tier="memory"):
        """The responses of both ranks, which are done; a step's values are its number."""

        def save_rank(rank):
            response = self.managers[rank].async_save(step, state_of(rank, float(step)), {"loss": 0.5}, tier=tier)
            response.exception(within(60))
            return response

        return require_no_errors(self.node.ranks.run(save_rank))

    def load(self, num_ranks=1):
        """The step that other ranks go on from, and where the first one's bytes came from; all values are checked."""
        loading = ThreadRanks(num_ranks, deputies=self.node.deputies)
        groups = [ThreadGroup(loading, rank) for rank in range(num_ranks)]
        managers = [dcp.CheckpointManager(self.root, group=group) for group in groups]
        width = COLUMNS // num_ranks
        templates = [template_of(rank * width, width) for rank in range(num_ranks)]
        steps = require_no_errors(loading.run(lambda rank: managers[rank].load(templates[rank])))
        assert len(set(steps)) == 1
        if steps[0] is None:
            return None, set()
        for rank, template in enumerate(templates):
            expected = whole(float(steps[0]))
            got = template["rows"].chunks[(0, rank * width)]
            assert torch.equal(got, expected["rows"][:, rank * width : (rank + 1) * width])
            assert torch.equal(template["small"], expected["small"])
            assert template["python"] == expected["python"]
        return steps[0], {place for place, nbytes in managers[0].last_load.nbytes_by_place.items() if nbytes}

    def held(self, step):
        return self.memory.held(str(self.root / f"step-{step:08d}"))


@pytest.fixture
def run(tmp_path):
    before = descriptors()
    run = Run(tmp_path / "root")
    yield run
    run.node.close()
    assert descriptors() == before


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_a_step_in_memory_is_loaded_bit_for_bit_and_no_store_knows_of_it(run, num_ranks, caplog):
    for step in (1, 2):
        assert [response.skipped for response in run.save(step)] == [False] * 2
    assert not run.root.exists()
    assert (run.held(1), len(run.held(2))) == ((), 2)
    with caplog.at_level(logging.INFO, logger="ray_dcp"):
        assert run.load(num_ranks) == (2, {"memory"})
    assert "step 2 is loaded from memory; there is none in storage" in caplog.text
    assert not run.root.exists()


def test_a_save_in_memory_opens_no_store_and_has_nothing_swept_behind_it(run, monkeypatch):
    opened, ended = [], []
    for module in ("ray_dcp.write.writer", "ray_dcp.protocol.node_agent"):
        open_it = importlib.import_module(module).open_store
        monkeypatch.setattr(f"{module}.open_store", lambda place, of=open_it: opened.append(place) or of(place))
    monkeypatch.setattr("ray_dcp.manager.require_root", opened.append)
    coordinator = run.node.ranks.coordinator
    coordinator._on_save_ended = lambda place, committed: ended.append((place, committed))
    run.save(1)
    assert (opened, ended) == ([], [])
    run.save(2, "storage")
    assert run.managers[0].checkpoint_id(2) in opened
    assert ended == [(run.managers[0].checkpoint_id(2), True)]


def test_a_step_that_is_copied_beside_the_training_is_kept_as_well(run):
    def save_rank(rank):
        manager = run.managers[rank]
        return manager.async_save(1, state_of(rank, 1.0), tier="memory", overlap=True).exception(within(60))

    assert require_no_errors(run.node.ranks.run(save_rank)) == [None] * 2
    assert run.load() == (1, {"memory"})


def test_a_newer_step_in_storage_is_what_counts_and_lets_go_of_those_in_memory(run):
    run.save(1)
    run.save(2, "storage")
    assert run.held(1) == ()
    assert run.load() == (2, {"memory"})
    run.memory.close()
    assert run.load() == (2, {"storage"})
    run.save(3)
    assert run.load() == (3, {"memory"})
    assert [info.step for info in run.managers[0].list()] == [run.managers[0].latest().step] == [2]


def forget(run, step, rank):
    """Have the agent lose what ``rank`` has staged for ``step``."""
    for file in run.held(step):
        if parse_shard_file(file.key).rank == rank:
            with SharedBuffer.attach(file.buffer) as buffer:
                buffer.renew()


def test_a_step_of_which_a_file_is_missing_does_not_count(run, caplog):
    run.save(1, "storage")
    run.save(2)
    forget(run, 2, rank=1)
    assert run.load(2) == (1, {"storage"})
    assert "going on with" not in caplog.text, "nobody has tried to load it"


def test_an_older_step_in_memory_does_not_count_beside_one_that_agents_know_nothing_of(run):
    run.save(1)
    require_no_errors(run.node.ranks.run(lambda rank: run.managers[rank].save(2, state_of(rank, 2.0))))
    assert len(run.held(1)) == 2
    assert run.load() == (2, {"storage"})


def lose_when_opened(run, step, monkeypatch, lose):
    """Lose something of ``step`` when a rank has been told that it is there."""
    deputies, held = run.node.deputies, run.node.deputies.held

    def held_and_lost(place):
        found = held(place)
        if place.endswith(f"{step:08d}"):
            lose(found)
        return found

    monkeypatch.setattr(deputies, "held", held_and_lost)


def overwrite(files):
    for file in files:
        with SharedBuffer.attach(file.buffer) as buffer:
            buffer.renew()


def flip(files):
    for file in files:
        with SharedBuffer.attach(file.buffer) as buffer:
            for at in range(1024, file.nbytes, 4096):
                buffer.memory[at] = 0xA5


@pytest.mark.parametrize("lose", [overwrite, flip])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_what_is_lost_or_wrong_by_then_has_all_ranks_load_the_newest_in_storage(
    run, monkeypatch, caplog, lose, num_ranks
):
    run.save(1, "storage")
    run.save(2)
    lose_when_opened(run, 2, monkeypatch, lose)
    assert run.load(num_ranks) == (1, {"storage"})
    assert "going on with step 1" in caplog.text


def test_where_storage_has_nothing_that_is_an_error(run, monkeypatch):
    """The template may be half filled by then: the run must not begin with that."""
    run.save(2)
    lose_when_opened(run, 2, monkeypatch, overwrite)
    with pytest.raises(dcp.CheckpointException, match="its file is missing"):
        run.load()


@pytest.mark.parametrize("replicas", [0, 1])
def test_what_other_nodes_have_counts_and_is_read_from_there(tmp_path, replicas):
    nodes = Nodes(2)
    managers = [dcp.CheckpointManager(tmp_path / "root", group=group, replicas=replicas) for group in nodes.groups]

    def save_rank(rank):
        state = nodes_in_process.state_of(rank, 2, 1.0)
        return managers[rank].async_save(1, state, tier="memory").exception(within(60))

    def load_on(names):
        """The step, and where the bytes of the last rank came from."""
        ranks = RanksOnNodes([nodes.by_name[name] for name in names])
        loading = [
            dcp.CheckpointManager(tmp_path / "root", group=ThreadGroup(ranks, rank)) for rank in range(len(names))
        ]
        templates = [nodes_in_process.template_of(0, nodes_in_process.COLUMNS, 2) for _ in names]
        steps = require_no_errors(ranks.run(lambda rank: loading[rank].load(templates[rank])))
        if steps[-1] is None:
            return None, set()
        rows = templates[-1]["rows"].chunks[(0, 0)]
        assert torch.equal(rows, nodes_in_process.whole(2, 1.0)["rows"])
        return steps[-1], {place for place, nbytes in loading[-1].last_load.nbytes_by_place.items() if nbytes}

    try:
        assert require_no_errors(nodes.ranks.run(save_rank)) == [None] * 2
        nodes.settle()
        assert load_on("ab") == (1, {"memory"} if replicas else {"memory", "peer"})
        nodes.lose("a")
        assert load_on("b") == ((1, {"memory"}) if replicas else (None, set()))
    finally:
        nodes.close()


def test_one_rank_that_knows_of_the_commit_is_enough_and_none_is_not(run):
    run.save(1, "storage")
    run.save(2)
    (kept,) = run.memory.kept_under(str(run.root))
    (step,) = KeptSteps([kept]).steps
    assert (step.step, step.has, step.needs) == (2, step.needs, {file.key for file in kept.files})
    run.memory._answers.clear()
    assert run.load(2) == (1, {"storage"})


def test_an_answer_that_cannot_be_read_is_left_with_a_warning(run, caplog):
    run.save(1, "storage")
    run.save(2)
    run.memory._answers = {save: b"\x80 not one" for save in run.memory._answers}
    assert run.load() == (1, {"storage"})
    assert "is of no use" in caplog.text


def test_a_rank_that_can_keep_nothing_has_all_skip_the_step(run, monkeypatch, caplog):
    monkeypatch.setenv("RAY_DCP_MEMORY_TIER", "0")
    for step in (1, 2):
        for response in run.save(step):
            assert response.skipped
            assert isinstance(response.exception(), StepNotKeptError)
    assert caplog.text.count("RAY_DCP_MEMORY_TIER=0") == 2, "once by each manager"
    assert all(response.done() for response in run.save(3, "storage"))
    assert run.load()[0] == 3


def test_a_process_alone_skips_the_step(tmp_path, caplog):
    manager = dcp.CheckpointManager(tmp_path / "root", memory_every=1)
    assert manager.due(1).tier == "memory"
    response = manager.async_save(1, {"w": torch.ones(3)})
    assert response.skipped
    assert "saves alone" in caplog.text
    manager.wait()
    assert not (tmp_path / "root").exists()


@pytest.mark.parametrize("failing", ["take", "staging", "told"])
def test_whatever_fails_after_the_plan_is_no_failure_of_the_run(run, monkeypatch, failing):
    """No agent, no memory, or an agent that is gone: told as a skipped step, and the next one is kept."""

    def no_memory(*args, **options):
        raise StagingMemoryError(nbytes=1, available_nbytes=0, reason="none")

    with monkeypatch.context() as patch:
        if failing == "take":
            patch.setattr(run.node.deputies, "take", lambda job, wait: None)
        elif failing == "staging":
            patch.setattr(run.node.groups[1].background.buffers, "take", no_memory)
        else:
            patch.setattr(run.node.deputies, "take", lambda job, wait: None if job.handed_over.rank else
                          run.node.deputies.agent.take(job))  # fmt: skip
        for response in run.save(1):
            assert response.skipped
            assert isinstance(response.exception(), StepNotKeptError)
    assert run.load() == (None, set())
    run.save(2)
    assert run.load() == (2, {"memory"})
    for manager in run.managers:
        manager.wait()


def test_ranks_that_name_different_tiers_are_told(run):
    def save_rank(rank):
        tier = ("memory", "storage")[rank]
        return run.managers[rank].async_save(1, state_of(rank, 1.0), tier=tier)

    for error in run.node.ranks.run(save_rank):
        assert isinstance(error, dcp.CheckpointException)
        assert "rank 0 of 2 keep this step in memory" in str(error)


def test_a_state_that_cannot_be_saved_raises_as_ever(run):
    for error in run.node.ranks.run(lambda rank: run.managers[rank].async_save(1, {1: 2, "1": 3}, tier="memory")):
        assert isinstance(error, dcp.CheckpointException)


def test_due_says_the_tier_and_async_save_goes_by_it(run):
    step = 0
    for step in range(FIRST_AFTER_STEPS + 2):
        due = [manager.due(step) for manager in run.managers]
        tier = "storage" if step == FIRST_AFTER_STEPS else "memory"
        assert [(bool(one), one.tier) for one in due] == [(True, tier)] * 2
        run.save(step, tier=None)
        assert [info.step for info in run.managers[0].list()] == (
            [FIRST_AFTER_STEPS] if step >= FIRST_AFTER_STEPS else []
        )
    assert run.load() == (step, {"memory"})
    assert "in memory is due (memory_every=1), one to storage at step" in run.managers[0].due(step).why


def test_every_third_step_and_none_without_a_word():
    manager = dcp.CheckpointManager("/nowhere", memory_every=3)
    assert [manager.due(step).tier for step in range(1, 8)] == [None, None, "memory", None, None, "memory", None]
    manager = dcp.CheckpointManager("/nowhere")
    assert [manager.due(step).tier for step in range(1, 8)] == [None] * 7
    with pytest.raises(ConfigError, match="memory_every"):
        dcp.CheckpointManager("/nowhere", memory_every=0)
    with pytest.raises(ConfigError, match="tier"):
        manager.async_save(1, {}, tier="tape")


def test_a_run_that_goes_on_from_memory_keeps_the_rhythm_of_storage(run):
    run.save(1, "storage")
    run.save(2)
    loading = ThreadRanks(1, deputies=run.node.deputies)
    manager = dcp.CheckpointManager(run.root, group=ThreadGroup(loading, 0), memory_every=1)
    assert manager.load(template_of(0, COLUMNS)) == 2
    assert manager.due(3).next_step == 1 + FIRST_AFTER_STEPS
