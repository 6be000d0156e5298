"""A staged file, sealed, is bit for bit the file that a save writes, and its columns are those of a save."""

from __future__ import annotations

import io
import pickle
import subprocess
import sys
from array import array

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.planner import SavePlanner

import ray_dcp as dcp
from ray_dcp.errors import StateDictError
from ray_dcp.format.names import BLOCK_NBYTES
from ray_dcp.planning.save_plan.state_planner import StatePlanner
from ray_dcp.progress import Progress, working
from ray_dcp.staging.buffer_pool import BufferPool
from ray_dcp.staging.pinned import pin
from ray_dcp.staging.sealing import sealed_pieces, write_sealed
from ray_dcp.staging.shared_buffer import SharedBuffer
from ray_dcp.store.local import LocalStore
from ray_dcp.write.results import WrittenColumns
from ray_dcp.write.shard_file import write_shard_file
from ray_dcp.write.staged_file import FileToStage, StagedFile

KEY = "__0_0_00ab.distcp"
BLOCK = BLOCK_NBYTES


def planned(state, planner: SavePlanner | None = None):
    """The items of a state, and the planner that resolves them."""
    planner = planner or StatePlanner()
    planner.set_up_planner(state, is_coordinator=True)
    return planner.create_local_plan().items, planner


def staged(items, planner) -> tuple[memoryview, StagedFile]:
    """In memory that holds what an earlier save has left there."""
    file = FileToStage(KEY, 0, items, planner)
    memory = memoryview(bytearray(b"\xee" * (file.nbytes + 100)))
    return memory, file.copy_to(memory)


def facts(columns: WrittenColumns):
    return [
        (
            *(columns.record_offsets[n], columns.record_nbytes[n], columns.payload_offsets[n]),
            *(columns.payload_nbytes[n], columns.crcs_of(n), columns.kinds[columns.kind_of[n]]),
        )
        for n in range(len(columns))
    ]


def require_same(tmp_path, items, planner, again=None) -> StagedFile:
    """Staged and sealed, ``items`` are the file and the columns that ``write_shard_file`` makes of them."""
    store = LocalStore(tmp_path, sync_files=False)
    columns = write_shard_file(store, KEY, 0, items, planner)
    expected = store.get(KEY)
    store.delete(KEY)
    memory, file = staged(*(again or (items, planner)))
    assert (file.key, file.nbytes) == (KEY, len(expected))
    assert memory[file.nbytes :] == b"\xee" * 100
    crcs = write_sealed(store, KEY, memory, file.nbytes, file.open_ends)
    assert store.get(KEY) == expected
    store.delete(KEY)
    assert memory[: file.nbytes] == expected, "the buffer holds the whole file, too"
    sealed = pickle.loads(pickle.dumps(file.columns)).with_crcs(crcs)
    assert facts(sealed) == facts(columns)
    assert (sealed.file, sealed.rank, sealed.num_written) == (columns.file, columns.rank, len(items))
    return file


DTYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.uint16, torch.complex64, torch.bool, torch.int64)
VIEWS = {
    "whole": lambda tensor: tensor,
    "transposed": lambda tensor: tensor.t() if tensor.dim() == 2 else tensor,
    "every second": lambda tensor: tensor[::2] if tensor.dim() else tensor,
    "conjugate": lambda tensor: tensor.conj() if tensor.is_complex() else tensor,
    "negative": lambda tensor: tensor.conj().imag if tensor.is_complex() else tensor,
    "expanded": lambda tensor: tensor.expand(3, *tensor.shape),
}
SIZES = st.sampled_from([(), (1,), (2,), (5,), (0,), (0, 3), (300, 7), (1 << 20,), (3, (1 << 18) + 5), (700, 900)])
TENSORS = st.tuples(st.sampled_from(DTYPES), SIZES, st.sampled_from(sorted(VIEWS)), st.integers(0, 2))
PYTHON = st.one_of(st.integers(), st.text(), st.none(), st.lists(st.integers()), st.binary(max_size=50))


def tensor_of(dtype, sizes, view, seed) -> torch.Tensor:
    count = torch.Size(sizes).numel() * dtype.itemsize
    content = torch.arange(count, dtype=torch.int64) * 37 % 119 + seed
    if dtype == torch.bool:
        content = content % 2
    return VIEWS[view](content.to(torch.uint8).view(dtype).reshape(sizes))


@settings(deadline=None, max_examples=60)
@given(st.lists(st.one_of(TENSORS, PYTHON), max_size=12), st.lists(st.integers(0, 11), max_size=4), st.booleans())
def test_a_sealed_file_is_what_a_save_writes(tmp_path_factory, values, tied, of_users):
    tensors = [tensor_of(*value) if isinstance(value, tuple) else value for value in values]
    state = {f"v{number}": value for number, value in enumerate(tensors)}
    state |= {f"tied{number}": tensors[number] for number in tied if number < len(tensors)}
    planner = Reusing if of_users else StatePlanner
    items, of_file = planned(state, planner())
    require_same(tmp_path_factory.mktemp("f"), items, of_file, (items, planned(state, planner())[1]))


class Reusing(dcp.DefaultSavePlanner):
    """A planner of the user's that gives the same memory again and again, for Python objects too."""

    def __init__(self):
        super().__init__()
        self._bytes = io.BytesIO()
        self._memory = bytearray(1 << 25)

    def resolve_data(self, write_item):
        value = super().resolve_data(write_item)
        if isinstance(value, io.BytesIO):
            self._bytes.seek(0)
            try:
                self._bytes.truncate()
            except BufferError:  # somebody still looks at it
                self._bytes = io.BytesIO()
            self._bytes.write(value.getvalue())
            return self._bytes
        if not value.numel():
            return value
        given = torch.frombuffer(self._memory, dtype=torch.uint8)[: value.nbytes].view(value.dtype).view(value.shape)
        return given.copy_(value.detach())


def test_rows_of_numbers_and_ties_to_one_of_two_that_are_equal(tmp_path):
    same = [torch.tensor(1.0), torch.tensor(1.0)]
    state = {"a": same[0], "b": same[1], "tied to b": same[1], **{f"n{n}": torch.tensor(float(n)) for n in range(100)}}
    file = require_same(tmp_path, *planned(state))
    assert file.nbytes < 100 * 256 + 8 * 256


def test_a_large_python_object_is_sealed_already(tmp_path):
    file = require_same(tmp_path, *planned({"python": "x" * (3 * BLOCK), "w": torch.ones(BLOCK)}))
    assert len(file.open_ends) == 1


def test_nothing_at_all(tmp_path):
    assert require_same(tmp_path, *planned({})).nbytes == 0


def test_large_tensors_of_one_kind_share_a_frame():
    state = {f"w{n}": torch.full((BLOCK,), float(n)) for n in range(200)} | {"b": torch.ones(BLOCK + 1)}
    file = staged(*planned(state))[1]
    assert len(file.open_ends) == 201
    assert len(file.open_ends.frames) == 2
    assert len(pickle.dumps(file.open_ends)) < 201 * 12 + 3000


def test_the_state_may_change_once_it_is_staged():
    state = {"large": torch.ones(BLOCK), "small": torch.ones(10), "tiny": torch.ones(1), "python": [1, 2]}
    items, planner = planned(state)
    expected = bytes(staged(items, planner)[0])
    memory = staged(items, planner)[0]
    for value in ("large", "small", "tiny"):
        state[value].zero_()
    state["python"].append(3)
    assert bytes(memory) == expected


def test_staging_counts_as_progress_and_can_be_interrupted():
    progress = Progress()
    file = FileToStage(KEY, 0, *planned({f"w{n}": torch.ones(BLOCK) for n in range(3)}))
    with working(progress, "stage"):
        file.copy_to(memoryview(bytearray(file.nbytes)))
    assert progress.nbytes == 3 * 4 * BLOCK
    progress.interrupt(KeyError("failed elsewhere"))
    file = FileToStage(KEY, 0, *planned({f"w{n}": torch.ones(BLOCK) for n in range(3)}))
    with working(progress, "stage"), pytest.raises(KeyError, match="elsewhere"):
        file.copy_to(memoryview(bytearray(file.nbytes)))


def test_what_is_not_as_planned_is_refused_before_a_buffer_is_needed():
    class Wrong(dcp.DefaultSavePlanner):
        def resolve_data(self, write_item):
            return torch.ones(7)

    with pytest.raises(StateDictError, match="the plan says"):
        FileToStage(KEY, 0, *planned({"w": torch.ones(3)}, Wrong()))


@pytest.mark.parametrize("num_crcs", [0, 4, 6])
def test_columns_want_as_many_checksums_as_there_are_blocks(num_crcs):
    _, file = staged(*planned({"w": torch.ones(BLOCK + 1), "small": torch.ones(3)}))
    with pytest.raises(ValueError, match=f"{num_crcs} checksums for 5 blocks"):
        file.columns.with_crcs(array("I", [1] * num_crcs))


def test_columns_that_are_not_sealed_stay_so():
    memory, file = staged(*planned({"w": torch.ones(BLOCK)}))
    crcs: array[int] = array("I")
    list(sealed_pieces(memory, file.nbytes, file.open_ends, crcs))
    assert file.columns.with_crcs(crcs).crcs_of(0) == tuple(crcs)
    assert file.columns.crcs_of(0) == (0,) * 4


AGENT = """
import pickle, sys
from ray_dcp.staging.shared_buffer import SharedBuffer
from ray_dcp.staging.sealing import write_sealed
from ray_dcp.store.local import LocalStore
folder, name, key, nbytes, open_ends = pickle.load(sys.stdin.buffer)
with SharedBuffer.attach(name) as buffer:
    crcs = write_sealed(LocalStore(folder), key, buffer.memory, nbytes, open_ends)
print(sorted({"torch", "ray", "numpy"} & {*sys.modules}))
sys.stdout.flush()
sys.stdout.buffer.write(pickle.dumps(crcs))
"""


def test_a_process_without_torch_seals_and_writes(tmp_path):
    state = {"w": torch.randn(3 << 18), "v": torch.randn(1 << 18, 2).t(), "s": torch.ones(9), "n": 3}
    items, planner = planned(state)
    store = LocalStore(tmp_path / "expected")
    columns = write_shard_file(store, KEY, 0, items, planner)
    pool = BufferPool()
    file = FileToStage(KEY, 0, items, planner)
    buffer = pool.take(file.nbytes)
    done = file.copy_to(buffer.memory)
    job = pickle.dumps((str(tmp_path / "written"), buffer.name, KEY, done.nbytes, done.open_ends))
    agent = subprocess.run([sys.executable, "-c", AGENT], input=job, capture_output=True)
    assert agent.returncode == 0, agent.stderr.decode()
    loaded, _, crcs = agent.stdout.partition(b"\n")
    assert loaded == b"[]"
    assert LocalStore(tmp_path / "written").get(KEY) == store.get(KEY)
    assert facts(done.columns.with_crcs(pickle.loads(crcs))) == facts(columns)
    pool.give_back(buffer)
    pool.close()


def test_thirty_saves_use_two_buffers():
    items, planner = planned({"w": torch.randn(1 << 18), "n": 0})
    pool, inodes, last = BufferPool(), set(), None
    for _ in range(30):
        file = FileToStage(KEY, 0, items, planner)
        buffer = pool.take(file.nbytes)
        file.copy_to(buffer.memory)
        inodes.add(buffer.name.inode)
        if last is not None:
            pool.give_back(last)
        last = buffer
    assert len(inodes) == 2
    pool.give_back(last)
    pool.close()


def test_a_staged_file_leaves_nothing_that_looks_into_the_buffer():
    with SharedBuffer.create(1 << 23) as buffer:
        FileToStage(KEY, 0, *planned({"w": torch.ones(BLOCK)})).copy_to(buffer.memory)
        mapped = buffer._map
        buffer.close()
        assert mapped.closed


def test_without_cuda_nothing_is_pinned():
    if torch.cuda.is_initialized():
        pytest.skip("this process uses CUDA")
    with SharedBuffer.create(4096) as buffer:
        assert not pin(buffer)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_tensors_on_a_gpu_are_staged_through_pinned_memory(tmp_path):
    state = {"w": torch.randn(1 << 20), "t": torch.randn(900, 700).t(), "c": torch.randn(1 << 18).to(torch.complex64)}
    items, planner = planned(state)
    store = LocalStore(tmp_path)
    write_shard_file(store, KEY, 0, items, planner)
    file = FileToStage(KEY, 0, *planned({name: tensor.cuda() for name, tensor in state.items()}))
    pool = BufferPool(on_new=pin)
    buffer = pool.take(file.nbytes)
    assert torch.frombuffer(buffer.memory, dtype=torch.uint8).is_pinned()
    done = file.copy_to(buffer.memory)
    assert b"".join(sealed_pieces(buffer.memory, done.nbytes, done.open_ends, array("I"))) == store.get(KEY)
    pool.give_back(buffer)
    pool.close()
