"""The names of ``torch.distributed.checkpoint.state_dict_saver``; those that save are ray_dcp's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch.distributed import ProcessGroup
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.checkpoint.storage import StorageWriter
from typing_extensions import deprecated

from ray_dcp.api import AsyncSaveResponse, async_save, reset_first, save


@deprecated(
    "`save_state_dict` is deprecated, as in torch.distributed.checkpoint. Please use `save` instead.",
    category=FutureWarning,
)
def save_state_dict(
    state_dict: Mapping[str, Any],
    storage_writer: StorageWriter,
    process_group: ProcessGroup | None = None,
    coordinator_rank: int = 0,
    no_dist: bool = False,
    planner: SavePlanner | None = None,
) -> Metadata:
    """torch's old name for ``save``.

    ``coordinator_rank`` makes no difference: an actor coordinates. Planners and writers are told that rank 0 does.
    """
    reset_first("save", storage_writer, process_group, no_dist)
    return save(
        state_dict, storage_writer=storage_writer, process_group=process_group, no_dist=no_dist, planner=planner
    )


if not TYPE_CHECKING:  # a module that gives any name hides misspelt ones from type checkers

    def __getattr__(name: str) -> Any:
        return getattr(state_dict_saver, name)


__all__ = ["AsyncCheckpointerType", "AsyncSaveResponse", "async_save", "save", "save_state_dict"]
