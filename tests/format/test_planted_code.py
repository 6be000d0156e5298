"""A pickle that runs something, put into each place of a checkpoint in turn: it never runs, however it got there.

Checksums are made right again each time, as whoever planted it would.
"""

from __future__ import annotations

import copyreg
import dataclasses
import io
import os
import pickle
import shutil
import struct
import zipfile
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata

import ray_dcp as dcp
from ray_dcp import CheckpointException
from ray_dcp.errors import CorruptCheckpointError, UnsafeDataError
from ray_dcp.format.checksums import block_crcs
from ray_dcp.format.manifest import decode_manifest, encode_manifest, metadata_digest
from tests.shardings import same_bits

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:Detected pickle protocol"),
]

VALUES = {
    "w": torch.arange(12.0).reshape(3, 4),
    "t": torch.arange(6.0).reshape(2, 3).t(),
    "large": torch.arange(400_000.0),
    "x": ["a", ("b", 1)],
    "mixed": (torch.ones(2), "c"),
}


class Call:
    """Pickles as a call of ``os.mkdir``."""

    def __init__(self, marker: Path) -> None:
        self.marker = str(marker)

    def __reduce__(self):
        return os.mkdir, (self.marker,)


@pytest.fixture
def marker(tmp_path) -> Path:
    return tmp_path / "went_off"


@pytest.fixture(params=["ours", "torchs", "ours without manifest"])
def place(request, tmp_path) -> Path:
    place = tmp_path / "c"
    save = torch_dcp.save if request.param == "torchs" else dcp.save
    save(VALUES, checkpoint_id=place, no_dist=True)
    if request.param == "ours without manifest":
        (place / "manifest.parquet").unlink()
    return place


def template() -> dict[str, object]:
    return {
        "w": torch.zeros(3, 4), "t": torch.zeros(3, 2), "large": torch.zeros(400_000), "x": None, "mixed": None,
    }  # fmt: skip


def load(place: Path, **options) -> Exception | None:
    """What a load failed with; where it did not, every value is right."""
    filled = template()
    try:
        dcp.load(filled, checkpoint_id=place, no_dist=True, **options)
    except CheckpointException as error:
        return error.__cause__
    if not options:
        assert filled["x"] == VALUES["x"]
        assert torch.equal(filled["mixed"][0], VALUES["mixed"][0])
        assert all(same_bits(filled[name], VALUES[name]) for name in ("w", "t", "large"))
    return None


def shard(place: Path) -> Path:
    (path,) = place.glob("*.distcp")
    return path


def read_metadata(place: Path):
    return pickle.loads((place / ".metadata").read_bytes())


def with_record(place: Path, fqn: str, change) -> None:
    """Put what ``change`` makes of a value's record behind all others, and have everything point there."""
    metadata = read_metadata(place)
    (index,) = [index for index in metadata.storage_data if index.fqn == fqn]
    old = metadata.storage_data[index]
    content = shard(place).read_bytes()
    record = change(content[old.offset : old.offset + old.length])
    padding = bytes(-len(content) % 64)
    shard(place).write_bytes(content + padding + record)
    offset = len(content) + len(padding)
    metadata.storage_data[index] = _StorageInfo(shard(place).name, offset, len(record))
    write_metadata(place, metadata, fqn, offset, record)


def write_metadata(place: Path, metadata, fqn: str = "", offset: int = 0, record: bytes = b"") -> None:
    encoded = metadata if isinstance(metadata, bytes) else pickle.dumps(metadata)
    (place / ".metadata").write_bytes(encoded)
    path = place / "manifest.parquet"
    if not path.exists():
        return
    manifest = decode_manifest(path.read_bytes(), file="m")
    entries = [
        dataclasses.replace(
            entry,
            record_offset=offset,
            record_nbytes=len(record),
            payload_offset=offset,
            payload_nbytes=len(record),
            block_crcs=block_crcs(record),
        )
        if entry.fqn == fqn and entry.dtype is None
        else dataclasses.replace(entry, record_offset=offset, record_nbytes=len(record))
        if entry.fqn == fqn
        else entry
        for entry in manifest.entries
    ]
    digest = metadata_digest(encoded)
    path.write_bytes(encode_manifest(dataclasses.replace(manifest, entries=entries, metadata_digest=digest)))


def replaced_pickle(program: bytes):
    """The record with this instead of its ``data.pkl``, and right checksums."""

    def change(record: bytes) -> bytes:
        source, target = zipfile.ZipFile(io.BytesIO(record)), io.BytesIO()
        with zipfile.ZipFile(target, "w") as made:
            for entry in source.infolist():
                made.writestr(entry.filename, program if entry.filename.endswith("data.pkl") else source.read(entry))
        return target.getvalue()

    return change


PROTOCOLS = range(pickle.HIGHEST_PROTOCOL + 1)


@pytest.mark.parametrize("fqn", [*VALUES])
@pytest.mark.parametrize("protocol", [0, 2, pickle.HIGHEST_PROTOCOL])
def test_in_the_pickle_of_a_record(place, marker, fqn, protocol):
    program = pickle.dumps(Call(marker), protocol=protocol)
    with_record(place, fqn, replaced_pickle(program))
    failure = load(place)
    assert not marker.exists()
    if isinstance(VALUES[fqn], torch.Tensor) and (place / "manifest.parquet").exists():
        assert failure is None  # the pickle of a tensor is not looked at where the manifest says what it is
    else:
        assert isinstance(failure, UnsafeDataError | CorruptCheckpointError)
        assert failure.fqn == fqn


@pytest.mark.parametrize("fqn", [*VALUES])
def test_in_place_of_a_whole_record(place, marker, fqn):
    """As a pickle of old, without a zip file around it."""
    magic = [pickle.dumps(value, protocol=2) for value in (0x1950A86A20F9469CFC6C, 1001, {"little_endian": True})]
    program = pickle.dumps(Call(marker), protocol=2)
    for record in (program, b"".join(magic) + program + pickle.dumps([], protocol=2)):
        with_record(place, fqn, lambda _, record=record: record)
        failure = load(place)
        assert not marker.exists()
        if isinstance(VALUES[fqn], torch.Tensor) and (place / "manifest.parquet").exists():
            assert failure is None
        else:
            assert isinstance(failure, UnsafeDataError | CorruptCheckpointError)
            assert failure.fqn == fqn


@pytest.mark.parametrize("fqn", ["w", "t", "large"])
def test_in_place_of_a_tensor_not_even_when_trusted(place, marker, fqn):
    with_record(place, fqn, replaced_pickle(pickle.dumps(Call(marker), protocol=2)))
    load(place, trusted=True)
    assert not marker.exists()


@pytest.mark.parametrize("fqn", ["x", "mixed"])
def test_in_place_of_a_python_object_it_runs_when_trusted_and_only_then(place, marker, fqn):
    with_record(place, fqn, replaced_pickle(pickle.dumps(Call(marker), protocol=2)))
    assert isinstance(load(place), UnsafeDataError)
    assert not marker.exists()
    load(place, trusted=True)
    assert marker.exists()


def bare(marker: Path, protocol: int) -> bytes:
    return pickle.dumps(Call(marker), protocol=protocol)


METADATA = {
    "alone": lambda content, marker, protocol: bare(marker, protocol),
    "in front": lambda content, marker, protocol: bare(marker, protocol)[:-1] + b"0" + content,
    "before its end": lambda content, marker, protocol: content[:-1] + bare(marker, 0)[:-1] + b"0.",
    "as a name": lambda content, marker, protocol: content[:-1] + b"cos\nmkdir\n0.",
    "by an extension": lambda content, marker, protocol: (
        content[:-1] + b"\x82\x01(V" + str(marker).encode() + b"\ntR0."
    ),
    "as a persistent one": lambda content, marker, protocol: content[:-1] + b"Pos.mkdir\n0.",
    "as an instance": lambda content, marker, protocol: (
        content[:-1] + b"(V" + str(marker).encode() + b"\nios\nmkdir\n0."
    ),
}


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("how", METADATA)
def test_in_the_metadata(place, marker, how, protocol, monkeypatch):
    monkeypatch.setitem(copyreg._inverted_registry, 1, ("os", "mkdir"))  # as another package may have agreed on
    write_metadata(place, METADATA[how]((place / ".metadata").read_bytes(), marker, protocol))
    failure = load(place)
    assert isinstance(failure, UnsafeDataError | CorruptCheckpointError)
    assert failure.file == f"{place}/.metadata"
    assert not marker.exists()


class Getattr:
    """Pickles as a call of ``getattr``, as members of enums do in the first Python 3.11."""

    def __init__(self, *arguments: object) -> None:
        self.arguments = arguments

    def __reduce__(self):
        return getattr, self.arguments


def by_extension(monkeypatch, *, remembered: bool) -> bytes:
    """``getattr`` by a number that packages have agreed on, and that pickle may remember."""
    monkeypatch.setitem(copyreg._inverted_registry, 7, ("builtins", "getattr"))
    if remembered:
        monkeypatch.setitem(copyreg._extension_cache, 7, getattr)
    return b"\x82\x07"


ENUM = b"ctorch.distributed.checkpoint.metadata\n_MEM_FORMAT_ENCODING\n"
CONTIGUOUS = b"\x8c\x17TORCH_CONTIGUOUS_FORMAT"
PLANTED_GETATTR = {
    "of a class that is no enum": Getattr(Metadata, "state_dict_metadata"),
    "of a class, a name that all have": Getattr(torch.Size, "count"),
    "a name with underscores": Getattr(_MEM_FORMAT_ENCODING, "__class__"),
    "the table of its members": Getattr(_MEM_FORMAT_ENCODING, "__members__"),
    "a name that is no member": Getattr(_MEM_FORMAT_ENCODING, "mro"),
    "of a member": Getattr(_MEM_FORMAT_ENCODING.TORCH_CHANNELS_LAST, "__init_subclass__"),
    "nested": Getattr(Getattr(_MEM_FORMAT_ENCODING, "__members__"), "get"),
    "nested in a member": Getattr(Getattr(_MEM_FORMAT_ENCODING, "TORCH_CHANNELS_LAST"), "name"),
    "of a text": Getattr("text", "join"),
    "of nothing": Getattr(None, "__class__"),
    "with a default": Getattr(_MEM_FORMAT_ENCODING, "mro", 5),
    "with a name that is no text": Getattr(_MEM_FORMAT_ENCODING, b"TORCH_CHANNELS_LAST"),
    "without arguments": Getattr(),
    "itself": getattr,
    "itself, deep in values": {"a": [({"b": getattr},)]},
    "itself as a key": {getattr: 1},
}


@pytest.mark.parametrize("how", PLANTED_GETATTR)
def test_getattr_for_anything_but_a_member_of_an_enum(place, how):
    metadata = read_metadata(place)
    metadata.planner_data = PLANTED_GETATTR[how]
    write_metadata(place, metadata)
    failure = load(place)
    assert isinstance(failure, UnsafeDataError)
    assert "builtins.getattr" in str(failure)
    assert failure.file == f"{place}/.metadata"


@pytest.mark.parametrize(
    "program",
    [
        b"cbuiltins\ngetattr\n",
        b"cbuiltins\ngetattr\n\x94",
        b"cbuiltins\ngetattr\n}\x8c\x08__call__Nsb",
        b"cbuiltins\ngetattr\nN}\x8c\x0b_members_ofNs\x86b",
        b"cbuiltins\ngetattr\n" + ENUM + CONTIGUOUS + b"\x86\x81",
        b"(cbuiltins\ngetattr\n" + ENUM + CONTIGUOUS + b"o",
        b"(" + ENUM + b"\x8c\x03mroibuiltins\ngetattr\n",
        b"ccopyreg\n_reconstructor\n",
        b"cbuiltins\nvars\n",
        b"coperator\nattrgetter\n",
        b"c__builtin__\ngetattr\n",
        b"ctorch.distributed.checkpoint.metadata\nos\n",
        b"\x8c\x25torch.distributed.checkpoint.metadata\x8c\x09os.system\x93",
        b"\x8c\x08builtins\x8c\x10getattr.__self__\x93",
    ],
    ids=repr,
)
def test_programs_that_reach_for_getattr(place, program):
    content = (place / ".metadata").read_bytes()
    metadata = pickle.loads(content)
    write_metadata(place, content[:-1] + program + b"0.")
    failure = load(place)
    if failure is None:  # it was taken and thrown away again, which is nothing
        assert b"cbuiltins\ngetattr\n" in program
        assert read_metadata(place) == metadata
    else:
        assert isinstance(failure, UnsafeDataError | CorruptCheckpointError)


@pytest.mark.parametrize("remembered", [False, True])
def test_getattr_by_a_number(place, remembered, monkeypatch):
    number = by_extension(monkeypatch, remembered=remembered)
    program = number + b"\x8c\x04text\x8c\x04join\x86R0."
    write_metadata(place, (place / ".metadata").read_bytes()[:-1] + program)
    assert isinstance(load(place), UnsafeDataError | CorruptCheckpointError)


@pytest.mark.parametrize("remembered", [False, True])
def test_code_by_a_number(place, marker, remembered, monkeypatch):
    monkeypatch.setitem(copyreg._inverted_registry, 7, ("os", "mkdir"))
    if remembered:
        monkeypatch.setitem(copyreg._extension_cache, 7, os.mkdir)
    program = b"\x82\x07X" + struct.pack("<I", len(str(marker))) + str(marker).encode() + b"\x85R0."
    write_metadata(place, (place / ".metadata").read_bytes()[:-1] + program)
    assert isinstance(load(place), UnsafeDataError | CorruptCheckpointError)
    assert not marker.exists()


@pytest.mark.parametrize("part", ["planner_data", "storage_meta", "version", "place", "size"])
def test_as_a_part_of_the_metadata(place, marker, part):
    metadata = read_metadata(place)
    if part == "place":
        index = next(iter(metadata.storage_data))
        metadata.storage_data[index] = Call(marker)
    elif part == "size":
        metadata.state_dict_metadata["w"].size = Call(marker)
    else:
        setattr(metadata, part, Call(marker))
    write_metadata(place, metadata)
    failure = load(place)
    assert isinstance(failure, UnsafeDataError)
    assert failure.file == f"{place}/.metadata"
    assert not marker.exists()


def test_behind_the_end_of_each_file(place, marker):
    """The manifest alone is nothing any more with something behind it."""
    for path in sorted(place.iterdir()):
        content = path.read_bytes()
        path.write_bytes(content + bare(marker, 2))
        failure = load(place)
        assert not marker.exists()
        if path.name == "manifest.parquet" or (path.name == ".metadata" and (place / "manifest.parquet").exists()):
            assert isinstance(failure, CorruptCheckpointError)
        else:
            assert failure is None
        path.write_bytes(content)


def test_in_place_of_each_file(place, marker, tmp_path):
    for name in sorted(path.name for path in place.iterdir()):
        copy = shutil.copytree(place, tmp_path / f"copy of {name}")
        (copy / name).write_bytes(bare(marker, 2))
        failure = load(copy)
        assert isinstance(failure, UnsafeDataError | CorruptCheckpointError)
        assert name in str(failure)
        assert not marker.exists()


def test_in_a_file_beside_it(place, marker):
    for name in ("__9_9.distcp", ".metadata.tmp", "manifest.parquet.pkl", "data.pkl"):
        (place / name).write_bytes(bare(marker, 2))
    assert load(place) is None
    assert not marker.exists()


def test_in_the_bytes_of_a_tensor(tmp_path, marker):
    content = bare(marker, 2)
    padded = content + bytes(-len(content) % 4)
    saved = torch.frombuffer(bytearray(struct.pack("<Q", 5) + padded), dtype=torch.uint8)
    dcp.save({"w": saved}, checkpoint_id=tmp_path / "c", no_dist=True)
    filled = {"w": torch.zeros_like(saved)}
    dcp.load(filled, checkpoint_id=tmp_path / "c", no_dist=True)
    assert torch.equal(filled["w"], saved)
    assert not marker.exists()
