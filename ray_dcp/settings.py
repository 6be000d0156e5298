"""Settings, checked when they are made."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ray_dcp.errors import ConfigError

PHASES = ("collect", "plan", "stage", "write", "commit", "open", "read", "restore", "choose", "arrive")
"""What a rank, or the coordinator for it, can be busy with in a save, load, look-up of the newest step, or barrier."""

VARIABLE_PREFIX = "RAY_DCP_"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How long ranks wait for what. All ranks of a group must have the same.

    None of these limits a whole save or load: one that moves bytes may take as long as it takes, unless a pool ends
    (``finish_timeout_s``).
    """

    stall_timeout_s: float = 600.0
    """A rank that others wait for and that makes no progress for this long fails the call. Progress is a written or
    read piece, a tensor handed to a writer, a phase finished. A user's hook (``state_dict``, say) is one step."""
    phase_stall_timeout_s: Mapping[str, float] = field(default_factory=dict)
    """Other stall limits by phase, for example ``{"collect": 1800}``."""
    arrival_timeout_s: float = 1800.0
    """A rank that does not make the call that another rank made this long ago is taken for absent."""
    unreachable_grace_s: float = 10.0
    """Ray cannot reach a rank's process but has not declared it dead: it may come back within this time."""
    heartbeat_timeout_s: float = 4.0
    """A rank that is no actor, whose death Ray does not tell, is lost when it was not heard of for this long."""
    coordinator_timeout_s: float = 30.0
    """A coordinator that does not answer for this long is replaced; one that cannot be found is looked for as long. A
    new process then takes some seconds to start."""
    finish_timeout_s: float = 1800.0
    """A ``RankPool`` that is left or formed anew gives the asynchronous saves of its ranks so long to be over."""

    def __post_init__(self) -> None:
        for setting in dataclasses.fields(self):
            value = getattr(self, setting.name)
            if not isinstance(value, Mapping):
                require_seconds(setting.name, value)
        for phase, value in self.phase_stall_timeout_s.items():
            if phase not in PHASES:
                raise ConfigError("phase_stall_timeout_s", f"{phase!r} is no phase; there are {', '.join(PHASES)}")
            require_seconds(f"phase_stall_timeout_s[{phase!r}]", value)

    def stall_limit_s(self, phase: str) -> float:
        """How long a rank may stand still in ``phase``."""
        return self.phase_stall_timeout_s.get(phase, self.stall_timeout_s)

    @classmethod
    def from_variables(cls, variables: Mapping[str, str]) -> Limits:
        """The limits that environment variables such as ``RAY_DCP_STALL_TIMEOUT_S`` set; defaults for the rest."""
        given: dict[str, Any] = {}
        for setting in dataclasses.fields(cls):
            text = variables.get(VARIABLE_PREFIX + setting.name.upper())
            if text is not None and setting.name != "phase_stall_timeout_s":
                variable = VARIABLE_PREFIX + setting.name.upper()
                given[setting.name] = seconds_from(variable, text)
                require_seconds(variable, given[setting.name])
        return cls(**given)


REPLICA_CHECKS = ("warn", "error", "off")
DEFAULT_REPLICA_NBYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class ReplicaCheck:
    """What a save does about values that ranks hold under one name and that differ."""

    mode: str = "warn"
    """"warn": the lowest rank's value is saved, with a warning for each name. "error": the save is refused. "off":
    nothing is looked at, and any rank's value may be the one that is saved."""
    max_nbytes: int | None = DEFAULT_REPLICA_NBYTES
    """Tensors of up to so many bytes are compared whole, of larger ones 64 KiB spread over them; None: all whole."""

    def __post_init__(self) -> None:
        if self.mode not in REPLICA_CHECKS:
            raise ConfigError("replica_check", f"{self.mode!r} is none of {', '.join(map(repr, REPLICA_CHECKS))}")
        nbytes = self.max_nbytes
        if nbytes is not None and (isinstance(nbytes, bool) or not isinstance(nbytes, int) or nbytes < 0):
            raise ConfigError("replica_check_nbytes", f"is a number of bytes, or None for all, not {nbytes!r}")


DEFAULT_REPLICA_CHECK = ReplicaCheck()


def replica_check_from(
    variables: Mapping[str, str], mode: str | None = None, max_nbytes: int | None = DEFAULT_REPLICA_NBYTES
) -> ReplicaCheck:
    """The check that is asked for: ``mode``, else what ``RAY_DCP_REPLICA_CHECK`` says, else a warning."""
    return ReplicaCheck(mode or variables.get(VARIABLE_PREFIX + "REPLICA_CHECK") or "warn", max_nbytes)


def share_reads_from(variables: Mapping[str, str]) -> bool:
    """Whether ranks of one node may read for each other: yes, unless ``RAY_DCP_SHARE_READS`` is 0 or false.

    Each rank may say so for itself.
    """
    variable = VARIABLE_PREFIX + "SHARE_READS"
    return flag_from(variable, variables.get(variable, "1"))


def seconds_from(setting: str, text: str) -> float:
    """The number in ``text``; whether it makes sense is checked where it is used."""
    try:
        return float(text)
    except ValueError:
        raise ConfigError(setting, f"{text!r} is no number of seconds") from None


def require_seconds(setting: str, value: object, *, may_be_0: bool = False) -> None:
    """Raise ``ConfigError`` unless ``value`` is a finite number above 0; 0 too where it ``may_be_0``."""
    number = value if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    if not (math.isfinite(number) and (number > 0 or (may_be_0 and number == 0))):
        least = "0 or more" if may_be_0 else "above 0"
        raise ConfigError(setting, f"must be a finite number of seconds {least}, not {value!r}")


def flag_from(setting: str, text: str) -> bool:
    """True for true and 1, False for false and 0."""
    known = {"true": True, "1": True, "false": False, "0": False}
    if text.lower() not in known:
        raise ConfigError(setting, f"{text!r} is none of 0, 1, false and true")
    return known[text.lower()]


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
