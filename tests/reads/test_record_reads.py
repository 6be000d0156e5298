"""One record into its targets: of ray_dcp's and of torch's, small and large, by bytes or through torch."""

from __future__ import annotations

import io
import pickle

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from torch.distributed.checkpoint._extension import ExtensionRegistry, StreamTransformExtension

import ray_dcp as dcp
from ray_dcp.errors import CorruptCheckpointError, UnsafeDataError
from ray_dcp.format.names import BLOCK_NBYTES
from ray_dcp.reads import record_reads
from ray_dcp.reads.record_reads import RecordReads
from tests.shardings import DTYPES, same_bits

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated"),
]

LARGE = 5 * BLOCK_NBYTES // 2 + 12
"""Two blocks and a half, and a bit."""


def values(dtype: torch.dtype, nbytes: int) -> torch.Tensor:
    bits = torch.arange(nbytes // dtype.itemsize * dtype.itemsize) * 37 % (2 if dtype == torch.bool else 119)
    return bits.to(torch.uint8).view(dtype)


def unlike(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.contiguous().view(torch.uint8) ^ 1).view(tensor.dtype)


SAVES = {"ours": dcp.save, "torchs": torch_dcp.save}
written_by = pytest.mark.parametrize("writer", SAVES)


@written_by
@pytest.mark.parametrize("nbytes", [96, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_is_read_bit_for_bit(tmp_path, writer, nbytes, dtype):
    saved = values(dtype, nbytes)
    SAVES[writer]({"w": saved}, checkpoint_id=tmp_path, no_dist=True)
    template = {"w": unlike(saved)}
    report = dcp.load(template, checkpoint_id=tmp_path, no_dist=True)
    assert same_bits(template["w"], saved)
    assert report.nbytes_loaded == saved.nbytes
    template = {"w": dcp.LocalShards(saved.shape, {(3,): unlike(saved)[3:-2].clone()})}
    dcp.load(template, checkpoint_id=tmp_path, no_dist=True)
    assert same_bits(template["w"].chunks[(3,)], saved[3:-2])


TARGETS = {
    "as stored": lambda: torch.full((600, 700), float("nan")),
    "transposed": lambda: torch.full((700, 600), float("nan")).t(),
    "a part of more": lambda: torch.full((602, 703), float("nan"))[1:-1, 2:-1],
    "a parameter": lambda: torch.nn.Parameter(torch.full((600, 700), float("nan"))),
    "a class": lambda: torch.full((600, 700), float("nan")).as_subclass(type("Marked", (torch.Tensor,), {})),
}


@written_by
@pytest.mark.parametrize("kind", TARGETS)
@pytest.mark.parametrize("stored", ["contiguous", "transposed"])
def test_every_target_gets_what_was_stored(tmp_path, writer, kind, stored):
    saved = torch.arange(420_000.0).reshape(600, 700)
    held = saved if stored == "contiguous" else saved.t().contiguous().t()
    SAVES[writer]({"w": held}, checkpoint_id=tmp_path, no_dist=True)
    target = TARGETS[kind]()
    dcp.load({"w": target}, checkpoint_id=tmp_path, no_dist=True)
    assert torch.equal(target.detach().as_subclass(torch.Tensor), saved)


class Wrapped(torch.Tensor):
    """Has no memory of its own: whatever is done to it is done to another tensor."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.detach.default:
            return cls(args[0].inner)
        unwrapped = [one.inner if isinstance(one, cls) else one for one in args]
        found = function(*unwrapped, **(kwargs or {}))
        return cls(found) if isinstance(found, torch.Tensor) else found


@written_by
@pytest.mark.parametrize("count", [10, 20_000, 400_000])
def test_a_target_that_wraps_another_tensor_fills_that_one(tmp_path, writer, count):
    SAVES[writer]({"w": torch.arange(float(count))}, checkpoint_id=tmp_path, no_dist=True)
    inner = torch.full((count,), float("nan"))
    dcp.load({"w": Wrapped(inner)}, checkpoint_id=tmp_path, no_dist=True)
    assert torch.equal(inner, torch.arange(float(count)))


@pytest.mark.parametrize("count", [10, 20_000, 400_000])
def test_a_tensor_whose_memory_is_freed_is_refused_by_save_and_load(tmp_path, count):
    """As FSDP leaves its parameters; torch itself ends the process there."""
    freed = torch.ones(count)
    freed.untyped_storage().resize_(0)
    for value in (freed, freed.view(2, -1), dcp.LocalShards((count,), {(0,): freed})):
        with pytest.raises(dcp.CheckpointException, match="memory has been freed"):
            dcp.save({"w": value}, checkpoint_id=tmp_path / "c", no_dist=True)
    assert not (tmp_path / "c" / ".metadata").exists()
    dcp.save({"w": torch.ones(count)}, checkpoint_id=tmp_path / "c", no_dist=True)
    for value in (freed, dcp.LocalShards((count,), {(0,): freed})):
        with pytest.raises(dcp.CheckpointException, match="memory has been freed"):
            dcp.load({"w": value}, checkpoint_id=tmp_path / "c", no_dist=True)


@written_by
@pytest.mark.parametrize("count", [10, 400_000])
def test_a_cast_happens_on_the_way(tmp_path, writer, count):
    saved = torch.arange(count, dtype=torch.float32) / 8
    SAVES[writer]({"w": saved}, checkpoint_id=tmp_path, no_dist=True)
    template = {"w": torch.full((count,), float("nan"), dtype=torch.bfloat16)}
    dcp.load(template, checkpoint_id=tmp_path, no_dist=True, cast=True)
    assert torch.equal(template["w"], saved.bfloat16())


@written_by
@pytest.mark.parametrize("side", [6, 900])
def test_a_box_cut_in_two_dimensions_of_three_is_read(tmp_path, writer, side):
    saved = torch.arange(3 * 5 * side * 100, dtype=torch.int32).reshape(3 * 5, side, 100)
    SAVES[writer]({"w": saved}, checkpoint_id=tmp_path, no_dist=True)
    box = torch.full((4, 3, 40), -1, dtype=torch.int32)
    dcp.load({"w": dcp.LocalShards(saved.shape, {(7, 2, 50): box})}, checkpoint_id=tmp_path, no_dist=True)
    assert torch.equal(box, saved[7:11, 2:5, 50:90])


@pytest.mark.parametrize("count", [1, 300_000])
def test_another_tensor_than_the_metadata_says_is_not_stretched_to_fit(tmp_path, count):
    """Torch's copy_ would repeat a single row as often as one likes."""
    torch_dcp.save({"w": torch.ones(4, count)}, checkpoint_id=tmp_path, no_dist=True)
    torch_dcp.save({"w": torch.ones(1, count)}, checkpoint_id=tmp_path / "other", no_dist=True)
    metadata = pickle.loads((tmp_path / ".metadata").read_bytes())
    (place,) = pickle.loads((tmp_path / "other" / ".metadata").read_bytes()).storage_data.values()
    metadata.storage_data = dict.fromkeys(metadata.storage_data, place)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    (tmp_path / "__0_0.distcp").write_bytes((tmp_path / "other" / "__0_0.distcp").read_bytes())
    target = torch.zeros(4, count)
    with pytest.raises(dcp.CheckpointException, match="holds a tensor of shape") as caught:
        dcp.load({"w": target}, checkpoint_id=tmp_path, no_dist=True)
    assert isinstance(caught.value.__cause__, CorruptCheckpointError)
    assert caught.value.__cause__.fqn == "w"
    assert not target.any()


def load_failure(tmp_path, template) -> Exception:
    with pytest.raises(dcp.CheckpointException) as caught:
        dcp.load(template, checkpoint_id=tmp_path, no_dist=True)
    return caught.value.__cause__


@pytest.mark.parametrize("value", [[1, 2], torch.ones(3).t()], ids=["python", "tensor"])
def test_a_record_that_ends_too_early_inside_its_zip_file_is_damage_and_not_a_forbidden_class(tmp_path, value):
    """Only damage makes a load fall back to an older checkpoint."""
    torch_dcp.save({"x": value}, checkpoint_id=tmp_path, no_dist=True)
    path = tmp_path / "__0_0.distcp"
    content = bytearray(path.read_bytes())
    at = content.rindex(b"PK\x05\x06")
    content[at] ^= 1
    path.write_bytes(content)
    error = load_failure(tmp_path, {"x": torch.zeros(3) if isinstance(value, torch.Tensor) else None})
    assert isinstance(error, CorruptCheckpointError)
    assert (error.fqn, error.file) == ("x", str(path))


@pytest.mark.parametrize("name", ["x", "w"])
def test_a_record_whose_entry_is_marked_as_a_folder_is_not_given_to_torch(tmp_path, name):
    """Torch reads nothing of it, and unpickles the memory that it had meant to read it into."""
    torch_dcp.save({"x": [1, 2], "w": torch.ones(2, 3).t()}, checkpoint_id=tmp_path, no_dist=True)
    path = tmp_path / "__0_0.distcp"
    content = bytearray(path.read_bytes())
    places = {index.fqn: p for index, p in pickle.loads((tmp_path / ".metadata").read_bytes()).storage_data.items()}
    directory = content.index(b"PK\x01\x02", places[name].offset)
    content[directory + 38] ^= 1 << 4
    path.write_bytes(content)
    error = load_failure(tmp_path, {"x": None, "w": torch.zeros(3, 2)})
    assert isinstance(error, CorruptCheckpointError)
    assert error.fqn == name


def test_a_python_object_where_a_tensor_should_be_is_refused(tmp_path):
    torch_dcp.save({"w": torch.ones(3), "x": [1, 2, 3]}, checkpoint_id=tmp_path, no_dist=True)
    metadata = pickle.loads((tmp_path / ".metadata").read_bytes())
    places = {index.fqn: info for index, info in metadata.storage_data.items()}
    metadata.storage_data = {index: places["x"] for index in metadata.storage_data}
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    error = load_failure(tmp_path, {"w": torch.zeros(3)})
    assert isinstance(error, CorruptCheckpointError | UnsafeDataError)
    assert error.fqn == "w"


def test_torchs_plain_records_do_not_go_through_torch_load(tmp_path, monkeypatch):
    saved = {"small": torch.arange(10.0), "large": torch.arange(1_000_000.0), "fp8": values(torch.float8_e4m3fn, 50)}
    torch_dcp.save(saved, checkpoint_id=tmp_path, no_dist=True)
    monkeypatch.setattr(RecordReads, "_load_with_torch", lambda *_: pytest.fail("through torch.load"))
    template = {name: unlike(tensor) for name, tensor in saved.items()}
    dcp.load(template, checkpoint_id=tmp_path, no_dist=True)
    assert all(same_bits(template[name], saved[name]) for name in saved)


class Flipping(io.BytesIO):
    """Passes on what was written when it is closed, once: the garbage collector closes what nobody needs any more."""

    def __init__(self, output):
        super().__init__()
        self._output = output

    def close(self):
        if not self.closed:
            self._output.write(bytes(byte ^ 255 for byte in self.getvalue()))
        super().close()


class Flip(StreamTransformExtension):
    """All bits the other way round."""

    @staticmethod
    def from_descriptor(version):
        return Flip()

    @staticmethod
    def registry_name():
        return "stream.flip"

    def get_descriptor(self):
        return "stream.flip/1"

    def transform_to(self, output):
        return Flipping(output)

    def transform_from(self, stream):
        return io.BytesIO(bytes(byte ^ 255 for byte in stream.read()))


class Registry(ExtensionRegistry):
    def __init__(self):
        super().__init__()
        self.register(Flip)


def test_streams_that_a_writer_transformed_are_transformed_back(tmp_path, monkeypatch):
    monkeypatch.setattr(record_reads, "ExtensionRegistry", Registry)
    writer = torch_dcp.FileSystemWriter(tmp_path, _extensions=[Flip()])
    saved = {"w": torch.arange(9.0), "large": torch.arange(400_000.0), "x": [1, "a"]}
    torch_dcp.save(saved, storage_writer=writer, no_dist=True)
    assert saved["w"].numpy().tobytes() not in (tmp_path / "__0_0.distcp").read_bytes()
    template = {"w": torch.zeros(9), "large": torch.zeros(400_000), "x": None}
    dcp.load(template, checkpoint_id=tmp_path, no_dist=True)
    assert template["x"] == [1, "a"]
    assert all(torch.equal(template[name], saved[name]) for name in ("w", "large"))
