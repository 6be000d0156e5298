"""The job is a program with modules beside it, found as they are when it runs: from its own folder."""

from __future__ import annotations

import sys
from pathlib import Path

import ray  # noqa: F401 - brings psutil, which can be imported only after it

JOBS = Path(__file__).parents[2] / "jobs"
sys.path.insert(0, str(JOBS))
