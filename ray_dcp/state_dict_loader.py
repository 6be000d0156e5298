"""The names of ``torch.distributed.checkpoint.state_dict_loader``; those that load are ray_dcp's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.distributed import ProcessGroup
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.planner import LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader
from typing_extensions import deprecated

from ray_dcp.api import load, reset_first


@deprecated(
    "`load_state_dict` is deprecated, as in torch.distributed.checkpoint. Please use `load` instead.",
    category=FutureWarning,
)
def load_state_dict(
    state_dict: dict[str, Any],
    storage_reader: StorageReader,
    process_group: ProcessGroup | None = None,
    coordinator_rank: int = 0,
    no_dist: bool = False,
    planner: LoadPlanner | None = None,
) -> None:
    """torch's old name for ``load``.

    ``coordinator_rank`` makes no difference: an actor coordinates. Planners and readers are told that rank 0 does.
    """
    reset_first("load", storage_reader, process_group, no_dist)
    load(state_dict, storage_reader=storage_reader, process_group=process_group, no_dist=no_dist, planner=planner)


if not TYPE_CHECKING:  # a module that gives any name hides misspelt ones from type checkers

    def __getattr__(name: str) -> Any:
        return getattr(state_dict_loader, name)


__all__ = ["load", "load_state_dict"]
