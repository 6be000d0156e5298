"""Lists in messages: a model has thousands of names, a cluster thousands of ranks, a reader one screen."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable

MAX_LISTED = 20
"""Entries of one list in one message. What is left out is counted, and kept in the error's or report's own fields."""
_MAX_LINE = 600
"""Characters of one entry: enough for a name, two shapes and a path."""


def cut(text: str, most: int = _MAX_LINE) -> str:
    """``text``, or its beginning and end with how much was left out between."""
    if len(text) <= most:
        return text
    head, tail = most * 2 // 3, most // 3
    return f"{text[:head]}[... {len(text) - head - tail} characters ...]{text[-tail:]}"


def first_lines(lines: Collection[str], *, kept_in: str = "", most: int = MAX_LISTED) -> list[str]:
    """The first ``most`` of ``lines``, long ones cut, and a line that counts the rest."""
    shown = [cut(line) for line in itertools.islice(lines, most)]
    rest = len(lines) - len(shown)
    if rest > 0:
        shown.append(f"and {rest} more" + (f": {kept_in} has all" if kept_in else ""))
    return shown


def first_line_of(error: BaseException) -> str:
    """The first line of an error's text: Ray's and torch's go on for pages. Its class's name where there is no text."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def joined(names: Iterable[object], *, most: int = MAX_LISTED) -> str:
    """Names as in ``a, b and 3 more``; all of them where there are at most ``most`` + 1."""
    texts = [cut(str(name)) for name in names]
    if len(texts) <= most + 1:
        return ", ".join(texts)
    return f"{', '.join(texts[:most])} and {len(texts) - most} more"


def number_runs(numbers: Iterable[int], *, most: int = MAX_LISTED) -> str:
    """Numbers in order, with runs joined: ``0-3, 6``; an empty text where there are none."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number <= runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return joined((str(a) if a == b else f"{a}-{b}" for a, b in runs), most=most)


def ranks_text(ranks: Collection[int]) -> str:
    """Numbers of ranks as in ``rank 3`` or ``ranks 0-3, 6``."""
    return f"{'rank' if len(set(ranks)) == 1 else 'ranks'} {number_runs(ranks)}"


def counted(number: int, noun: str) -> str:
    """A number and its noun, as in ``1 file`` or ``2 files``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def format_nbytes(nbytes: int) -> str:
    """A size with its binary unit: ``1.5 GiB``; whole bytes below 1 KiB."""
    if nbytes < 1024:
        return f"{nbytes} B"
    scaled = float(nbytes)
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        scaled /= 1024
        if scaled < 1023.95:
            return f"{scaled:.1f} {unit}"
    return f"{scaled / 1024:.1f} PiB"


def format_seconds(seconds: float) -> str:
    """A time with the unit that suits it: ``12 ms``, ``1.5 s``, ``7.5 min``, ``3.1 h``, ``2.5 days``."""
    for below, unit_s, unit in (
        (0.9995, 0.001, "ms"),
        (120.0, 1.0, "s"),
        (7200.0, 60.0, "min"),
        (172800.0, 3600.0, "h"),
    ):
        if seconds < below:
            return f"{seconds / unit_s:.3g} {unit}"
    days = seconds / 86400
    return f"{days:.3g} days" if days < 1000 else f"{days:.0f} days"
