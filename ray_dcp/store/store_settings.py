"""Settings of stores: checked, and read from texts such as environment variables and parts of a URL."""

from __future__ import annotations

from ray_dcp.errors import ConfigError


def require_count(setting: str, value: object, *, least: int = 1) -> None:
    """Raise ``ConfigError`` unless ``value`` is a whole number, ``least`` or more."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(setting, f"must be a whole number, {least} or more, not {value!r}")


def count_from(setting: str, text: str) -> int:
    """The whole number in ``text``."""
    try:
        return int(text)
    except ValueError:
        raise ConfigError(setting, f"{text!r} is no whole number") from None
