"""Turning the checksums off does turn their work off, and back on again, in every module of ray_dcp."""

from __future__ import annotations

import sys
import zlib

import pytest
import torch
from isal import isal_zlib

import ray_dcp
from ray_dcp.format import checksums
from ray_dcp.format.manifest import decode_manifest
from ray_dcp.format.names import BLOCK_NBYTES, MANIFEST
from ray_dcp.protocol.exception import CheckpointException

STATE = {"weight": torch.arange(BLOCK_NBYTES, dtype=torch.float32), "step": 7}
PAYLOAD_NBYTES = 4 * BLOCK_NBYTES
OF_MANIFEST_NBYTES = PAYLOAD_NBYTES // 100
"""The manifest's checksum of itself stays: it is made by the coordinator, and of no tensor."""


class Work:
    """How many bytes pass through a function that makes checksums."""

    def __init__(self, monkeypatch):
        self.nbytes = 0
        for module in (isal_zlib, zlib):
            monkeypatch.setattr(module, "crc32", self._counting(module.crc32))

    def _counting(self, crc32):
        def counted(content, *crc):
            self.nbytes += len(content)
            return crc32(content, *crc)

        return counted

    def take(self):
        nbytes, self.nbytes = self.nbytes, 0
        return nbytes


@pytest.fixture
def work(monkeypatch):
    return Work(monkeypatch)


def save(folder):
    ray_dcp.save(STATE, checkpoint_id=folder, no_dist=True)


def load(folder):
    template = {"weight": torch.full_like(STATE["weight"], torch.nan), "step": 0}
    ray_dcp.load(template, checkpoint_id=folder, no_dist=True)
    return torch.equal(template["weight"], STATE["weight"]) and template["step"] == 7


def block_crcs(folder):
    manifest = decode_manifest((folder / MANIFEST).read_bytes(), file=MANIFEST)
    return {entry.fqn: entry.block_crcs for entry in manifest.entries}


def test_no_value_is_checksummed_while_they_are_off_and_all_are_before_and_after(side_by_side, work, tmp_path):
    checksums_off = side_by_side("unchecked").checksums_off
    save(tmp_path / "before")
    assert work.take() >= PAYLOAD_NBYTES
    with checksums_off():
        save(tmp_path / "off")
        assert load(tmp_path / "off")
        assert work.take() <= OF_MANIFEST_NBYTES
    assert set(block_crcs(tmp_path / "off")["weight"]) == {0}
    assert load(tmp_path / "before")
    assert work.take() >= PAYLOAD_NBYTES
    save(tmp_path / "after")
    assert block_crcs(tmp_path / "after") == block_crcs(tmp_path / "before")


def test_what_was_saved_without_does_not_load_with_them(side_by_side, tmp_path):
    with side_by_side("unchecked").checksums_off():
        save(tmp_path / "off")
    with pytest.raises(CheckpointException, match="checksum"):
        load(tmp_path / "off")


def test_they_are_on_again_after_an_error_and_in_modules_imported_meanwhile(side_by_side, monkeypatch):
    unchecked = side_by_side("unchecked")
    late = type(sys)("ray_dcp.imported_late")

    def fail():
        with unchecked.checksums_off():
            monkeypatch.setitem(sys.modules, late.__name__, late)
            late.crc32 = checksums.crc32
            assert late.crc32(b"bytes") == 0
            raise ZeroDivisionError

    real = checksums.crc32
    with pytest.raises(ZeroDivisionError):
        fail()
    assert checksums.crc32 is late.crc32 is real
    assert checksums.crc32(b"bytes") == zlib.crc32(b"bytes")
