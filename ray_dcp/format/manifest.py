"""``manifest.parquet``: one row for each stored item, and facts about the whole checkpoint.

Torch does not know it; DuckDB and pandas can read it. It is written before ``.metadata`` and carries that
file's digest: a manifest whose digest differs belongs to a save that never committed (or that has replaced
it but not yet committed), and readers then go by ``.metadata`` alone.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any, overload

from ray_dcp.errors import ConfigError, CorruptCheckpointError, FormatVersionError
from ray_dcp.wording import first_lines, number_runs

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

FORMAT_VERSION = 1
_OWN_KEYS = "ray_dcp."
_ROWS_CRC = "ray_dcp.rows_crc"
_FACTS_CRC = "ray_dcp.facts_crc"
_DIFFERING = "ray_dcp.differing"
"""Key of the names under which ranks held different values; only there where some did."""
_CONTAINERS = "ray_dcp.containers"
"""Key of what names do not tell of the state dict; only there where that is known."""
_PACE = "ray_dcp.pace"
"""Key of what had been measured of steps and saves; only there where something was."""
_MAX_DIFFERING = 1000
_MAX_NAMED_GROUPS = 8


@dataclass(frozen=True, slots=True)
class Entry:
    """One stored item: a chunk of a tensor, or one Python object (``dtype`` None)."""

    fqn: str
    offsets: tuple[int, ...] | None
    """Offsets of the chunk in the whole tensor, in elements; None for a Python object."""
    sizes: tuple[int, ...] | None
    """Shape of the chunk; None for a Python object."""
    dtype: str | None
    """The dtype as torch prints it, without the prefix: ``float32``, ``bfloat16``, ``float8_e4m3fn``."""
    file: str
    """Key of the shard file, relative to the checkpoint's folder."""
    record_offset: int
    """Offset of the record in the file, in bytes."""
    record_nbytes: int
    payload_offset: int
    """Offset of the tensor's bytes in the file, not in the record. A Python object's payload is its whole record."""
    payload_nbytes: int
    block_crcs: tuple[int, ...]
    """CRC-32 of each ``names.BLOCK_NBYTES`` of the payload; empty for an empty payload."""
    rank: int
    """The rank that wrote it."""


def dtype_name(dtype: object) -> str:
    """How entries spell a ``torch.dtype``: ``bfloat16``."""
    return str(dtype).removeprefix("torch.")


def are_counts(numbers: Iterable[object]) -> bool:
    """Whether all are whole numbers that sizes, offsets and lengths may be, whatever a file says."""
    return all(type(number) is int and 0 <= number < 1 << 62 for number in numbers)


class EntryTable(Sequence[Entry]):
    """Entries held by columns, as the file has them: an ``Entry`` is made when it is asked for.

    ``columns`` has one list for each field of ``Entry``, in order, all of one length.
    """

    def __init__(self, columns: Sequence[Sequence[Any]]) -> None:
        self.columns = columns
        self.sizes: Sequence[tuple[int, ...] | None] = self.column("sizes")
        self.dtypes: Sequence[str | None] = self.column("dtype")
        self.block_crcs: Sequence[tuple[int, ...]] = self.column("block_crcs")

    @overload
    def __getitem__(self, number: int) -> Entry: ...
    @overload
    def __getitem__(self, number: slice) -> Sequence[Entry]: ...
    def __getitem__(self, number: int | slice) -> Entry | Sequence[Entry]:
        if isinstance(number, slice):
            return EntryTable([column[number] for column in self.columns])
        return Entry(*[column[number] for column in self.columns])

    def __len__(self) -> int:
        return len(self.columns[0])

    def __iter__(self) -> Iterator[Entry]:
        return map(Entry, *self.columns)

    def __eq__(self, other: object) -> bool:
        """Whether ``other`` holds the same entries; it may be a list of them."""
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]  # as a list

    def column(self, name: str) -> Sequence[Any]:
        """One field of all entries, in their order."""
        return self.columns[_COLUMNS.index(name)]

    @property
    def files(self) -> Sequence[str]:
        """The key of each entry's shard file."""
        return self.column("file")


_COLUMNS = tuple(Entry.__dataclass_fields__)


def as_table(entries: Sequence[Entry]) -> EntryTable:
    """``entries`` held by columns; unchanged where they are already."""
    if isinstance(entries, EntryTable):
        return entries
    return EntryTable([[getattr(entry, name) for entry in entries] for name in _COLUMNS])


@dataclass(frozen=True, slots=True)
class DifferingReplicas:
    """A name under which ranks held different values when it was saved; the value of the first rank is stored."""

    fqn: str
    ranks: tuple[tuple[int, ...], ...]
    """Ranks with equal values stand together; the lowest one comes first."""
    largest_difference: float | None = None
    """The largest difference between two elements that lie at one place, among those that were looked at.

    None where no difference was computed, as of a value that is not a tensor.
    """

    def __str__(self) -> str:
        apart = "" if self.largest_difference is None else f", largest difference {self.largest_difference:.3g}"
        return f"{self.fqn} ({ranks_by_value(self.ranks)}{apart})"


def ranks_by_value(groups: Sequence[Sequence[int]]) -> str:
    """Text such as ``ranks 0 | 1-3``: ranks with equal values stand together."""
    return f"ranks {' | '.join(first_lines([number_runs(ranks) for ranks in groups], most=_MAX_NAMED_GROUPS))}"


@dataclass(frozen=True, slots=True)
class Manifest:
    """Everything a save promises about its bytes."""

    entries: Sequence[Entry]
    world_size: int
    attempt: str
    metadata_digest: str
    """SHA-256 of the ``.metadata`` it belongs to, hex."""
    created: float
    """Seconds since the epoch, the coordinator's clock."""
    step: int | None = None
    metrics: Mapping[str, Any] = field(default_factory=dict)
    """User metrics, JSON values."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Versions of ``torch`` and ``ray_dcp``."""
    format_version: int = FORMAT_VERSION
    differing: Sequence[DifferingReplicas] = ()
    """Names whose values differed, sorted; of more than a thousand only the first thousand are stored."""
    containers: Sequence[Any] | None = None
    """What names do not tell of the state dict (``planning.values.containers``); None where that is not known."""
    pace: Mapping[str, Any] | None = None
    """What had been measured of steps and saves (``pace.interval.Figures``); None where nothing was."""

    @property
    def nbytes(self) -> int:
        """Bytes of all records; of records that begin at one place, the longest counts."""
        table = as_table(self.entries)
        longest: dict[tuple[str, int], int] = {}
        records = zip(table.files, table.column("record_offset"), strict=True)
        for record, nbytes in zip(records, table.column("record_nbytes"), strict=True):
            if nbytes > longest.get(record, 0):
                longest[record] = nbytes
        return sum(longest.values())


@dataclass(frozen=True, slots=True)
class ManifestFacts:
    """A manifest without its entries: what a listing shows of a checkpoint, and cheap to read."""

    world_size: int
    attempt: str
    metadata_digest: str
    created: float
    step: int | None
    metrics: Mapping[str, Any]
    versions: Mapping[str, str]
    format_version: int
    nbytes: int
    pace: Mapping[str, Any] | None = None


_REQUIRED = tuple(fact.name for fact in fields(ManifestFacts) if fact.name != "pace")


def metadata_digest(metadata: bytes) -> str:
    """The digest by which a manifest names its ``.metadata``."""
    return hashlib.sha256(metadata).hexdigest()


def belongs_to(manifest: Manifest | ManifestFacts, metadata: bytes, file: str) -> bool:
    """Whether a manifest is of this ``.metadata``, and not of another save that has not committed.

    Raises ``CorruptCheckpointError`` where both are of one save and the digest differs: ``file``, which is
    ``.metadata``, was damaged. A ``.metadata`` names its attempt, as save id and in the names of its files.
    """
    if manifest.metadata_digest == metadata_digest(metadata):
        return True
    if manifest.attempt and manifest.attempt.encode() in metadata:
        raise CorruptCheckpointError("stored bytes fail their checksum, which the manifest holds", file=file)
    return False


def encode_manifest(manifest: Manifest) -> bytes:
    """The content of ``manifest.parquet``. Raises ``ConfigError`` where a metric has no JSON form."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    facts = {_OWN_KEYS + name: _as_json(name, getattr(manifest, name)) for name in _REQUIRED}
    rows = as_table(manifest.entries).columns
    table = pa.Table.from_arrays([pa.array(v, f.type) for v, f in zip(rows, _schema(), strict=True)], schema=_schema())
    sink = pa.BufferOutputStream()
    # Arrow's own copy of the schema is of no use to readers, and as long as all else in a small manifest.
    with pq.ParquetWriter(sink, table.schema, compression="zstd", write_statistics=False, store_schema=False) as writer:
        writer.write_table(table)
        if manifest.differing:
            facts[_DIFFERING] = json.dumps([asdict(one) for one in manifest.differing[:_MAX_DIFFERING]])
        if manifest.containers is not None:
            facts[_CONTAINERS] = json.dumps(manifest.containers)
        if manifest.pace is not None:
            facts[_PACE] = json.dumps(manifest.pace)
        facts[_ROWS_CRC] = str(_crc(rows))
        writer.add_key_value_metadata(facts | {_FACTS_CRC: str(_crc([sorted(facts.items())]))})
    return sink.getvalue().to_pybytes()


def decode_manifest(content: bytes, file: str) -> Manifest:
    """The manifest that ``content`` holds; ``file`` names it in errors.

    Raises ``FormatVersionError`` for a newer format, ``CorruptCheckpointError`` for anything else that
    ``encode_manifest`` did not write: one flipped bit is found.
    """
    with _corrupt_unless_whole(file):
        source, texts = _open(content, file)
        table = source.read(use_threads=False)
        rows = [_column_values(table, f) for f in _schema()]
        if texts[_ROWS_CRC] != str(_crc(rows)):
            raise ValueError("its rows do not match their checksum")
        values = {name: json.loads(texts[_OWN_KEYS + name]) for name in _REQUIRED if name != "nbytes"}
        return Manifest(
            EntryTable(rows),
            **values,
            differing=_differing_from(texts.get(_DIFFERING, "[]")),
            containers=json.loads(texts.get(_CONTAINERS, "null")),
            pace=_pace_from(texts),
        )


def decode_facts(content: bytes, file: str) -> ManifestFacts:
    """The facts alone, at a cost that does not grow with the entries; raises as ``decode_manifest`` does."""
    with _corrupt_unless_whole(file):
        _, texts = _open(content, file)
        return ManifestFacts(
            **{name: json.loads(texts[_OWN_KEYS + name]) for name in _REQUIRED}, pace=_pace_from(texts)
        )


@contextmanager
def _corrupt_unless_whole(file: str) -> Iterator[None]:
    import pyarrow as pa

    try:
        yield
    except (pa.ArrowException, OSError, ValueError, KeyError, TypeError, MemoryError) as error:
        raise CorruptCheckpointError(f"not a readable manifest: {error}", file=file) from error


def _open(content: bytes, file: str) -> tuple[pq.ParquetFile, dict[str, str]]:
    """The table, not yet read, and the checked facts as they are stored."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    source = pq.ParquetFile(pa.BufferReader(content))
    stored = source.metadata.metadata or {}
    texts = {key.decode(): text.decode() for key, text in stored.items() if key.startswith(_OWN_KEYS.encode())}
    # The version comes first: a newer format may have changed all else.
    found = int(texts[_OWN_KEYS + "format_version"])
    if found > FORMAT_VERSION:
        raise FormatVersionError(found=found, supported=FORMAT_VERSION, file=file)
    if texts.pop(_FACTS_CRC) != str(_crc([sorted(texts.items())])):
        raise ValueError("its facts do not match their checksum")
    return source, texts


def _pace_from(texts: Mapping[str, str]) -> Mapping[str, Any] | None:
    pace = json.loads(texts.get(_PACE, "null"))
    return pace if isinstance(pace, dict) else None


def _differing_from(text: str) -> tuple[DifferingReplicas, ...]:
    return tuple(
        DifferingReplicas(one["fqn"], tuple(map(tuple, one["ranks"])), one["largest_difference"])
        for one in json.loads(text)
    )


def _schema() -> pa.Schema:
    import pyarrow as pa

    integers = pa.list_(pa.int64())
    return pa.schema(
        [
            pa.field("fqn", pa.string(), nullable=False),
            pa.field("offsets", integers),
            pa.field("sizes", integers),
            pa.field("dtype", pa.string()),
            pa.field("file", pa.string(), nullable=False),
            pa.field("record_offset", pa.int64(), nullable=False),
            pa.field("record_nbytes", pa.int64(), nullable=False),
            pa.field("payload_offset", pa.int64(), nullable=False),
            pa.field("payload_nbytes", pa.int64(), nullable=False),
            pa.field("block_crcs", pa.list_(pa.uint32()), nullable=False),
            pa.field("rank", pa.int32(), nullable=False),
        ]
    )


def _column_values(table: pa.Table, wanted: pa.Field) -> list[Any]:
    """One Python value for each row. Raises ``KeyError`` or ``ValueError`` where the table is not as wanted."""
    import pyarrow as pa

    column = table.column(wanted.name).cast(wanted.type).combine_chunks()
    if column.null_count and not wanted.nullable:
        raise ValueError(f"column {wanted.name} has nulls")
    if not pa.types.is_list(wanted.type):
        return column.to_pylist()
    # Far quicker than to_pylist, which makes an Arrow scalar of every element.
    values, offsets = column.values.to_numpy().tolist(), column.offsets.to_numpy().tolist()
    rows = [tuple(values[start:end]) for start, end in itertools.pairwise(offsets)]
    valid = column.is_valid().to_numpy(zero_copy_only=False)
    return [row if here else None for row, here in zip(rows, valid, strict=True)] if column.null_count else rows


def _crc(parts: Sequence[Any]) -> int:
    """The CRC-32 of what was read, not of the file's bytes: it finds whatever went wrong on the way."""
    crc = 0
    for part in parts:
        crc = zlib.crc32(json.dumps(part, separators=(",", ":")).encode(), crc)
    return crc


def _as_json(name: str, value: Any) -> str:
    try:
        return json.dumps(value, default=_number)
    except (TypeError, ValueError) as error:
        raise ConfigError(name, f"{error}; only what JSON can hold is stored") from error


def _number(value: Any) -> Any:
    """The Python number in a scalar of numpy or torch, as metrics often are."""
    number = value.item() if hasattr(value, "item") else value
    if isinstance(number, bool | int | float):
        return number
    raise TypeError(f"{type(value).__name__} {value!r} has no JSON form")
