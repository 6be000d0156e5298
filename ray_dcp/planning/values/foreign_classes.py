"""What a user is told at save of classes that a load will refuse: when it is refused, it is too late."""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from collections.abc import Mapping, Set

from ray_dcp.wording import joined

logger = logging.getLogger("ray_dcp")

_lock = threading.Lock()
_told: set[tuple[str, str]] = set()
"""Class and name, in this process: a run saves the same state many times."""


def warn_of_foreign(classes: Mapping[str, Set[str]]) -> None:
    """Warn once of each class in the values of ``classes``, which has the classes of each value by its name."""
    new: dict[str, list[str]] = defaultdict(list)
    with _lock:
        for fqn, names in classes.items():
            for name in sorted(names):
                if (name, fqn) not in _told:
                    _told.add((name, fqn))
                    new[name].append(fqn)
    for name, fqns in new.items():
        logger.warning(
            "%s: saved as a Python object of %s, which is no plain value: a load refuses it, since making one may run "
            "code, unless the program that loads allows it by torch.serialization.add_safe_globals([%s]) or passes "
            "trusted=True. Save plain values of it instead, or do one of the two there",
            joined(fqns),
            name,
            name.rpartition(".")[2],
        )
