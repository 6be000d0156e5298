"""What outlives a coordinator: who its group is and which calls have failed, in Ray's key-value store.

The store lasts as long as the cluster, and is private in Ray. In a Ray without it a coordinator that dies takes its
group along: its ranks get ``CoordinatorLostError`` and join again.
"""

from __future__ import annotations

import logging
import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import cloudpickle

from ray_dcp.cluster.link import NAMESPACE
from ray_dcp.cluster.ray_private import private
from ray_dcp.protocol.coordinator.coordinator import CoordinatorRecord

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GroupRecord:
    """A group as its coordinator knows it."""

    coordinator: CoordinatorRecord = field(default_factory=CoordinatorRecord)
    actors: Mapping[str, Any] = field(default_factory=dict)
    """Handles of the members that are actors."""
    keepers: tuple[Any, ...] = ()
    """Handles of the actors for whose sake the coordinator lives."""


def write_record(group: str, record: GroupRecord) -> None:
    """Keep ``record`` until the group ends."""
    try:
        private("_internal_kv_put")(_key(group), cloudpickle.dumps(record), overwrite=True, namespace=NAMESPACE)
    except Exception as error:
        logger.warning("group %r would not survive its coordinator: %r", group, error, exc_info=True)


def read_record(group: str) -> GroupRecord:
    """The group as an earlier coordinator left it; an empty record where there was none, or where it cannot be read."""
    try:
        content = private("_internal_kv_get")(_key(group), namespace=NAMESPACE)
        record: GroupRecord = pickle.loads(content) if content else GroupRecord()
    except Exception as error:
        logger.warning("what was known of group %r cannot be read: %r", group, error, exc_info=True)
        return GroupRecord()
    return record


def end_record(group: str) -> None:
    """Keep of an ended group only its incarnations and its generation, above which the next of this name begins.

    A rank that stood still all the while and moves again must not pass for one of that next group.
    """
    before = read_record(group).coordinator
    write_record(group, GroupRecord(before.of_ended_group()))


def _key(group: str) -> bytes:
    return f"group/{group}".encode()
