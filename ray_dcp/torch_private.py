"""Every private symbol of torch that ray_dcp uses, and what is lost in a torch that no longer has it.

Nothing else in ``ray_dcp`` may import a private symbol of torch, and each private attribute of torch's objects that
is used anywhere is listed here; tests see to both, and name the symbols that the installed torch lacks. What is in
``ESSENTIAL`` breaks the import of this module, or what its line says; what is in ``OPTIONAL`` may be missing.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch._weights_only_unpickler import _blocklisted_modules as blocklisted_modules
from torch._weights_only_unpickler import _get_allowed_globals as allowed_globals
from torch._weights_only_unpickler import _get_user_allowed_globals as user_allowed_globals
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint._traverse import get_element, set_element
from torch.distributed.checkpoint.filesystem import _StorageInfo as StorageInfo
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING as MEM_FORMAT_ENCODING
from torch.distributed.checkpoint.planner_helpers import _create_chunk_list as create_chunk_list
from torch.distributed.checkpoint.planner_helpers import _create_write_items as create_write_items
from torch.serialization import _load as load_entries
from torch.serialization import _open_zipfile_reader as open_zipfile_reader
from torch.storage import _dtype_to_storage_type_map as dtype_to_storage_type
from torch.storage import _new_dtypes as new_dtypes

ESSENTIAL: Mapping[str, str] = {
    "torch.distributed.checkpoint.filesystem._StorageInfo": "Nothing works: it is the rows of a .metadata.",
    "torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING": "Nothing works: it is in every .metadata.",
    "torch.distributed.checkpoint.planner_helpers._create_write_items": "No save plans what is not a plain tensor.",
    "torch.distributed.checkpoint.planner_helpers._create_chunk_list": "No load plans what is not a plain tensor.",
    "torch.distributed.checkpoint._traverse.set_element": "Loads do not make the containers of a template.",
    "torch.distributed.checkpoint._traverse.get_element": "`ray-dcp convert` does not notice two values of one place.",
    "torch._weights_only_unpickler._get_allowed_globals": "No Python value is read: nothing says what may be.",
    "torch._weights_only_unpickler._get_user_allowed_globals": "Nothing is read that add_safe_globals allowed.",
    "torch._weights_only_unpickler._blocklisted_modules": "add_safe_globals could allow what torch forbids.",
    "torch.serialization._open_zipfile_reader": "No Python value is read.",
    "torch.serialization._load": "No Python value is read.",
    "torch.storage._new_dtypes": "Records are not pickled as torch.save pickles them: nothing is written.",
    "torch.storage._dtype_to_storage_type_map": "As for _new_dtypes.",
    "torch._utils._rebuild_tensor_v2": "As for _new_dtypes; it is named in the file of every tensor.",
    "torch._utils._rebuild_tensor_v3": "Tensors of dtypes that came late, as uint16 and float8, are not written.",
    "torch._neg_view": "Views whose values are negated on reading, as x.conj().imag, are not loaded.",
    "torch.distributed._shard._utils.narrow_tensor_by_index": "No part of a tensor is read.",
    "torch.Tensor._make_wrapper_subclass": "There is no LocalShards: DTensors still load and save.",
    "torch._C._disabled_torch_function_impl": "There is no LocalShards: DTensors still load and save.",
    "torch.ops.aten._to_copy": "LocalShards cannot be moved to another device, or cast.",
    "torch.UntypedStorage._cdata": "Nothing tells whether two tensors share memory: no save, no load.",
    "torch.distributed.tensor.DTensor._local_tensor": "DTensors are planned, and cannot be, by torch alone.",
    "torch.distributed.distributed_c10d._get_default_store": "Ranks under torchrun do not find each other.",
    "torch.Tensor._version": "An overlapped staging does not notice that the state was changed meanwhile.",
    "torch.nn.Module._modules": "Names in optimizer state do not lose what wrappers of modules add to them.",
}
"""Symbols that torch must have: without one, this module is not imported, or what its line says does not work."""

OPTIONAL: Mapping[str, str] = {
    "torch.distributed._functional_collectives.AsyncCollectiveTensor": "The result of a collective under way is "
    "refused: call its wait() before a save.",
    "torch.distributed._shard.sharded_tensor.api.ShardedTensor": "There are no ShardedTensors to save or to fill.",
    "torch.distributed.checkpoint._sharded_tensor_utils._flatten_sharded_tensors": "As for ShardedTensor.",
    "torch.utils._python_dispatch.is_traceable_wrapper_subclass": "A tensor that wraps others is refused later, by "
    "the error of whatever asks for its memory.",
    "torch.distributed.checkpoint._traverse.traverse_state_dict_v_2_3": "Containers without tensors in checkpoints of "
    "torch before 2.4 are not found.",
    "torch.distributed.checkpoint._extension.ExtensionRegistry": "Checkpoints of torch's own writer with stream "
    "transforms are not read.",
    "torch.distributed.checkpoint._extension.StreamTransformExtension": "As for ExtensionRegistry.",
    "torch.distributed.checkpoint.filesystem._FileSystemWriter": "A writer derived from torch's may return fewer "
    "results than items, and nobody notices.",
    "torch.distributed.checkpoint.planner_helpers._create_write_item_for_tensor": "`ray-dcp convert` writes no "
    "checkpoint.",
    "torch.serialization._open_zipfile_writer": "`ray-dcp convert` writes no torch.save file.",
    "torch.storage.TypedStorage._pickle_storage_type": "`ray-dcp convert` writes no Python value that holds a storage.",
    "torch.storage.TypedStorage._size": "As for _pickle_storage_type.",
    "torch.storage.TypedStorage._untyped_storage": "As for _pickle_storage_type.",
    "torch.UntypedStorage._checkpoint_offset": "`ray-dcp convert` reads no torch.save file.",
    "torch.distributed.checkpoint.DefaultSavePlanner._enable_plan_caching": "Nothing: there is no plan cache to turn "
    "off.",
}
"""Symbols that torch may lack; the line of each says what is lost then."""


class _NoneOfThese:
    """Stands for a class that this torch lacks: nothing is an instance of it."""


def _found(dotted: str, otherwise: Any) -> Any:
    """What an optional symbol stands for in this torch; ``otherwise`` where it lacks the symbol."""
    module, _, name = dotted.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name, otherwise)
    except ImportError:
        return otherwise


if TYPE_CHECKING:
    from torch.distributed._functional_collectives import AsyncCollectiveTensor
    from torch.distributed._shard.sharded_tensor.api import ShardedTensor
    from torch.distributed.checkpoint.filesystem import _FileSystemWriter as TorchsFileWriter
else:
    AsyncCollectiveTensor = _found("torch.distributed._functional_collectives.AsyncCollectiveTensor", _NoneOfThese)
    ShardedTensor = _found("torch.distributed._shard.sharded_tensor.api.ShardedTensor", _NoneOfThese)
    TorchsFileWriter = _found("torch.distributed.checkpoint.filesystem._FileSystemWriter", _NoneOfThese)

_CHECKPOINT = "torch.distributed.checkpoint"
flatten_sharded_tensors: Callable[[Any], Any] = _found(
    f"{_CHECKPOINT}._sharded_tensor_utils._flatten_sharded_tensors", lambda state: state
)
wraps_other_tensors: Callable[[object], bool] = _found(
    "torch.utils._python_dispatch.is_traceable_wrapper_subclass", lambda value: False
)
walk_as_before_2_4: Callable[[Any, Callable[[Any, Any], None]], None] = _found(
    f"{_CHECKPOINT}._traverse.traverse_state_dict_v_2_3", lambda state, visit: None
)
create_write_item_for_tensor: Any = _found(f"{_CHECKPOINT}.planner_helpers._create_write_item_for_tensor", None)
open_zipfile_writer: Any = _found("torch.serialization._open_zipfile_writer", None)
ExtensionRegistry: Any = _found(f"{_CHECKPOINT}._extension.ExtensionRegistry", None)
StreamTransformExtension: Any = _found(f"{_CHECKPOINT}._extension.StreamTransformExtension", _NoneOfThese)

rebuild_tensor = torch._utils._rebuild_tensor_v2
rebuild_tensor_of_late_dtype = torch._utils._rebuild_tensor_v3
neg_view: Callable[[torch.Tensor], torch.Tensor] = torch._neg_view
make_wrapper_subclass: Callable[..., Any] = torch.Tensor._make_wrapper_subclass
disabled_torch_function: Any = torch._C._disabled_torch_function_impl
to_copy: Any = torch.ops.aten._to_copy.default


def default_process_group_store() -> Any:
    """Return the key-value store of torch.distributed's default process group, which there must be."""
    return torch.distributed.distributed_c10d._get_default_store()


def version_of(tensor: torch.Tensor) -> int | None:
    """How often the tensor, or a view of its memory, was changed in place; None where that is not counted."""
    return None if tensor.is_inference() else tensor._version


# fmt: off
__all__ = [
    "AsyncCollectiveTensor", "ESSENTIAL", "ExtensionRegistry", "MEM_FORMAT_ENCODING", "OPTIONAL", "ShardedTensor",
    "StorageInfo", "StreamTransformExtension", "TorchsFileWriter", "allowed_globals", "blocklisted_modules",
    "create_chunk_list", "create_write_item_for_tensor", "create_write_items", "default_process_group_store",
    "disabled_torch_function", "dtype_to_storage_type", "flatten_sharded_tensors", "get_element", "load_entries",
    "make_wrapper_subclass",
    "narrow_tensor_by_index", "neg_view", "new_dtypes", "open_zipfile_reader", "open_zipfile_writer",
    "rebuild_tensor", "rebuild_tensor_of_late_dtype", "set_element", "to_copy", "user_allowed_globals", "version_of",
    "walk_as_before_2_4", "wraps_other_tensors",
]
