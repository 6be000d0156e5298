"""How torch's first versions were called: a storage in second place, ``save_state_dict`` and ``load_state_dict``."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter

import ray_dcp as dcp

WRITERS = pytest.mark.parametrize("writer", [FileSystemWriter, dcp.StoreWriter])
READERS = pytest.mark.parametrize("reader", [FileSystemReader, dcp.StoreReader])


@WRITERS
def test_save_takes_a_writer_in_second_place_and_says_that_it_is_old(tmp_path, writer):
    with pytest.warns(UserWarning, match="save: pass the second argument by its name, as storage_writer=") as warned:
        metadata = dcp.save({"t": torch.ones(2)}, writer(str(tmp_path / "c")))
    assert warned[0].filename == __file__
    assert set(metadata.state_dict_metadata) == {"t"}
    assert (tmp_path / "c" / ".metadata").exists()


@READERS
def test_load_takes_a_reader_in_second_place(tmp_path, reader):
    dcp.save({"t": torch.ones(2)}, checkpoint_id=tmp_path / "c")
    template = {"t": torch.full((2,), float("nan"))}
    with pytest.warns(UserWarning, match="load: pass the second argument by its name, as storage_reader="):
        dcp.load(template, reader(str(tmp_path / "c")))
    assert template["t"].tolist() == [1, 1]


def test_what_is_passed_twice_or_in_third_place_is_refused(tmp_path):
    writer = dcp.StoreWriter(tmp_path / "c")
    with pytest.raises(TypeError, match="storage_writer"), pytest.warns():
        dcp.save({}, writer, storage_writer=writer)
    with pytest.raises(TypeError, match="positional"):
        dcp.save({}, writer, None)


@WRITERS
@READERS
@pytest.mark.parametrize("coordinator_rank", [0, 1])
def test_save_state_dict_and_load_state_dict(tmp_path, writer, reader, coordinator_rank):
    with pytest.warns(FutureWarning, match="`save_state_dict` is deprecated"):
        metadata = dcp.save_state_dict(
            {"t": torch.arange(3), "n": 5}, writer(str(tmp_path / "c")), coordinator_rank=coordinator_rank
        )
    assert set(metadata.state_dict_metadata) == {"t", "n"}
    template = {"t": torch.zeros(3, dtype=torch.int64), "n": 0}
    with pytest.warns(FutureWarning, match="`load_state_dict` is deprecated"):
        assert dcp.load_state_dict(template, reader(str(tmp_path / "c")), None, coordinator_rank) is None
    assert template["t"].tolist() == [0, 1, 2]
    assert template["n"] == 5


class CannotReset(dcp.StoreWriter):
    def reset(self, checkpoint_id=None):
        raise OSError("this writer cannot be reset")


def test_a_writer_that_cannot_be_reset_is_told_as_it_is(tmp_path):
    with pytest.raises(OSError, match="cannot be reset"), pytest.warns():
        dcp.save_state_dict({"n": 1}, CannotReset(tmp_path / "c"), no_dist=True)
