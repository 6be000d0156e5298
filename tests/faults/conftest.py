"""Rank actors that the modules here pass on: each is a process that imports torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(scope="session")
def troupe(ray_session: None) -> Iterator[list[Any]]:
    """Those that play in no ``Cast`` at the moment."""
    import ray

    actors: list[Any] = []
    yield actors
    for actor in actors:
        ray.kill(actor)
