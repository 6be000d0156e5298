"""FORMAT.md says what the code does."""

import io
import json
import re
import zlib
from itertools import takewhile
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from ray_dcp.format import names
from ray_dcp.format.manifest import FORMAT_VERSION, DifferingReplicas, encode_manifest
from ray_dcp.pace.interval import Figures
from tests.format.test_manifest import CHUNK, EMPTY, OBJECT, ZERO_DIM, manifest_of

PACE = Figures(step=7).as_json()
TEXT = Path(names.__file__).with_name("FORMAT.md").read_text()


def table_below(heading: str) -> list[list[str]]:
    """The cells of the first table whose header starts with ``heading``."""
    rows = takewhile(str.strip, TEXT[TEXT.index(f"| {heading} |") :].splitlines())
    return [[cell.strip().strip("`") for cell in row.strip("|").split("|")] for row in list(rows)[2:]]


@pytest.fixture(scope="module")
def parquet():
    manifest = manifest_of(
        *(CHUNK, ZERO_DIM, EMPTY, OBJECT),
        step=7,
        metrics={"loss": 0.5, "\u00e4": float("inf")},
        differing=(DifferingReplicas("w", ((0, 2), (1,)), 0.5),),
        containers=[[["x"], "dict", "int"]],
        pace=PACE,
    )
    return pq.ParquetFile(io.BytesIO(encode_manifest(manifest)))


def test_columns(parquet):
    written = [
        [field.name, re.sub(r"list<.*: (\w+)>", r"list of \1", str(field.type))] for field in parquet.schema_arrow
    ]
    assert [row[:2] for row in table_below("column")] == written
    assert [row[2] != "no" for row in table_below("column")] == [field.nullable for field in parquet.schema_arrow]


def test_facts(parquet):
    written = {key.decode() for key in parquet.metadata.metadata if key.startswith(b"ray_dcp.")}
    assert {row[0] for row in table_below("key")} == written


def test_what_was_measured():
    described = TEXT[TEXT.index("`ray_dcp.pace` has") : TEXT.index("### The digest rule")]
    assert {name for name in [*PACE, *PACE["tiers"][0]] if f"`{name}`" not in described} == set()


def test_checksums(parquet):
    facts = {key.decode(): text.decode() for key, text in parquet.metadata.metadata.items()}
    crc = 0
    for column in parquet.read().columns:
        crc = zlib.crc32(json.dumps(column.to_pylist(), separators=(",", ":")).encode("ascii"), crc)
    assert int(facts["ray_dcp.rows_crc"]) == crc
    pairs = sorted([key, text] for key, text in facts.items() if key.startswith("ray_dcp.") and "facts_crc" not in key)
    assert int(facts["ray_dcp.facts_crc"]) == zlib.crc32(json.dumps(pairs, separators=(",", ":")).encode("ascii"))


def test_names_and_numbers():
    assert f"({names.BLOCK_NBYTES} bytes)" in TEXT
    assert f"multiple of {names.PAYLOAD_ALIGNMENT} bytes" in TEXT
    for name in (names.METADATA, names.MANIFEST, names.POINTER, names.SHARD_SUFFIX):
        assert name in TEXT
    assert names.step_folder(100) in TEXT


def test_the_changes_end_with_the_current_version():
    assert table_below("version")[-1][0] == str(FORMAT_VERSION)
