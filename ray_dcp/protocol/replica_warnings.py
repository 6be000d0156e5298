"""What a user is told of values that differed between ranks when they were saved."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Sequence

from ray_dcp.errors import without_keys
from ray_dcp.format.manifest import DifferingReplicas
from ray_dcp.wording import MAX_LISTED, first_lines

logger = logging.getLogger("ray_dcp")

_lock = threading.Lock()
_times_told: Counter[str] = Counter()
"""How often the values of each name have differed in this process: those that differ by design, as running statistics
do, differ at every save."""


def warn_of_differing(differing: Sequence[DifferingReplicas], checkpoint_id: str) -> None:
    """Warn of each name once in this process; of names told before only say how often they have differed."""
    with _lock:
        _times_told.update(one.fqn for one in differing)
        new = [one for one in differing if _times_told[one.fqn] == 1]
        again = [one for one in differing if _times_told[one.fqn] > 1]
        most = max((_times_told[one.fqn] for one in again), default=0)
    place = without_keys(checkpoint_id)
    for one in new[:MAX_LISTED]:
        logger.warning(
            "%s: ranks hold different values under this name, and rank %d's was saved in %s. Give values that belong "
            'to one rank as PerRank; replica_check="error" refuses such a save, "off" does not look',
            one,
            one.ranks[0][0],
            place,
        )
    if len(new) > MAX_LISTED:
        logger.warning(
            "and %d more names under which ranks hold different values: `ray-dcp show %s` lists them",
            len(new) - MAX_LISTED,
            place,
        )
    if again:
        logger.info("%d values differ between ranks again, now in %d saves, in %s", len(again), most, place)


def warn_of_loading_differing(differing: Sequence[DifferingReplicas], checkpoint_id: str) -> None:
    """Warn of what is being loaded as one value on all ranks and was several when it was saved."""
    if differing:
        logger.warning(
            "%d values in %s differed between ranks when they were saved; all ranks now get what the first rank named "
            "had: %s",
            len(differing),
            without_keys(checkpoint_id),
            "; ".join(first_lines([str(one) for one in differing])),
        )
