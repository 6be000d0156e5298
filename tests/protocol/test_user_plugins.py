"""Plug-ins written for torch do the same under ray_dcp: alone, on several ranks, and through Ray actors."""

from __future__ import annotations

import pickle
import warnings
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.staging import BlockingAsyncStager, DefaultStager, StagingOptions

import ray_dcp as dcp
from ray_dcp import CheckpointException, LocalShards
from ray_dcp.errors import StateDictError, UnsafeDataError
from ray_dcp.planning.save_plan.state_planner import for_global_step
from ray_dcp.protocol.messages import carry
from ray_dcp.protocol.rank.save import save
from ray_dcp.protocol.rank.user_staging import staged_by, when_staged
from ray_dcp.protocol.steps import default_save_planner
from tests.protocol import plugins
from tests.ranks import ThreadRanks, require_no_errors, save_request
from tests.shardings import same_bits

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:The function definition for SavePlanner.set_up_planner"),
    pytest.mark.filterwarnings("ignore:Detected an existing checkpoint"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated"),
]

NAN = float("nan")


def state():
    return {"w": torch.arange(1.0, 13.0).reshape(4, 3) / 3, "b": torch.tensor(0.1), "n": [1, ("x", None)], "z": "text"}


def template(dtype=torch.float32):
    return {"w": torch.full((4, 3), NAN, dtype=dtype), "b": torch.tensor(NAN, dtype=dtype), "n": None, "z": ""}


def same(a, b) -> bool:
    return a.keys() == b.keys() and all(
        same_bits(a[k], b[k]) if isinstance(a[k], torch.Tensor) else a[k] == b[k] for k in a
    )


# The same save and load in four ways. ``make`` makes the plug-ins of one rank: (planner, writer) or (planner, reader).


def save_with_torch(place, make):
    planner, writer = make(place)
    return torch_dcp.save(state(), checkpoint_id=place, storage_writer=writer, planner=planner, no_dist=True)


def save_alone(place, make):
    planner, writer = make(place)
    return dcp.save(state(), checkpoint_id=place, storage_writer=writer, planner=planner, no_dist=True)


def save_on_threads(place, make):
    ranks = ThreadRanks(3)

    def on_rank(rank):
        planner, writer = make(place)
        return ranks.save_rank(rank, state(), place, planner=planner, writer=writer)

    return require_no_errors(ranks.run(on_rank))[0]


def load_with_torch(place, make, filled):
    planner, reader = make(place)
    torch_dcp.load(filled, checkpoint_id=place, storage_reader=reader, planner=planner, no_dist=True)
    return filled


def load_alone(place, make, filled):
    planner, reader = make(place)
    dcp.load(filled, checkpoint_id=place, storage_reader=reader, planner=planner, no_dist=True)
    return filled


def load_on_threads(place, make, filled):
    ranks = ThreadRanks(2)
    templates = [filled, pickle.loads(pickle.dumps(filled))]

    def on_rank(rank):
        planner, reader = make(place)
        return ranks.load_rank(rank, templates[rank], place, planner=planner, reader=reader)

    require_no_errors(ranks.run(on_rank))
    assert same(*templates)
    return filled


def save_on(ranks, place, values, planners):
    """Save with a planner a rank; the metadata."""
    outcomes = ranks.run(lambda rank: ranks.save_rank(rank, values, place, planner=planners[rank]))
    return require_no_errors(outcomes)[0]


OUR_SAVES = {"alone": save_alone, "threads": save_on_threads}
OUR_LOADS = {"alone": load_alone, "threads": load_on_threads}
LOADS = OUR_LOADS | {"torch": load_with_torch}


def facts(metadata):
    """What a plug-in has a say in."""
    return metadata.state_dict_metadata, metadata.planner_data, {index.fqn for index in metadata.storage_data}


def torch_reader(place):
    return None, FileSystemReader(place)


class TestSavePlanners:
    """Each with torch's own writer and with ray_dcp's."""

    MAKERS = (
        plugins.RenamingSavePlanner,
        plugins.HalfPlanner,
        plugins.SecretlyHalfPlanner,
        plugins.OldPlanner,
        plugins.RememberingPlanner,
        DefaultSavePlanner,
    )

    @pytest.mark.parametrize("save", OUR_SAVES)
    @pytest.mark.parametrize("writer", [FileSystemWriter, dcp.StoreWriter])
    @pytest.mark.parametrize("planner", MAKERS, ids=lambda made: made.__name__)
    def test_the_metadata_and_the_values_are_as_under_torch(self, tmp_path, planner, writer, save):
        expected = save_with_torch(tmp_path / "torch", lambda place: (planner(), FileSystemWriter(place)))
        metadata = OUR_SAVES[save](tmp_path / "ours", lambda place: (planner(), writer(place)))
        assert facts(metadata) == facts(expected)
        assert facts(FileSystemReader(tmp_path / "ours").read_metadata()) == facts(expected)
        loaded = [self._load_all(tmp_path / which, expected) for which in ("torch", "ours")]
        assert same(*loaded)

    @staticmethod
    def _load_all(place, metadata):
        """Whatever is there, as stock torch reads it."""
        values = {
            fqn: torch.zeros(saved.size, dtype=saved.properties.dtype) if hasattr(saved, "size") else None
            for fqn, saved in metadata.state_dict_metadata.items()
        }
        torch_dcp.load(values, checkpoint_id=place, no_dist=True)
        return values

    def test_casting_changes_what_is_stored(self, tmp_path):
        """So that the comparison above compares something."""
        metadata = save_alone(tmp_path, lambda place: (plugins.HalfPlanner(), dcp.StoreWriter(place)))
        assert metadata.state_dict_metadata["w"].properties.dtype == torch.float16
        filled = template(torch.float16)
        dcp.load(filled, checkpoint_id=tmp_path, no_dist=True)
        assert same_bits(filled["w"], state()["w"].half())
        save_alone(tmp_path / "s", lambda place: (plugins.SecretlyHalfPlanner(), dcp.StoreWriter(place)))
        filled = template()
        dcp.load(filled, checkpoint_id=tmp_path / "s", no_dist=True)
        assert same_bits(filled["w"], state()["w"].half().float())

    @pytest.mark.parametrize("writer", [FileSystemWriter, dcp.StoreWriter])
    def test_what_each_rank_adds_to_the_metadata_arrives_in_rank_order(self, tmp_path, writer):
        ranks = ThreadRanks(3)
        outcomes = ranks.run(
            lambda rank: ranks.save_rank(
                rank, state(), tmp_path, planner=plugins.ExtraDataPlanner({"of": rank}), writer=writer(tmp_path)
            )
        )
        (metadata, *_) = require_no_errors(outcomes)
        expected = [{"of": 0}, {"of": 1}, {"of": 2}]
        assert metadata.planner_data == expected
        assert FileSystemReader(tmp_path).read_metadata().planner_data == expected
        assert same(load_alone(tmp_path, lambda place: (None, None), template()), state())

    def test_an_object_that_a_planner_keeps_in_the_metadata_needs_trust(self, tmp_path):
        dcp.save(state(), checkpoint_id=tmp_path, planner=plugins.ExtraDataPlanner(Path("x")), no_dist=True)
        dcp.load(template(), checkpoint_id=tmp_path, no_dist=True)  # a path is plain enough
        dcp.save(state(), checkpoint_id=tmp_path, planner=plugins.ExtraDataPlanner(torch.Generator), no_dist=True)
        with pytest.raises(CheckpointException) as caught:
            dcp.load(template(), checkpoint_id=tmp_path, no_dist=True)
        assert isinstance(caught.value.__cause__, UnsafeDataError)
        assert "trusted=True" in str(caught.value)
        filled = template()
        dcp.load(filled, checkpoint_id=tmp_path, no_dist=True, trusted=True)
        assert same(filled, state())


class TestLoadPlanners:
    @pytest.mark.parametrize("load", LOADS)
    @pytest.mark.parametrize("reader", [FileSystemReader, dcp.StoreReader])
    def test_names_are_changed_back(self, tmp_path, load, reader):
        save_alone(tmp_path, lambda place: (plugins.RenamingSavePlanner(), dcp.StoreWriter(place)))
        filled = LOADS[load](tmp_path, lambda place: (plugins.RenamingLoadPlanner(), reader(place)), template())
        assert same(filled, state())

    @pytest.mark.parametrize("load", LOADS)
    @pytest.mark.parametrize("reader", [FileSystemReader, dcp.StoreReader])
    @pytest.mark.parametrize(
        "planner",
        [plugins.RememberingLoadPlanner, plugins.MaterializingLoadPlanner, torch_dcp.DefaultLoadPlanner],
        ids=lambda made: made.__name__,
    )
    def test_the_values_are_as_under_torch(self, tmp_path, load, planner, reader):
        save_alone(tmp_path, lambda place: (None, dcp.StoreWriter(place)))
        filled = LOADS[load](tmp_path, lambda place: (planner(), reader(place)), template())
        assert same(filled, state())

    def test_code_in_a_python_object_does_not_reach_a_users_planner(self, tmp_path):
        class Touch:
            def __reduce__(self):
                return Path.touch, (tmp_path / "touched",)

        dcp.save({"n": Touch()}, checkpoint_id=tmp_path / "c", no_dist=True)
        with pytest.raises(CheckpointException) as caught:
            dcp.load({"n": 0}, checkpoint_id=tmp_path / "c", planner=plugins.RememberingLoadPlanner(), no_dist=True)
        assert isinstance(caught.value.__cause__, UnsafeDataError)
        assert not (tmp_path / "touched").exists()

    def test_a_planner_that_makes_up_its_own_template_gives_it_to_the_caller(self, tmp_path):
        from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner

        save_alone(tmp_path, lambda place: (None, None))
        filled = {}
        dcp.load(filled, checkpoint_id=tmp_path, planner=_EmptyStateDictLoadPlanner(), no_dist=True)
        assert same(filled, state())


PAIRS = {
    "a .pt file an item": (plugins.PtFolderWriter, plugins.PtFolderReader),
    "one pickle": (plugins.OneFileWriter, plugins.OneFileReader),
    "counts": (plugins.CountingWriter, plugins.PtFolderReader),
    "torch's, extended": (plugins.SigningWriter, plugins.SignedReader),
    "torch's, two threads": (lambda place: FileSystemWriter(place, thread_count=2), FileSystemReader),
    "torch's, a file an item": (lambda place: FileSystemWriter(place, single_file_per_rank=False), FileSystemReader),
    "tells where it is": (plugins.StorageMetaWriter, plugins.PtFolderReader),
}


class TestStorage:
    @pytest.mark.parametrize("load", LOADS)
    @pytest.mark.parametrize("save", OUR_SAVES)
    @pytest.mark.parametrize("pair", PAIRS)
    def test_what_is_written_is_as_under_torch_and_is_read_back(self, tmp_path, pair, save, load):
        make_writer, make_reader = PAIRS[pair]
        expected = save_with_torch(tmp_path / "torch", lambda place: (None, make_writer(place)))
        metadata = OUR_SAVES[save](tmp_path / "ours", lambda place: (None, make_writer(place)))
        assert facts(metadata) == facts(expected)
        assert facts(make_reader(tmp_path / "ours").read_metadata()) == facts(expected)
        filled = LOADS[load](tmp_path / "ours", lambda place: (None, make_reader(place)), template())
        assert same(filled, state())

    @pytest.mark.parametrize("pair", PAIRS)
    def test_shards_are_read_back_at_another_world_size(self, tmp_path, pair):
        make_writer, make_reader = PAIRS[pair]
        values = torch.arange(24.0).reshape(8, 3)
        saving, loading = ThreadRanks(4), ThreadRanks(3)
        require_no_errors(
            saving.run(
                lambda rank: saving.save_rank(
                    rank,
                    {"t": LocalShards((8, 3), {(2 * rank, 0): values[2 * rank : 2 * rank + 2].clone()})},
                    tmp_path / "c",
                    writer=make_writer(tmp_path / "c"),
                )
            )
        )
        spans = [(0, 3), (3, 6), (6, 8)]
        templates = [{"t": LocalShards((8, 3), {(a, 0): torch.full((b - a, 3), NAN)})} for a, b in spans]
        require_no_errors(
            loading.run(
                lambda rank: loading.load_rank(
                    rank, templates[rank], tmp_path / "c", reader=make_reader(tmp_path / "c")
                )
            )
        )
        for (a, b), filled in zip(spans, templates, strict=True):
            assert torch.equal(filled["t"].chunks[a, 0], values[a:b])

    def test_a_checkpoint_id_need_be_no_path_for_a_users_storage(self, tmp_path, monkeypatch):
        """It arrives as it was given, not made absolute."""

        class Named(plugins.PtFolderWriter):
            def reset(self, checkpoint_id=None):
                self.path = {"run-7/best": tmp_path / "there"}[checkpoint_id]

        class NamedReader(plugins.PtFolderReader):
            reset = Named.reset

        dcp.save(state(), checkpoint_id="run-7/best", storage_writer=Named("x"), no_dist=True)
        filled = template()
        dcp.load(filled, checkpoint_id="run-7/best", storage_reader=NamedReader("x"), no_dist=True)
        assert same(filled, state())

    @pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
    def test_items_that_torchs_writer_loses_fail_the_save(self, tmp_path):
        lost = torch_dcp.save(state(), storage_writer=plugins.HalfSilentWriter(tmp_path / "torch"), no_dist=True)
        assert len(lost.storage_data) < len(lost.state_dict_metadata)  # torch notices nothing
        with pytest.raises(CheckpointException) as caught:
            dcp.save(state(), storage_writer=plugins.HalfSilentWriter(tmp_path / "ours"), no_dist=True)
        assert isinstance(caught.value.__cause__, StateDictError)
        assert "planned items were never written; nothing was committed" in str(caught.value)
        assert not (tmp_path / "ours" / ".metadata").exists()


class TestTravel:
    """Planner, writer and reader of rank 0 go to the coordinator, without what they hold."""

    @pytest.mark.parametrize("planner", [DefaultSavePlanner, plugins.RenamingSavePlanner, plugins.RememberingPlanner])
    def test_a_planner_used_again_takes_no_tensors_along(self, tmp_path, planner):
        made = planner()
        values = {f"layer.{n}": torch.zeros(2**17) for n in range(16)}  # 8 MiB
        for number in range(2):
            dcp.save(values, checkpoint_id=tmp_path / str(number), planner=made, no_dist=True)
        assert len(carry(made).pickled) < 100_000

    def test_our_own_planner_takes_nothing_along(self):
        planner = default_save_planner(DefaultSavePlanner(dedup_save_to_lowest_rank=True))
        planner.set_up_planner({f"n{n}": "x" * 1000 for n in range(1000)}, None, True)
        planner.create_local_plan()
        assert len(carry(for_global_step(planner)).pickled) < 1000

    def test_tensors_arrive_as_meta_tensors_of_their_shape(self):
        class Holder:
            def __init__(self):
                self.parts = {"w": torch.zeros(2**20), "view": torch.zeros(2**20)[:3].half(), "fp8": None}
                self.parts["fp8"] = torch.zeros(5).to(torch.float8_e4m3fn)

        carried = carry(Holder())
        assert len(carried.pickled) < 10_000
        (arrived,) = carried.unpack()
        assert [(p.device.type, tuple(p.shape), p.dtype) for p in arrived.parts.values()] == [
            ("meta", (2**20,), torch.float32),
            ("meta", (3,), torch.float16),
            ("meta", (5,), torch.float8_e4m3fn),
        ]

    @pytest.mark.parametrize("kind", [plugins.RememberingPlanner, plugins.RenamingSavePlanner, DefaultSavePlanner])
    def test_a_planner_may_be_used_again_on_several_ranks_with_another_state(self, tmp_path, kind):
        ranks, planners = ThreadRanks(2), [kind() for _ in range(2)]
        for number, size in enumerate((4, 6)):
            place, values = tmp_path / str(number), {"w": torch.full((size,), float(number)), "n": number}
            save_on(ranks, place, values, planners)
            saved = FileSystemReader(place).read_metadata().state_dict_metadata
            assert [tuple(s.size) for name, s in saved.items() if name.endswith("w")] == [(size,)]

    @pytest.mark.parametrize(
        ("writer", "reader"),
        [
            (plugins.LockingWriter, plugins.PtFolderReader),
            (plugins.LockingWriter, plugins.LockingReader),
            (plugins.LoggingWriter, plugins.PtFolderReader),
            (plugins.LockingStoreWriter, dcp.StoreReader),
        ],
    )
    @pytest.mark.parametrize("planner", [plugins.LockingPlanner, plugins.RememberingPlanner, lambda: None])
    @pytest.mark.parametrize("save", OUR_SAVES)
    @pytest.mark.parametrize("load", OUR_LOADS)
    def test_what_cannot_be_pickled_works_all_the_same(self, tmp_path, writer, reader, planner, save, load):
        metadata = OUR_SAVES[save](tmp_path / "c", lambda place: (planner(), writer(place)))
        assert metadata.state_dict_metadata.keys() == state().keys()
        filled = OUR_LOADS[load](tmp_path / "c", lambda place: (None, reader(place)), template())
        assert same(filled, state())

    @pytest.mark.parametrize("save", OUR_SAVES)
    def test_a_writer_is_set_up_once_a_rank_and_finished_once(self, tmp_path, save):
        made = []

        def make(place):
            made.append(plugins.LoggingWriter(place))
            return None, made[-1]

        OUR_SAVES[save](tmp_path, make)
        for writer in made:
            writer.log.close()
        logs = [path.read_text() for path in sorted(tmp_path.glob("log-*"))]
        assert logs == ["set up\nfinished\n"] + ["set up\n"] * (2 if save == "threads" else 0)

    @pytest.mark.parametrize("world_size", [1, 2])
    def test_a_writer_that_cannot_finish_fails_every_rank_and_the_next_save_works(self, tmp_path, world_size):
        ranks = ThreadRanks(world_size)
        outcomes = ranks.run(
            lambda rank: ranks.save_rank(rank, state(), tmp_path, writer=plugins.FailingInFinish(tmp_path))
        )
        for outcome in outcomes:
            assert isinstance(outcome, CheckpointException)
            assert outcome.phase == "commit"
            assert isinstance(outcome.__cause__, ConnectionError)
        save_on(ranks, tmp_path, state(), [None] * world_size)

    @pytest.mark.parametrize("error", [RuntimeError, ValueError, NotImplementedError, KeyError])
    def test_whatever_pickling_raises_keeps_it_on_rank_zero(self, tmp_path, error):
        class Odd(DefaultSavePlanner):
            def __reduce__(self):
                raise error("no")

        ranks = ThreadRanks(2)
        save_on(ranks, tmp_path, state(), [Odd(), Odd()])
        filled = template()
        dcp.load(filled, checkpoint_id=tmp_path, no_dist=True)
        assert same(filled, state())


class TestPlanCache:
    @pytest.mark.parametrize("kind", [DefaultSavePlanner, plugins.RememberingPlanner])
    @pytest.mark.parametrize("world_size", [1, 2])
    def test_torchs_plan_cache_does_not_survive_a_change_of_dtype(self, tmp_path, kind, world_size):
        ranks = ThreadRanks(world_size)
        planners = [kind(enable_plan_caching=True) for _ in range(world_size)]
        for number, dtype in enumerate((torch.float32, torch.bfloat16, torch.bfloat16, torch.int64)):
            place, values = tmp_path / str(number), {"w": torch.full((4,), number, dtype=dtype), "n": number}
            metadata = save_on(ranks, place, values, planners)
            assert metadata.state_dict_metadata["w"].properties.dtype == dtype
            filled = {"w": torch.zeros(4, dtype=dtype), "n": None}
            torch_dcp.load(filled, checkpoint_id=place, no_dist=True)
            assert same(filled, values)

    def test_a_name_that_comes_later_is_there(self, tmp_path):
        planner = plugins.RememberingPlanner(enable_plan_caching=True)
        for number in range(3):
            values = {f"n{n}": n for n in range(number + 1)}
            metadata = dcp.save(values, checkpoint_id=tmp_path / str(number), planner=planner, no_dist=True)
            assert metadata.state_dict_metadata.keys() == values.keys()

    def test_the_users_planner_keeps_its_setting(self, tmp_path):
        planner = plugins.RememberingPlanner(enable_plan_caching=True)
        dcp.save({"n": 1}, checkpoint_id=tmp_path, planner=planner, no_dist=True)
        assert planner._enable_plan_caching


def torchs_stager(**options):
    plain = {"use_pinned_memory": False, "use_shared_memory": False, "use_async_staging": False}
    return DefaultStager(StagingOptions(**plain, use_non_blocking_copy=False, **options))


STAGERS = {
    "at once": plugins.CloningStager,
    "when asked": plugins.LaterStager,
    "in a thread": plugins.FutureStager,
    "torch's blocking": lambda: BlockingAsyncStager(cache_staged_state_dict=False),
    "torch's default": torchs_stager,
}


class TestStagers:
    # torch plans in a thread while "when asked" stages, and may find nothing yet.
    @pytest.mark.parametrize(
        ("save", "stager"), [*(("ours", s) for s in STAGERS), *(("torch", s) for s in STAGERS if s != "when asked")]
    )
    def test_what_the_state_was_when_the_call_returned_is_saved(self, tmp_path, stager, save):
        staging = STAGERS[stager]()
        async_save = {"torch": torch_dcp.async_save, "ours": dcp.async_save}[save]
        for number in range(3):
            values = state() | {"w": torch.full((4, 3), float(number))}
            expected = pickle.loads(pickle.dumps(values))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)
                saving = async_save(values, checkpoint_id=tmp_path / str(number), async_stager=staging, no_dist=True)
            if hasattr(saving, "staging_completion"):
                saving.staging_completion.result()
            values["w"].fill_(NAN)
            values["n"].append("later")
            getattr(saving, "upload_completion", saving).result()
            filled = template()
            dcp.load(filled, checkpoint_id=tmp_path / str(number), no_dist=True)
            assert same(filled, expected)
        if hasattr(staging, "num_synchronized"):
            assert staging.num_synchronized == (0 if stager == "in a thread" else 3)

    @pytest.mark.parametrize("stager", ["at once", "in a thread", "torch's default"])
    def test_shards_of_several_ranks_are_staged(self, tmp_path, stager):
        ranks = ThreadRanks(2)
        chunks = [torch.full((2, 3), float(rank)) for rank in range(2)]

        def on_rank(rank):
            values = {"t": LocalShards((4, 3), {(2 * rank, 0): chunks[rank]}), "n": [1]}
            call = ranks.call(rank, "save", str(tmp_path))
            request = save_request(values, str(tmp_path), call)
            staged = staged_by(STAGERS[stager](), request, call)
            if isinstance(staged, Future):
                staged = when_staged(staged, request, call)
            chunks[rank].fill_(NAN)
            return save(staged, call)

        require_no_errors(ranks.run(on_rank))
        filled = {"t": torch.full((4, 3), NAN), "n": None}
        dcp.load(filled, checkpoint_id=tmp_path, no_dist=True)
        assert filled["t"][:, 0].tolist() == [0, 0, 1, 1]

    def test_torchs_blocking_stager_makes_whole_tensors_and_refuses_shards(self, tmp_path):
        shards = LocalShards((2,), {(0,): torch.ones(2)})
        with pytest.raises(CheckpointException, match=r"phase 'stage'.*LocalShards only carries chunks"):
            dcp.async_save({"t": shards}, checkpoint_id=tmp_path, async_stager=BlockingAsyncStager(), no_dist=True)

    def test_a_stager_that_fails_fails_the_call_and_the_next_works(self, tmp_path):
        class Failing(plugins.CloningStager):
            def stage(self, state_dict):
                raise MemoryError("no room")

        with pytest.raises(CheckpointException) as caught:
            dcp.async_save(state(), checkpoint_id=tmp_path, async_stager=Failing(), no_dist=True)
        assert caught.value.phase == "stage"
        assert isinstance(caught.value.__cause__, MemoryError)
        saving = dcp.async_save(state(), checkpoint_id=tmp_path, async_stager=plugins.CloningStager(), no_dist=True)
        saving.upload_completion.result()
