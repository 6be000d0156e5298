"""Settings: what they may be, and how they are read from the parameters of a URL and from environment variables.

Each is an argument of a class here, or of ``S3Options`` beside the stores, and most have a variable ``RAY_DCP_...``. A
number is seconds where its type is ``float``, a count where it is ``int``. However a setting is given, it is checked in
the same way, and ``ConfigError`` names the argument, parameter or variable. ``docs/settings.md`` has all of them.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from ray_dcp.errors import ConfigError


class Phase(str, enum.Enum):
    """What a rank, or the coordinator for it, can be busy with in a save, a load, a look-up of the newest step or a
    barrier. Each is the word that errors and limits use for it.
    """

    COLLECT = "collect"
    """``Stateful`` objects are asked for their state, or for what is to be filled."""
    OPEN = "open"
    """The metadata of a checkpoint is read."""
    PLAN = "plan"
    """Ranks plan what they write or read, and the coordinator puts the plans together."""
    PLANS = "plans"
    """Ranks send plans of a load that they had kept back."""
    GLOBAL_PLAN = "global plan"
    """Rank 0 puts the plans together, with a planner, writer or reader that cannot travel."""
    STAGE = "stage"
    """What an asynchronous save will write is copied."""
    WRITE = "write"
    COMMIT = "commit"
    READ = "read"
    RESTORE = "restore"
    """``Stateful`` objects are given their state."""
    CHOOSE = "choose"
    """The coordinator looks for the newest step."""
    ARRIVE = "arrive"
    """Ranks come to a barrier."""

    __str__ = str.__str__
    __repr__ = str.__repr__


PHASES = tuple(map(str, Phase))

VARIABLE_PREFIX = "RAY_DCP_"
RETRY_PREFIX = "retry_"


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
    """Stall limits for phases that need other ones, by name, for example ``{"collect": 1800}``."""
    arrival_timeout_s: float = 1800.0
    """A rank that does not make the call that another rank made this long ago is taken for absent."""
    unreachable_grace_s: float = 10.0
    """A rank's process that Ray cannot reach, but has not declared dead, may come back within this time."""
    heartbeat_timeout_s: float = 4.0
    """A rank that is not an actor, so that Ray does not tell its death, is lost when unheard of for this long."""
    coordinator_timeout_s: float = 30.0
    """A coordinator that does not answer for this long is replaced. A new process then takes some seconds to start,
    which does not count."""
    finish_timeout_s: float = 1800.0
    """A ``RankPool`` that is left or formed anew gives the asynchronous saves of its ranks this long to end."""

    def __post_init__(self) -> None:
        require_valid(self)

    def stall_limit_s(self, phase: str) -> float:
        """How long a rank may stand still in ``phase``."""
        return self.phase_stall_timeout_s.get(phase, self.stall_timeout_s)

    @classmethod
    def from_variables(cls, variables: Mapping[str, str]) -> Limits:
        """The limits that environment variables such as ``RAY_DCP_STALL_TIMEOUT_S`` set; defaults for the rest."""
        return cls(**read_settings(cls, {}, variables))


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """How often and how long a store is asked again. Waits grow from one to the next and are drawn at random."""

    max_attempts: int = 20
    """Attempts of one operation, the first one included; 1 tries nothing again."""
    max_elapsed_s: float = 120.0
    """No attempt begins later than this after the first one. An attempt that hangs may end later: a request times out
    by itself, see ``S3Options.request_timeout_s``."""
    initial_backoff_s: float = 0.2
    """The longest wait before the second attempt; it doubles with each attempt."""
    max_backoff_s: float = 20.0
    """The longest wait before any attempt."""

    def __post_init__(self) -> None:
        require_valid(self)

    @classmethod
    def from_texts(cls, parameters: Mapping[str, str], variables: Mapping[str, str]) -> RetryPolicy:
        """The policy that parameters of a URL such as ``retry_max_attempts`` give.

        Where they are silent, environment variables do, else the defaults. Raises ``ConfigError``.
        """
        return cls(**read_settings(cls, parameters, variables, parameter_prefix=RETRY_PREFIX, variable_prefix="RETRY_"))


REPLICA_CHECKS = ("warn", "error", "off")
DEFAULT_REPLICA_NBYTES = 1 << 20


def _require_replica_check(setting: str, mode: str) -> None:
    if mode not in REPLICA_CHECKS:
        raise ConfigError(setting, f"{mode!r} is none of {', '.join(map(repr, REPLICA_CHECKS))}")


@dataclass(frozen=True, slots=True)
class ReplicaCheck:
    """What a save does about values that ranks hold under one name and that differ."""

    mode: str = "warn"
    """"warn": the lowest rank's value is saved, with a warning for each name. "error": the save is refused. "off":
    nothing is looked at, and any rank's value may be the one that is saved."""
    max_nbytes: int | None = DEFAULT_REPLICA_NBYTES
    """Tensors of up to this many bytes are compared whole, larger ones by 64 KiB spread over them; None: all whole."""

    def __post_init__(self) -> None:
        _require_replica_check("replica_check", self.mode)
        nbytes = self.max_nbytes
        if nbytes is not None and (isinstance(nbytes, bool) or not isinstance(nbytes, int) or nbytes < 0):
            raise ConfigError("replica_check_nbytes", f"is a number of bytes, or None for all, not {nbytes!r}")


DEFAULT_REPLICA_CHECK = ReplicaCheck()


def replica_check_from(
    variables: Mapping[str, str], mode: str | None = None, max_nbytes: int | None = DEFAULT_REPLICA_NBYTES
) -> ReplicaCheck:
    """The check that is asked for: ``mode``, else what ``RAY_DCP_REPLICA_CHECK`` says, else "warn"."""
    variable = variable_of("replica_check")
    if not mode and variables.get(variable):
        mode = variables[variable]
        _require_replica_check(variable, mode)
    return ReplicaCheck(mode or "warn", max_nbytes)


DEFAULT_OVERHEAD = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class PaceSettings:
    """What ``CheckpointManager.due`` goes by besides what it measures."""

    overhead: float = DEFAULT_OVERHEAD
    """The share of the time of training that saves may take at most."""
    mtbf_s: float | None = None
    """The mean time between failures of the whole run; None: by the interruptions that are seen."""

    def __post_init__(self) -> None:
        _require_share("overhead", self.overhead)
        if self.mtbf_s is not None:
            require_seconds("mtbf_s", self.mtbf_s)

    @classmethod
    def from_variables(
        cls, variables: Mapping[str, str], *, overhead: float | None = None, mtbf_s: float | None = None
    ) -> PaceSettings:
        """These settings; where one is None, what ``RAY_DCP_OVERHEAD`` or ``RAY_DCP_MTBF_S`` says, else the default.

        Raises ``ConfigError``.
        """
        overhead_variable, mtbf_variable = variable_of("overhead"), variable_of("mtbf_s")
        if overhead is None and variables.get(overhead_variable):
            overhead = _share_from(overhead_variable, variables[overhead_variable])
        if mtbf_s is None and variables.get(mtbf_variable):
            mtbf_s = seconds_from(mtbf_variable, variables[mtbf_variable])
            require_seconds(mtbf_variable, mtbf_s)
        return cls(overhead=DEFAULT_OVERHEAD if overhead is None else overhead, mtbf_s=mtbf_s)


def share_reads_from(variables: Mapping[str, str]) -> bool:
    """Whether ranks of one node may read for each other: yes, unless ``RAY_DCP_SHARE_READS`` is 0 or false.

    Each rank may say so for itself.
    """
    variable = variable_of("share_reads")
    return flag_from(variable, variables.get(variable, "1"))


def agents_from(variables: Mapping[str, str]) -> bool:
    """Whether a node agent writes asynchronous saves: yes, unless ``RAY_DCP_AGENTS`` is 0 or false.

    Without one a thread of the rank does, and the rank's death loses the save.
    """
    variable = variable_of("agents")
    return flag_from(variable, variables.get(variable, "1"))


def memory_tier_from(variables: Mapping[str, str]) -> bool:
    """Whether files that a node agent has written stay readable in memory: yes, unless ``RAY_DCP_MEMORY_TIER`` is 0.

    A rank says so for the files that it stages, and for where its loads look.
    """
    variable = variable_of("memory_tier")
    return flag_from(variable, variables.get(variable, "1"))


DEFAULT_MEMORY_KEEP_S = 180.0


def memory_keep_from(variables: Mapping[str, str]) -> float:
    """How long the memory of a group that is gone stays for one of its name: what ``RAY_DCP_MEMORY_KEEP_S`` says.

    It is in seconds; 0 keeps nothing.
    """
    variable = variable_of("memory_keep_s")
    seconds = seconds_from(variable, variables.get(variable, str(DEFAULT_MEMORY_KEEP_S)))
    require_seconds(variable, seconds, may_be_0=True)
    return seconds


_LEAST_WRITE_RATE = 2**20


def agent_write_rate_from(variables: Mapping[str, str]) -> float | None:
    """How many bytes a second a node's agent writes at most, as ``RAY_DCP_AGENT_WRITE_RATE`` says; None: all it can.

    1 MiB a second is the least: below that a write would look as if it stood still. Raises ``ConfigError``.
    """
    variable = variable_of("agent_write_rate")
    text = variables.get(variable, "")
    if not text:
        return None
    try:
        rate = float(text)
    except ValueError:
        rate = math.nan
    if not rate >= _LEAST_WRITE_RATE:
        raise ConfigError(
            variable, f"{text!r} is not a number of bytes a second of {_LEAST_WRITE_RATE} (1 MiB) or more"
        )
    return rate


def staging_nbytes_from(variables: Mapping[str, str]) -> int | None:
    """How many bytes a rank's staging buffers take at most, together, as ``RAY_DCP_STAGING_NBYTES`` says.

    None: as many as it takes to stage each save whole. Raises ``ConfigError``.
    """
    variable = variable_of("staging_nbytes")
    text = variables.get(variable, "")
    if not text:
        return None
    nbytes = count_from(variable, text)
    require_count(variable, nbytes)
    return nbytes


WHEN_BUSY = ("wait", "skip", "error")


@dataclass(frozen=True, slots=True, kw_only=True)
class InFlight:
    """How many asynchronous saves may go on at once, and what becomes of one more. All ranks must have the same."""

    max_in_flight: int = 2
    """At most so many saves are staged and not committed; each needs memory for what its rank writes."""
    when_busy: str = "wait"
    """"wait": one more waits until another has ended. "skip": it is left out, on all ranks. "error": it raises."""

    def __post_init__(self) -> None:
        require_count("max_in_flight", self.max_in_flight)
        _require_when_busy("when_busy", self.when_busy)

    @classmethod
    def from_variables(
        cls, variables: Mapping[str, str], *, max_in_flight: int | None = None, when_busy: str | None = None
    ) -> InFlight:
        """These settings; where one is None, what ``RAY_DCP_MAX_IN_FLIGHT`` or ``RAY_DCP_WHEN_BUSY`` says, or defaults.

        Raises ``ConfigError``.
        """
        said = read_settings(cls, {}, variables)
        if when_busy is None and "when_busy" in said:
            _require_when_busy(variable_of("when_busy"), said["when_busy"])
        given = {"max_in_flight": max_in_flight, "when_busy": when_busy}
        return cls(**{**said, **{name: value for name, value in given.items() if value is not None}})


def _require_when_busy(setting: str, value: object) -> None:
    if value not in WHEN_BUSY:
        raise ConfigError(setting, f"{value!r} is none of {', '.join(map(repr, WHEN_BUSY))}")


# How settings are read and checked.

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


def read_settings(
    cls: type[DataclassInstance],
    parameters: Mapping[str, str],
    variables: Mapping[str, str],
    *,
    parameter_prefix: str = "",
    variable_prefix: str = "",
) -> dict[str, Any]:
    """Return the arguments for the settings of ``cls`` that a parameter or, where that is silent, a variable gives.

    The prefixes are, for example, ``retry_`` and ``RETRY_``. An empty variable says nothing where a text is meant, and
    is an error elsewhere. Raises ``ConfigError``, which names the parameter or variable.
    """
    given = {}
    for setting in dataclasses.fields(cls):
        kind, variable = _kind(setting), variable_of(setting.name, variable_prefix)
        name, texts = parameter_prefix + setting.name, parameters
        if name not in parameters:
            name, texts = variable, variables
        if kind is None or name not in texts or (texts is variables and kind is _TEXT and not texts[name]):
            continue
        given[setting.name] = kind.read(name, texts[name])
        kind.require(name, given[setting.name], **setting.metadata)
    return given


def variable_of(setting: str, prefix: str = "") -> str:
    """Return the environment variable that gives a setting."""
    return f"{VARIABLE_PREFIX}{prefix}{setting.upper()}"


def require_valid(settings: DataclassInstance) -> None:
    """Raise ``ConfigError`` naming the first setting of a dataclass that is not what its type says."""
    for setting in dataclasses.fields(settings):
        kind = _kind(setting)
        if kind is not None:
            kind.require(setting.name, getattr(settings, setting.name), **setting.metadata)


def seconds_from(setting: str, text: str) -> float:
    """The number in ``text``; ``require_seconds`` checks whether it makes sense. Raises ``ConfigError``."""
    try:
        return float(text)
    except ValueError:
        raise ConfigError(setting, f"{text!r} is not a number of seconds") from None


def _share_from(setting: str, text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = math.nan
    _require_share(setting, share if share == share else text)
    return share


def _require_share(setting: str, value: object) -> None:
    """Raise ``ConfigError`` unless ``value`` is a number between 0 and 1."""
    number = value if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    if not 0 < number < 1:
        raise ConfigError(setting, f"must be a share of the time above 0 and below 1, such as 0.01, not {value!r}")


def require_seconds(setting: str, value: object, *, may_be_0: bool = False, least: float | None = None) -> None:
    """Raise ``ConfigError`` unless ``value`` is a finite number above 0 (or 0: ``may_be_0``), at least ``least``."""
    number = value if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    if not (math.isfinite(number) and (number > 0 or (may_be_0 and number == 0))):
        above = "0 or more" if may_be_0 else "above 0"
        raise ConfigError(setting, f"must be a finite number of seconds {above}, not {value!r}")
    if least is not None and number < least:
        raise ConfigError(setting, f"must be {least:g} or more, not {value!r}")


def flag_from(setting: str, text: str) -> bool:
    """True for "true" and "1", False for "false" and "0", in any case. Raises ``ConfigError`` for anything else."""
    known = {"true": True, "1": True, "false": False, "0": False}
    if text.lower() not in known:
        raise ConfigError(setting, f"{text!r} is none of 0, 1, false and true")
    return known[text.lower()]


def require_count(setting: str, value: object, *, least: int = 1) -> None:
    """Raise ``ConfigError`` unless ``value`` is a whole number, ``least`` or more."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(setting, f"must be a whole number, {least} or more, not {value!r}")


def count_from(setting: str, text: str) -> int:
    """The whole number in ``text``. Raises ``ConfigError``."""
    try:
        return int(text)
    except ValueError:
        raise ConfigError(setting, f"{text!r} is not a whole number") from None


def require_flag(setting: str, value: object) -> None:
    """Raise ``ConfigError`` unless ``value`` is True or False."""
    if not isinstance(value, bool):
        raise ConfigError(setting, f"must be True or False, not {value!r}")


def phase_seconds_from(setting: str, text: str) -> dict[str, float]:
    """The seconds of each phase in a text such as ``collect=1800,write=60``. Raises ``ConfigError``."""
    pairs = [part.partition("=") for part in text.split(",") if part.strip()]
    return {phase.strip(): seconds_from(f"{setting}[{phase.strip()!r}]", seconds) for phase, _, seconds in pairs}


def require_phase_seconds(setting: str, by_phase: Mapping[str, float]) -> None:
    """Raise ``ConfigError`` unless ``by_phase`` maps words of ``Phase`` to seconds."""
    for phase, value in by_phase.items():
        if phase not in PHASES:
            raise ConfigError(setting, f"{phase!r} is not a phase; there are {', '.join(PHASES)}")
        require_seconds(f"{setting}[{phase!r}]", value)


class _Kind(NamedTuple):
    """How settings of one type are read from a text, and checked; a field's metadata are arguments of ``require``."""

    read: Callable[[str, str], Any]
    require: Callable[..., None]


_TEXT = _Kind(lambda setting, text: text, lambda setting, value: None)
_KINDS = {
    "float": _Kind(seconds_from, require_seconds),
    "int": _Kind(count_from, require_count),
    "bool": _Kind(flag_from, require_flag),
    "Mapping[str, float]": _Kind(phase_seconds_from, require_phase_seconds),
    "str": _TEXT,
    "str | None": _TEXT,
}
"""Each kind, by the type of a setting as the code here writes it."""


def _kind(setting: dataclasses.Field[Any]) -> _Kind | None:
    return _KINDS.get(str(setting.type))
