"""``manifest.parquet`` gives back what was put in, and notices when it does not."""

import io
import math
import time
from contextlib import suppress
from dataclasses import fields, replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_dcp.errors import ConfigError, CorruptCheckpointError, FormatVersionError
from ray_dcp.format.manifest import (
    FORMAT_VERSION,
    Entry,
    Manifest,
    ManifestFacts,
    decode_facts,
    decode_manifest,
    encode_manifest,
    metadata_digest,
)
from tests.slack import within

CHUNK = Entry("model.weight", (0, 4), (2, 4), "bfloat16", "__0_0_ab.distcp", 0, 400, 64, 16, (7, 2**32 - 1), 0)
ZERO_DIM = Entry("step", (), (), "int64", "__1_0_ab.distcp", 0, 200, 64, 8, (3,), 1)
EMPTY = Entry("empty", (0,), (0,), "float32", "__1_0_ab.distcp", 200, 200, 264, 0, (), 1)
OBJECT = Entry("config", None, None, None, "../step-00000001/__0_0_cd.distcp", 0, 50, 0, 50, (9,), 0)


def manifest_of(*entries: Entry, **facts) -> Manifest:
    known = {"world_size": 2, "attempt": "ab", "metadata_digest": metadata_digest(b"m"), "created": 1.7e9 + 0.25}
    return Manifest(list(entries), **(known | facts))


def test_every_kind_of_entry_and_every_fact_come_back():
    manifest = manifest_of(
        CHUNK, ZERO_DIM, EMPTY, OBJECT, step=7, metrics={"loss": 0.5, "tags": ["a", None]}, versions={"torch": "2.13.0"}
    )
    assert decode_manifest(encode_manifest(manifest), "m") == manifest


def test_the_facts_can_be_had_without_the_entries():
    manifest = manifest_of(CHUNK, OBJECT, step=7, metrics={"loss": 0.5})
    facts = decode_facts(encode_manifest(manifest), "m")
    assert all(getattr(facts, fact.name) == getattr(manifest, fact.name) for fact in fields(ManifestFacts))
    assert facts.nbytes == CHUNK.record_nbytes + OBJECT.record_nbytes


def test_no_entries_come_back():
    assert decode_manifest(encode_manifest(manifest_of()), "m") == manifest_of()


names = st.text(max_size=12)
counts = st.integers(0, 2**63 - 1)
shapes = st.none() | st.lists(counts, max_size=4).map(tuple)
crcs = st.lists(st.integers(0, 2**32 - 1), max_size=4).map(tuple)
entries = st.builds(
    Entry,
    names,
    shapes,
    shapes,
    st.none() | names,
    names,
    counts,
    counts,
    counts,
    counts,
    crcs,
    st.integers(0, 2**31 - 1),
)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | names,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=60, deadline=None)
@given(st.lists(entries, max_size=6), st.dictionaries(names, json_values, max_size=3), st.none() | counts)
def test_any_manifest_comes_back(rows, metrics, step):
    manifest = manifest_of(*rows, metrics=metrics, step=step)
    assert decode_manifest(encode_manifest(manifest), "m") == manifest


def test_metrics_may_be_scalars_of_numpy_and_not_finite():
    metrics = {"loss": np.float32(0.5), "steps": np.int64(3), "grad": math.inf}
    manifest = decode_manifest(encode_manifest(manifest_of(metrics=metrics)), "m")
    assert manifest.metrics == {"loss": 0.5, "steps": 3, "grad": math.inf}


@pytest.mark.parametrize("value", [object(), np.zeros(3), {"deep": {1, 2}}])
def test_a_metric_without_json_form_is_refused_by_name(value):
    with pytest.raises(ConfigError, match="metrics"):
        encode_manifest(manifest_of(metrics={"x": value}))


def test_other_tools_read_the_table():
    table = pq.read_table(io.BytesIO(encode_manifest(manifest_of(CHUNK, OBJECT))))
    assert table.column("fqn").to_pylist() == ["model.weight", "config"]
    assert table.column("offsets").to_pylist() == [[0, 4], None]
    assert table.column("block_crcs").to_pylist() == [[7, 2**32 - 1], [9]]


def test_a_newer_format_is_named():
    newer = encode_manifest(manifest_of(CHUNK, format_version=FORMAT_VERSION + 1))
    with pytest.raises(FormatVersionError) as caught:
        decode_manifest(newer, "s3://b/manifest.parquet")
    assert caught.value.found == FORMAT_VERSION + 1
    assert "s3://b/manifest.parquet" in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"PAR1", b"not parquet" * 100, encode_manifest(manifest_of(CHUNK))[:-9]])
def test_what_is_not_parquet_is_corrupt(content):
    with pytest.raises(CorruptCheckpointError, match=r"a/manifest\.parquet"):
        decode_manifest(content, "a/manifest.parquet")


def _rewritten(change) -> bytes:
    """A manifest whose table another program has changed."""
    content = encode_manifest(manifest_of(CHUNK, ZERO_DIM))
    source = pq.ParquetFile(pa.BufferReader(content))
    sink = pa.BufferOutputStream()
    table = change(source.read())
    with pq.ParquetWriter(sink, table.schema) as writer:
        writer.write_table(table)
        writer.add_key_value_metadata(source.metadata.metadata)
    return sink.getvalue().to_pybytes()


def test_a_rewrite_that_keeps_the_values_is_still_good():
    assert decode_manifest(_rewritten(lambda table: table), "m") == manifest_of(CHUNK, ZERO_DIM)


@pytest.mark.parametrize(
    "change",
    [
        lambda table: table.drop_columns(["rank"]),
        lambda table: table.slice(0, 1),
        lambda table: table.set_column(5, "record_offset", pa.array([0, 1])),
        lambda table: table.set_column(5, "record_offset", pa.array([0, None])),
        lambda table: table.set_column(1, "offsets", pa.array(["a", "b"])),
    ],
    ids=["no column", "fewer rows", "other value", "null", "other type"],
)
def test_a_changed_table_is_corrupt(change):
    with pytest.raises(CorruptCheckpointError):
        decode_manifest(_rewritten(change), "m")


def test_no_flipped_bit_goes_unnoticed():
    manifest = manifest_of(CHUNK, ZERO_DIM, OBJECT, step=3, metrics={"loss": 1.5})
    content = encode_manifest(manifest)
    for position in range(len(content)):
        flipped = bytearray(content)
        flipped[position] ^= 1 << position % 8
        # What parquet does not use (its writer's name, say) may change without harm.
        with suppress(CorruptCheckpointError, FormatVersionError):
            assert decode_manifest(bytes(flipped), "m") == manifest
        with suppress(CorruptCheckpointError, FormatVersionError):
            assert decode_facts(bytes(flipped), "m") == decode_facts(content, "m")


def test_twenty_thousand_entries_take_well_under_a_second():
    rows = [replace(CHUNK, fqn=f"layers.{i // 40}.{i % 40}.weight", record_offset=i << 22) for i in range(20_000)]
    start = time.perf_counter()
    content = encode_manifest(manifest_of(*rows))
    assert decode_manifest(content, "m").entries == rows
    assert time.perf_counter() - start < within(2)  # 0.3 s on an idle core
    assert len(content) < 50 * len(rows)


def test_what_names_do_not_tell_is_kept_and_where_it_is_not_known_that_is_said():
    rows = [[["opt", "state"], "dict", "int"], [["l", 0], "OrderedDict", {"None": "None"}], [["e"], "dict", "none"]]
    for containers in (rows, [], None):
        encoded = encode_manifest(manifest_of(CHUNK, containers=containers))
        assert decode_manifest(encoded, file="m").containers == containers


def test_the_bytes_of_a_record_that_two_items_share_count_once():
    tied = replace(CHUNK, fqn="tied")
    assert manifest_of(CHUNK, tied).nbytes == CHUNK.record_nbytes
    assert decode_facts(encode_manifest(manifest_of(CHUNK, tied)), file="m").nbytes == CHUNK.record_nbytes
