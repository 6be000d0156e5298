"""numpy's arrays, scalars and dtypes as pickles have them, each checked before numpy sees it.

numpy trusts the state that a pickle gives to a dtype or an array: a wrong one has it read memory as pointers. So a
dtype gets only the state that numpy itself gives for what the file describes, and an array as many bytes as it has.
"""

from __future__ import annotations

import importlib
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ray_dcp.format.manifest import are_counts

_DTYPE_TEXT = re.compile(r"[?bhilqpBHILQPefdgFDGO]|[biufcOmM]\d{1,2}|[SaUV]\d+|[SUV]")
_MAX_NBYTES = 1 << 31

NUMPY_SCALARS = tuple({np.dtype(kind).type for kind in "?bhilqBHILQefdgFDGSUVOMm"})


class RefusedValueError(ValueError):
    """A file passes something to a plain class that no pickle of a plain value does."""


def require(allowed: bool) -> None:
    if not allowed:
        raise RefusedValueError("what is passed to it makes no plain value")


def _dtype(described: Any, *flags: Any) -> np.dtype[Any]:
    require(type(described) is str and _DTYPE_TEXT.fullmatch(described) is not None)
    require(all(type(flag) in (bool, int) for flag in flags) and len(flags) <= 2)
    return np.dtype(described, copy=True)  # a state that follows must not reach the one that all arrays share


def _set_dtype(made: np.dtype[Any], state: Any) -> None:
    """Give a dtype the state that numpy has for what ``state`` describes; flags that decide over memory are numpy's."""
    require(type(state) is tuple and len(state) in (8, 9) and type(state[0]) is int)
    meant = _described(made, state)
    own = meant.__reduce__()[2]
    require(made.kind == meant.kind and own[1:5] == state[1:5])
    require(list(own[5:8]) == list(state[5:8]) or made.kind not in "VO")
    if made != meant or made.alignment != meant.alignment:
        made.__setstate__(own)  # type: ignore[attr-defined]  # not in the stubs
    require(made == meant)


def _described(made: np.dtype[Any], state: tuple[Any, ...]) -> np.dtype[Any]:
    _, order, subarray, names, fields, nbytes, alignment, flags = state[:8]
    require(order in ("<", ">", "|", "=") and all(type(number) is int for number in (nbytes, alignment, flags)))
    if subarray is not None:
        require(type(subarray) is tuple and len(subarray) == 2 and isinstance(subarray[0], np.dtype))
        require(names is None and fields is None and _is_shape(subarray[1]))
        require(math.prod(_as_shape(subarray[1])) * subarray[0].itemsize <= _MAX_NBYTES)
        return np.dtype((subarray[0], _as_shape(subarray[1])))
    if names is not None:
        return _structured(names, fields, nbytes, aligned=bool(flags & 0x80))
    if made.kind in "Mm":
        return _of_time(made, order, state[8] if len(state) == 9 else None)
    if made.kind in "SUV":
        require(0 <= nbytes <= _MAX_NBYTES)
        count = nbytes // 4 if made.kind == "U" else nbytes
        return np.dtype(f"{made.kind}{count}").newbyteorder(_order(order))
    return made.newbyteorder(_order(order)) if made.kind != "O" else made


def _structured(names: Any, fields: Any, nbytes: int, *, aligned: bool) -> np.dtype[Any]:
    require(type(names) is tuple and type(fields) is dict and all(type(name) is str for name in names))
    require(0 <= nbytes <= _MAX_NBYTES)
    found = [fields.get(name) for name in names]
    require(all(type(field) is tuple and len(field) in (2, 3) for field in found))
    require(all(isinstance(field[0], np.dtype) and type(field[1]) is int for field in found))
    described: dict[str, Any] = {
        "names": list(names),
        "formats": [field[0] for field in found],
        "offsets": [field[1] for field in found],
        "itemsize": nbytes,
    }
    titles = [field[2] if len(field) == 3 else None for field in found]
    require(all(title is None or type(title) is str for title in titles))
    if any(title is not None for title in titles):
        described["titles"] = titles
    # numpy refuses fields that reach past the end.
    return np.dtype(described, align=aligned)  # type: ignore[call-overload]


def _of_time(made: np.dtype[Any], order: str, more: Any) -> np.dtype[Any]:
    require(type(more) is tuple and len(more) == 2 and type(more[1]) is tuple and len(more[1]) == 4)
    require(more[0] is None or more[0] == {})
    unit, count, _, _ = more[1]
    unit = unit.decode("ascii") if type(unit) is bytes else unit
    require(type(unit) is str and type(count) is int and 0 < count < 1 << 31)
    if unit == "generic":
        return np.dtype(f"{made.kind}8").newbyteorder(_order(order))
    require(re.fullmatch("[YMWDhms]|ms|us|ns|ps|fs|as", unit) is not None)
    return np.dtype(f"{made.kind}8[{count}{unit}]").newbyteorder(_order(order))


def _order(order: str) -> Any:
    return order


def _is_shape(shape: Any) -> bool:
    return are_counts(_as_shape(shape)) and type(shape) in (int, tuple)


def _as_shape(shape: Any) -> tuple[Any, ...]:
    return shape if type(shape) is tuple else (shape,)


def _reconstruct(cls: Any, shape: Any, kind: Any) -> Any:
    require(cls is np.ndarray and shape == (0,) and kind in (b"b", "b"))
    return np.ndarray.__new__(np.ndarray, (0,), "b")


def _set_array(made: Any, state: Any) -> None:
    require(type(state) is tuple and len(state) == 5 and state[0] == 1 and made.shape == (0,) and made.dtype == "b")
    _, shape, dtype, is_fortran, content = state
    require(
        type(shape) is tuple and _is_shape(shape) and isinstance(dtype, np.dtype) and type(is_fortran) in (bool, int)
    )
    require(dtype.subdtype is None)
    count = math.prod(shape)
    if dtype.hasobject:
        require(type(content) is list and len(content) == count)
        require(dtype.names is None or all(type(one) is tuple and len(one) == len(dtype.names) for one in content))
    else:
        content = content.encode("latin-1") if type(content) is str else content
        require(type(content) is bytes and len(content) == count * dtype.itemsize)
    made.__setstate__((1, shape, dtype, bool(is_fortran), content))


def _scalar(dtype: Any, content: Any = b"") -> Any:
    require(isinstance(dtype, np.dtype) and not dtype.hasobject and dtype.subdtype is None)
    content = content.encode("latin-1") if type(content) is str else content
    require(type(content) is bytes and len(content) == dtype.itemsize)
    return _MULTIARRAY.scalar(dtype, content) if content else dtype.type()


_MULTIARRAY: Any = importlib.import_module("numpy._core.multiarray")
_DTYPE_CLASSES = {type(np.dtype(kind)) for kind in "?bhilqBHILQefdgFDGSUVOMm"}

ARRAY_CLASSES: Mapping[str, type] = {
    "numpy.ndarray": np.ndarray,
    "numpy.dtype": np.dtype,
    **{f"numpy.{one.__name__}": one for one in NUMPY_SCALARS},
}
ARRAY_CALLS: Mapping[type, Callable[..., Any]] = {np.dtype: _dtype}
ARRAY_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    # numpy 1 had them in numpy.core.
    **{f"numpy.{core}.multiarray._reconstruct": _reconstruct for core in ("core", "_core")},
    **{f"numpy.{core}.multiarray.scalar": _scalar for core in ("core", "_core")},
}
ARRAY_STATES: Mapping[type, Callable[[Any, Any], None]] = {
    np.ndarray: _set_array,
    **dict.fromkeys(_DTYPE_CLASSES, _set_dtype),
}

__all__ = [
    "RefusedValueError",
    "require",
    "ARRAY_CALLS",
    "ARRAY_CLASSES",
    "ARRAY_FUNCTIONS",
    "NUMPY_SCALARS",
    "ARRAY_STATES",
]
