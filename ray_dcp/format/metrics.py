"""Metrics of a checkpoint as its manifest keeps them: JSON values, and what comes back is what was given."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ray_dcp.errors import ConfigError

_JSON_SCALARS = (str, int, float, bool, type(None))
_MAX_METRICS_DEPTH = 50


def json_values(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """``metrics`` as they will be read back: numbers of numpy and torch become Python's, tuples lists.

    NaN and infinity stay what they are. Raises ``ConfigError`` naming the first value that JSON has no word for, and
    the first key that is not text: JSON would make text of it.
    """
    if not isinstance(metrics, Mapping):
        raise ConfigError("metrics", f"is a {type(metrics).__name__}; pass a dict")
    return {_key(key, "metrics"): _value(value, f"metrics[{key!r}]", 1) for key, value in metrics.items()}


def _key(key: object, name: str) -> str:
    if not isinstance(key, str):
        raise ConfigError(name, f"the key {key!r} is a {type(key).__name__}; JSON has text alone: pass {str(key)!r}")
    return str.__str__(key)


def _value(value: Any, name: str, depth: int) -> Any:
    if depth > _MAX_METRICS_DEPTH:
        raise ConfigError(name[:100], f"is nested deeper than {_MAX_METRICS_DEPTH}, or holds itself")
    if isinstance(value, Mapping):
        return {_key(key, name): _value(held, f"{name}[{key!r}]", depth + 1) for key, held in value.items()}
    if isinstance(value, list | tuple):
        return [_value(held, f"{name}[{number}]", depth + 1) for number, held in enumerate(value)]
    plain = _scalar(value)
    if not isinstance(plain, _JSON_SCALARS):
        raise ConfigError(
            name, f"is a {type(value).__name__}, which JSON has no word for: give numbers, texts, lists or dicts"
        )
    return plain


def _scalar(value: Any) -> Any:
    """One number, from whatever library; an array of several stays what it is."""
    if isinstance(value, str):
        return str.__str__(value)  # of a subclass, such as an enum's member, the text that it is
    for kind in (bool, int, float):
        if isinstance(value, kind):
            return kind(value)
    item = getattr(value, "item", None)
    try:
        return value if item is None else item()
    except (TypeError, ValueError, RuntimeError):
        return value
