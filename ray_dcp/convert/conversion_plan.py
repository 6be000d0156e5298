"""Deciding what a conversion will do: which values, under which names, into which files, and what they replace.

Whatever cannot be converted is found here, before anything is written.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from ray_dcp.catalog.committed import is_committed
from ray_dcp.catalog.explain import TORCH_SUFFIXES
from ray_dcp.convert.source import Source, SourceValue, open_source
from ray_dcp.errors import ConfigError, StateDictError
from ray_dcp.format.safetensors_header import TEXTS, encode_header, has_dtype
from ray_dcp.planning.values.containers import Containers
from ray_dcp.reads.safetensors_folder import INDEX, INDEX_SUFFIX, ONE_FILE, SUFFIX
from ray_dcp.store.location.place import absolute
from ray_dcp.store.location.urls import shown_url, split_url
from ray_dcp.store.open import open_store
from ray_dcp.store.store import Store, as_folders, exists
from ray_dcp.wording import counted, joined

FILE_KINDS = ("dcp", "safetensors", "torch")
MAX_SHARD_NBYTES = 5 * 10**9
"""Most bytes of tensors in one file of several, as Hugging Face's libraries split."""
_MAX_NAMED = 5
HEADER_TEXTS = {"format": "pt"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertOptions:
    """How to convert."""

    to: str | None = None
    """Format to write: ``dcp``, ``safetensors`` or ``torch``; None goes by the destination's name."""
    include: Sequence[str] = ()
    """Shell patterns of names; a name is converted if one fits, or if no pattern is given."""
    exclude: Sequence[str] = ()
    """Shell patterns of names that are left out."""
    strip_prefix: str = ""
    """Text that is taken off names that begin with it."""
    add_prefix: str = ""
    """Text that is put in front of every name, after ``strip_prefix``."""
    skip_python: bool = False
    """Leave out everything that is not a tensor."""
    max_shard_nbytes: int | None = None
    """Most bytes of tensors in one safetensors file of a folder; None is ``MAX_SHARD_NBYTES``."""
    overwrite: bool = False
    """Replace what is at the destination."""

    def __post_init__(self) -> None:
        if self.to is not None and self.to not in FILE_KINDS:
            raise ConfigError("to", f"{self.to!r} is not a format: use {', '.join(FILE_KINDS)}")
        if self.max_shard_nbytes is not None and self.max_shard_nbytes <= 0:
            raise ConfigError("max_shard_nbytes", f"must be positive, not {self.max_shard_nbytes}")


@dataclass(frozen=True, slots=True)
class PlannedValue:
    """One value and the name it will have."""

    name: str
    value: SourceValue


@dataclass(frozen=True, slots=True)
class PlannedFile:
    """One file, and the tensors in it in the order of their bytes."""

    key: str
    nbytes: int
    """Bytes of the whole file; of its tensors alone where its other parts are not known yet."""
    values: Sequence[PlannedValue]


@dataclass(frozen=True, slots=True)
class ConvertPlan:
    """All that a conversion will do."""

    source: Source
    dest: str
    dest_kind: str
    folder: str
    """The folder that the files will lie in; for a checkpoint, its own."""
    values: Sequence[PlannedValue]
    files: Sequence[PlannedFile]
    """The files to write; empty for a checkpoint, whose files are named when they are written."""
    left_out: Sequence[str] = field(default=())
    """Names that ``include``, ``exclude`` or ``skip_python`` leave out."""
    replaced: Sequence[str] = field(default=())
    """Keys of files in the folder that will be removed or written anew."""
    containers: Containers = ()
    """What names do not tell of the state dict."""

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(planned.value.nbytes for planned in self.values if planned.value.dtype is not None)

    @property
    def index(self) -> str | None:
        """The file that will say which of several safetensors files holds what."""
        return INDEX if len(self.files) > 1 else None


def plan_convert(source: str | os.PathLike[str], dest: str | os.PathLike[str], options: ConvertOptions) -> ConvertPlan:
    """Look at both sides and decide; nothing is written.

    Raises ``ConfigError`` where the destination is taken or an option does not fit, ``StateDictError`` for values that
    the destination's format cannot hold, naming all of them, and what ``open_source`` raises.
    """
    where = absolute(dest, setting="DEST")
    kind = options.to or _kind_of(where)
    opened = open_source(source)
    chosen = _choose(opened.values, options)
    values = _rename([value for value in chosen if not (options.skip_python and value.dtype is None)], options)
    kept = {planned.value.name for planned in values}
    left_out = [value.name for value in opened.values if value.name not in kept]
    if not values:
        source_holds = "the options leave out all that {} holds" if left_out else "{} holds nothing"
        raise ConfigError("SOURCE", source_holds.format(shown_url(opened.location)))
    if kind == "safetensors":
        _require_storable(values)
    folder, key = (where, "") if kind == "dcp" else _file_place(where, kind)
    files = _plan_files(kind, key, values, options.max_shard_nbytes)
    _require_apart(opened, kind, folder, key)
    replaced = _replaced(open_store(folder), kind, key, where)
    if replaced and not options.overwrite:
        raise ConfigError("DEST", f"{replaced[0]} is in {shown_url(folder)} already; pass --overwrite to replace it")
    containers = _containers(opened, values, options)
    return ConvertPlan(opened, where, kind, folder, values, files, left_out, replaced, containers)


def _kind_of(dest: str) -> str:
    if dest.endswith(SUFFIX):
        return "safetensors"
    if dest.endswith(TORCH_SUFFIXES):
        return "torch"
    raise ConfigError("--to", f"say which format {shown_url(dest)} is to have: {', '.join(FILE_KINDS)}")


def _choose(values: Sequence[SourceValue], options: ConvertOptions) -> list[SourceValue]:
    for pattern in (*options.include, *options.exclude):
        if not any(fnmatchcase(value.name, pattern) for value in values):
            raise ConfigError("--include/--exclude", f"no name fits the pattern {pattern!r}")
    return [
        value
        for value in values
        if (not options.include or any(fnmatchcase(value.name, pattern) for pattern in options.include))
        and not any(fnmatchcase(value.name, pattern) for pattern in options.exclude)
    ]


def _rename(values: Sequence[SourceValue], options: ConvertOptions) -> list[PlannedValue]:
    if options.strip_prefix and not any(value.name.startswith(options.strip_prefix) for value in values):
        raise ConfigError("--strip-prefix", f"no name begins with {options.strip_prefix!r}")
    renamed = [
        PlannedValue(options.add_prefix + value.name.removeprefix(options.strip_prefix), value) for value in values
    ]
    repeated = sorted(name for name, count in Counter(planned.name for planned in renamed).items() if count > 1)
    if repeated:
        raise ConfigError("--strip-prefix", f"several values would have the name {joined(map(repr, repeated))}")
    return renamed


def _containers(source: Source, values: Sequence[PlannedValue], options: ConvertOptions) -> Containers:
    """The containers that are converted; empty where names change: then names are all there is."""
    if any(planned.name != planned.value.name for planned in values):
        return ()
    empty = [path for path, _, keys in source.containers if keys == "none"]
    names = {tuple(path): ".".join(map(str, path)) for path in empty}
    return [row for row in source.containers if _fits(names.get(tuple(row[0])), options)]


def _fits(name: str | None, options: ConvertOptions) -> bool:
    """Whether an empty dict is converted; ``name`` is None for others, whose values decide."""
    if name is None:
        return True
    included = not options.include or any(fnmatchcase(name, pattern) for pattern in options.include)
    return included and not any(fnmatchcase(name, pattern) for pattern in options.exclude)


def _require_storable(values: Sequence[PlannedValue]) -> None:
    problems = [
        f"{planned.value.name}: the format has no dtype {planned.value.dtype}"
        for planned in values
        if planned.value.dtype is not None and not has_dtype(planned.value.dtype)
    ]
    if python := [planned.value.name for planned in values if planned.value.dtype is None]:
        left = f"leave {'it' if len(python) == 1 else 'them'} out with --skip-python or --exclude"
        problems.insert(0, f"{counted(len(python), 'Python value')}: {joined(python, most=_MAX_NAMED)}; {left}")
    problems += [f"{TEXTS}: the format has another use for this name" for one in values if one.name == TEXTS]
    if problems:
        raise StateDictError("safetensors cannot hold all of it; nothing was written", problems)


def _file_place(where: str, kind: str) -> tuple[str, str]:
    """The folder that files go to, and the file's key where the destination is one file."""
    if kind == "safetensors" and not where.endswith(SUFFIX):
        return where, ""
    folder, key = split_url(where)
    folder = folder or "/"
    if not key or key in open_store(folder).list_folders():
        raise ConfigError("DEST", f"{shown_url(where)} is a folder; name a file in it")
    return folder, key


def _plan_files(kind: str, key: str, values: Sequence[PlannedValue], max_nbytes: int | None) -> list[PlannedFile]:
    if kind == "safetensors":
        if key and max_nbytes is not None:
            raise ConfigError("--max-shard-size", f"DEST is one file; give a folder (without {SUFFIX}) to split")
        shards = [values] if key else _split(values, max_nbytes or MAX_SHARD_NBYTES)
        names = [key or ONE_FILE] if len(shards) == 1 else _shard_names(len(shards))
        return [_safetensors_file(name, shard) for name, shard in zip(names, shards, strict=True)]
    if max_nbytes is not None:
        raise ConfigError("--max-shard-size", "is for safetensors alone")
    tensors = [planned for planned in values if planned.value.dtype is not None]
    return [] if kind == "dcp" else [PlannedFile(key, sum(one.value.nbytes for one in tensors), tensors)]


def _split(values: Sequence[PlannedValue], max_nbytes: int) -> list[list[PlannedValue]]:
    """Shards in the source's order, each as full as it may be; a larger tensor has a shard to itself."""
    shards: list[list[PlannedValue]] = [[]]
    held = 0
    for planned in values:
        if shards[-1] and held + planned.value.nbytes > max_nbytes:
            shards.append([])
            held = 0
        shards[-1].append(planned)
        held += planned.value.nbytes
    return shards


def _shard_names(count: int) -> list[str]:
    return [f"model-{number:05}-of-{count:05}{SUFFIX}" for number in range(1, count + 1)]


def _safetensors_file(key: str, values: Sequence[PlannedValue]) -> PlannedFile:
    # Wide dtypes first: so every tensor lies at a multiple of its dtype's width.
    ordered = sorted(values, key=lambda one: (-_width(one.value), one.name))
    front, header = encode_header(described(ordered), HEADER_TEXTS)
    return PlannedFile(key, len(front) + sum(tensor.nbytes for tensor in header.tensors), ordered)


def described(values: Sequence[PlannedValue]) -> list[tuple[str, str, tuple[int, ...]]]:
    """What a safetensors header says of ``values``."""
    return [(planned.name, planned.value.dtype or "", planned.value.shape) for planned in values]


def _width(value: SourceValue) -> int:
    _, header = encode_header([("", value.dtype or "", (1,))], {})
    return header.tensors[0].nbytes


def _require_apart(source: Source, kind: str, folder: str, key: str) -> None:
    """Raise where what is to be written would be mixed with what is read."""
    if _identity(source.folder) != _identity(folder):
        return
    if source.key and key:
        mixed = source.key == key
    elif source.key or key:
        mixed = source.kind == kind == "safetensors"  # a folder of them is one model
    else:
        mixed = True
    if mixed:
        raise ConfigError("DEST", f"{shown_url(folder)} is where SOURCE lies; give another place")


def _identity(folder: str) -> str:
    store = open_store(folder or "/")
    folders = as_folders(store)
    return folders.real_url() if folders is not None else store.url.rstrip("/")


def _replaced(store: Store, kind: str, key: str, where: str) -> list[str]:
    """What is at the destination already. Raises where it would hide what is to be written."""
    if kind == "dcp":
        return [".metadata"] if is_committed(store) else []
    if key:
        return [key] if exists(store, key) else []
    if is_committed(store):
        raise ConfigError("DEST", f"a checkpoint is committed at {shown_url(where)} and would go on being read")
    return [one.key for one in store.list() if "/" not in one.key and one.key.endswith((SUFFIX, INDEX_SUFFIX))]
