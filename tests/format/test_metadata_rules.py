"""The rules by which ``.metadata`` is read, and that they are one set of rules with torch there or without."""

from __future__ import annotations

import copyreg
import io
import pickle
import tracemalloc
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata

import ray_dcp as dcp
from ray_dcp.cli.main import main
from ray_dcp.errors import CorruptCheckpointError, UnsafeDataError
from ray_dcp.format.manifest import decode_manifest, encode_manifest, metadata_digest
from ray_dcp.format.metadata_file import decode_metadata, encode_metadata
from ray_dcp.format.safe_pickle import metadata_rules
from tests.format.test_planted_code import PLANTED_GETATTR, write_metadata
from tests.planning.test_python_record import same

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def as_early_3_11_pickles(metadata: Metadata, protocol: int = 4) -> bytes:
    """As Python 3.11 up to 3.11.3 stores the members of an enum."""
    content = io.BytesIO()
    pickler = pickle.Pickler(content, protocol)
    early = {_MEM_FORMAT_ENCODING: lambda member: (getattr, (type(member), member.name))}
    pickler.dispatch_table = {**copyreg.dispatch_table, **early}
    pickler.dump(metadata)
    assert b"getattr" in content.getvalue()
    return content.getvalue()


@pytest.fixture
def place(tmp_path) -> Path:
    dcp.save({"w": torch.arange(6.0), "x": [1]}, checkpoint_id=tmp_path / "c", no_dist=True)
    return tmp_path / "c"


@pytest.mark.parametrize("digest_checked", [True, False])
@pytest.mark.parametrize("protocol", [4, 5])
def test_a_metadata_of_early_python_3_11_is_read(place, protocol, digest_checked):
    metadata = pickle.loads((place / ".metadata").read_bytes())
    content = as_early_3_11_pickles(metadata, protocol)
    assert decode_metadata(content, file="f", digest_checked=digest_checked) == metadata
    metadata_rules.require_allowed(content)


@pytest.mark.parametrize("with_manifest", [True, False])
def test_a_checkpoint_of_early_python_3_11_loads_and_is_whole(place, with_manifest, capsys):
    write_metadata(place, as_early_3_11_pickles(pickle.loads((place / ".metadata").read_bytes())))
    if not with_manifest:
        (place / "manifest.parquet").unlink()
    filled = {"w": torch.full((6,), float("nan")), "x": None}
    dcp.load(filled, checkpoint_id=place, no_dist=True)
    assert same(filled, {"w": torch.arange(6.0), "x": [1]})
    assert main(["verify", str(place)]) == (0 if with_manifest else 5)  # which says that a manifest is missing
    assert "getattr" not in capsys.readouterr().out


def test_what_is_written_names_no_getattr_whatever_python_pickles(monkeypatch):
    monkeypatch.setattr(_MEM_FORMAT_ENCODING, "__reduce_ex__", lambda self, _: (getattr, (type(self), self.name)))
    saved = Metadata({"w": torch.distributed.checkpoint.metadata.TensorStorageMetadata(
        torch.distributed.checkpoint.metadata.TensorProperties(), torch.Size(()), [])})  # fmt: skip
    assert b"getattr" in pickle.dumps(saved)
    assert b"getattr" not in encode_metadata(saved)


@pytest.mark.parametrize("how", PLANTED_GETATTR)
def test_verify_refuses_what_a_load_refuses(place, how, capsys):
    metadata = pickle.loads((place / ".metadata").read_bytes())
    metadata.planner_data = PLANTED_GETATTR[how]
    write_metadata(place, metadata)
    with pytest.raises(UnsafeDataError):
        decode_metadata((place / ".metadata").read_bytes(), file="f", digest_checked=True)
    assert main(["verify", str(place)]) == 5
    assert "asks to load builtins.getattr" in capsys.readouterr().out


@pytest.mark.parametrize("content", [b"cos\nsystem\n.", b"garbage", b""])
def test_verify_refuses_what_is_no_metadata_although_its_digest_is_right(place, content, capsys):
    write_metadata(place, content)
    assert main(["verify", str(place)]) == 5
    assert ".metadata" in capsys.readouterr().out


def test_every_dtype_is_among_those_that_are_known_without_torch():
    assert {name for name, one in vars(torch).items() if isinstance(one, torch.dtype)} <= metadata_rules.DTYPE_NAMES


def test_every_class_that_is_there_is_known_by_both():
    for module, names in metadata_rules.METADATA_CLASSES.items():
        for name in names:
            metadata_rules.require_allowed(f"c{module}\n{name}\n.".encode())


def test_paths_of_every_python_are_read():
    for module in ("pathlib", "pathlib._local"):
        for name in ("PosixPath", "WindowsPath", "PureWindowsPath", "PurePosixPath"):
            program = f"c{module}\n{name}\n(V/\nVa\ntR.".encode()
            metadata_rules.require_allowed(program)
            with pytest.raises(Exception, match="instead of metadata"):
                decode_metadata(program, file="f")


def test_the_manifest_still_belongs(place):
    content = (place / ".metadata").read_bytes()
    manifest = decode_manifest((place / "manifest.parquet").read_bytes(), file="m")
    assert manifest.metadata_digest == metadata_digest(content)
    assert decode_manifest(encode_manifest(manifest), file="m") == manifest


RESERVING = {
    "number of five bytes": b"r" + (1 << 24).to_bytes(4, "little"),
    "number in digits": b"p%d\n" % (1 << 24),
    "number that looks like text": b"rs.0\x01",
}


@pytest.mark.parametrize("opcode", RESERVING.values(), ids=RESERVING.keys())
def test_five_bytes_do_not_make_it_take_all_memory_though_a_manifest_vouches_for_them(opcode):
    """The unpickler in C makes a list as long as the number says under which a pickle wants to keep something."""
    good = encode_metadata(Metadata({}, planner_data={"layers.0.norm": "r" * 300}))
    for content in (b"\x80\x04]" + opcode + b".", good[:-1] + opcode + b"."):
        for read in (metadata_rules.require_allowed, lambda one: decode_metadata(one, file="f", digest_checked=True)):
            tracemalloc.start()
            try:
                with suppress(CorruptCheckpointError):
                    read(content)
                assert tracemalloc.get_traced_memory()[1] < 8 << 20
            finally:
                tracemalloc.stop()


@pytest.mark.parametrize("bytes_of", [b"\x80\x04X\xff\xff\xff\xffr.", b"\x80\x04", b"", b"\x80\x04\x8c\x09r."])
def test_a_pickle_that_ends_too_early_is_none_that_is_read_quickly(bytes_of):
    assert not metadata_rules.reserves_no_more_than_it_holds(bytes_of)


@pytest.mark.parametrize("length", [0, 1, 114, 255, 256, 300, 70_000])
@pytest.mark.parametrize("protocol", [4, 5])
def test_what_is_written_here_is_read_quickly_whatever_names_it_has(tmp_path, length, protocol):
    name = ("prpr" * length)[:length]
    dcp.save({name: torch.ones(2), "é.rrrrr": 1, "s": {1: None}}, checkpoint_id=tmp_path, no_dist=True)
    content = (tmp_path / ".metadata").read_bytes()
    again = pickle.dumps(pickle.loads(content), protocol)
    for one in (content, again):
        assert metadata_rules.reserves_no_more_than_it_holds(one)
        assert decode_metadata(one, file="f", digest_checked=True) == pickle.loads(content)
