"""Warns the user at save of classes that a load will refuse: when the load refuses them, it is too late."""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from collections.abc import Mapping, Set

from ray_dcp.wording import joined

logger = logging.getLogger("ray_dcp")

_lock = threading.Lock()
_told: set[tuple[str, str]] = set()
"""Pairs (class, value's name) that were told in this process: a run saves the same state many times."""


def warn_of_foreign(classes: Mapping[str, Set[str]]) -> None:
    """Warn once of each class and value; ``classes`` has the classes of each value by the value's name."""
    new: dict[str, list[str]] = defaultdict(list)
    with _lock:
        for fqn, names in classes.items():
            for name in sorted(names):
                if (name, fqn) not in _told:
                    _told.add((name, fqn))
                    new[name].append(fqn)
    for name, fqns in new.items():
        logger.warning(
            "%s: saved as a Python object of %s, which is not a plain value: a load refuses it, since making one may "
            "run code, unless the program that loads allows it by torch.serialization.add_safe_globals([%s]) or passes "
            "trusted=True. Save plain values of it instead, or do one of the two there",
            joined(fqns),
            name,
            name.rpartition(".")[2],
        )
