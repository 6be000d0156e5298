"""What a spare process does before it becomes a worker: import what training has imported."""

from __future__ import annotations

import gc
import importlib
import json
import logging
import os
import sys
import zlib
from collections.abc import Iterable
from dataclasses import asdict, dataclass

logger = logging.getLogger(__name__)

_SET_BEFORE_IMPORTS = ("OMP_NUM_THREADS",)
"""Ray sets it when a worker gets its first task, by the CPUs it gets; libraries read it when they are imported."""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a worker runs in, as far as a spare process for it must be alike."""

    job_id: str
    runtime_env: str
    """The runtime environment as Ray writes it: the process must have the very same."""
    environment: dict[str, str]
    path: tuple[str, ...]
    """The folders in which modules are looked for: a worker hears of the driver's folders with its first task only."""
    modules: tuple[str, ...]
    """The loaded modules, in the order in which they were loaded."""

    def encoded(self) -> bytes:
        return zlib.compress(json.dumps(asdict(self)).encode())

    @classmethod
    def decoded(cls, encoded: bytes) -> Surroundings:
        facts = json.loads(zlib.decompress(encoded))
        return cls(**{**facts, "path": tuple(facts["path"]), "modules": tuple(facts["modules"])})


def own_surroundings(packages: Iterable[str]) -> Surroundings:
    """Return the surroundings of this worker, with its modules of ``packages`` only."""
    import ray

    context = ray.get_runtime_context()
    wanted = frozenset(packages)
    return Surroundings(
        job_id=context.get_job_id(),
        runtime_env=context.get_runtime_env_string(),
        environment={name: os.environ[name] for name in _SET_BEFORE_IMPORTS if name in os.environ},
        path=tuple(sys.path),
        modules=tuple(name for name in list(sys.modules) if name.partition(".")[0] in wanted),
    )


def import_all(surroundings: Surroundings) -> None:
    """Import the modules, in that order; what can't be imported here is left to the worker that needs it."""
    for name, value in surroundings.environment.items():
        os.environ.setdefault(name, value)
    sys.path[:] = surroundings.path
    for name in surroundings.modules:
        try:
            importlib.import_module(name)
        except Exception as error:  # noqa: BLE001 - a worker that needs it will say so
            logger.debug("a spare process could not import %s: %r", name, error)
    # What is there now stays to the end: looking through it for garbage would take a third of a second each time.
    gc.collect()
    gc.freeze()
