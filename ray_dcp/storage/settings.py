"""Settings of stores: checked, and read from texts such as environment variables and parts of a URL."""

from __future__ import annotations

import math

from ray_dcp.errors import ConfigError


def require_seconds(setting: str, value: object) -> None:
    """Raise ``ConfigError`` unless ``value`` is a finite number above 0."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not (math.isfinite(value) and value > 0):
        raise ConfigError(setting, f"must be a finite number of seconds above 0, not {value!r}")


def require_count(setting: str, value: object, *, least: int = 1) -> None:
    """Raise ``ConfigError`` unless ``value`` is a whole number, ``least`` or more."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(setting, f"must be a whole number, {least} or more, not {value!r}")


def seconds_from(setting: str, text: str) -> float:
    """The number in ``text``; whether it makes sense is checked where it is used."""
    try:
        return float(text)
    except ValueError:
        raise ConfigError(setting, f"{text!r} is no number of seconds") from None


def count_from(setting: str, text: str) -> int:
    """The whole number in ``text``."""
    try:
        return int(text)
    except ValueError:
        raise ConfigError(setting, f"{text!r} is no whole number") from None


def flag_from(setting: str, text: str) -> bool:
    """True for true and 1, False for false and 0."""
    known = {"true": True, "1": True, "false": False, "0": False}
    if text.lower() not in known:
        raise ConfigError(setting, f"{text!r} is neither true nor false")
    return known[text.lower()]
