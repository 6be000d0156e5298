"""Ray Train: report committed checkpoints to a run, and let the run resume within seconds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ray_dcp.train.reporting import checkpoint_id_of, report

if TYPE_CHECKING:
    from ray_dcp.train.callback import CheckpointCallback

__all__ = ["CheckpointCallback", "checkpoint_id_of", "report"]


def __getattr__(name: str) -> Any:
    # The callback stands on parts of Ray Train that are private: `report` must not depend on their being there.
    if name == "CheckpointCallback":
        from ray_dcp.train.callback import CheckpointCallback

        return CheckpointCallback
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
