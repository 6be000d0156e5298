"""Carrying out a conversion that has been planned: one tensor at a time, and all or nothing."""

from __future__ import annotations

import io
import json
import logging
import pickle
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, cast

import torch

from ray_dcp.convert.checkpoint_target import LazyItem, write_checkpoint
from ray_dcp.convert.conversion_plan import HEADER_TEXTS, ConvertPlan, PlannedValue, described
from ray_dcp.convert.new_files import new_files
from ray_dcp.convert.torch_save_writer import LazyTensor, write_torch_file
from ray_dcp.errors import StateDictError
from ray_dcp.format.safetensors_header import encode_header
from ray_dcp.planning.values.containers import with_containers
from ray_dcp.planning.values.flat import LEAVES
from ray_dcp.staging.host_pieces import small_content
from ray_dcp.store.open import open_store
from ray_dcp.torch_private import get_element, set_element
from ray_dcp.wording import joined

logger = logging.getLogger(__name__)

OnProgress = Callable[[int], None]
"""Called with the number of bytes of each tensor when it has been read and is about to be written."""


@dataclass(frozen=True, slots=True)
class ConvertReport:
    """What has been written."""

    num_tensors: int
    num_objects: int
    nbytes: int
    """Bytes of the tensors."""
    seconds: float


def convert(plan: ConvertPlan, on_progress: OnProgress = lambda nbytes: None) -> ConvertReport:
    """Write what ``plan`` says. A failure leaves nothing under the destination's names.

    Raises ``CorruptCheckpointError``, ``UnsafeDataError`` and ``StateDictError`` for what the source holds, and
    ``StoreError`` where a store fails.
    """
    started = time.monotonic()
    write = {"dcp": _to_checkpoint, "safetensors": _to_safetensors, "torch": _to_torch}[plan.dest_kind]
    write(plan, on_progress)
    num_tensors = sum(planned.value.dtype is not None for planned in plan.values)
    return ConvertReport(num_tensors, len(plan.values) - num_tensors, plan.nbytes, time.monotonic() - started)


def _to_checkpoint(plan: ConvertPlan, on_progress: OnProgress) -> None:
    def lazy(planned: PlannedValue) -> LazyItem:
        value = planned.value
        if value.dtype is None:
            return LazyItem(planned.name, _path(planned), None, (), lambda: plan.source.read_pickled(value))
        return LazyItem(planned.name, _path(planned), value.dtype, value.shape, _reader(plan, planned, on_progress))

    write_checkpoint(plan.folder, [lazy(planned) for planned in plan.values], plan.containers)


def _to_safetensors(plan: ConvertPlan, on_progress: OnProgress) -> None:
    index = (plan.index, _index_of(plan)) if plan.index else None
    with new_files(open_store(plan.folder), replaced=plan.replaced, index=index) as create:
        for file in plan.files:
            with create(file.key) as sink:
                front, _ = encode_header(described(file.values), HEADER_TEXTS)
                sink.write(front)
                for planned in file.values:
                    tensor = _reader(plan, planned, on_progress)()
                    if tensor.numel():
                        sink.write(small_content(tensor))


def _to_torch(plan: ConvertPlan, on_progress: OnProgress) -> None:
    (file,) = plan.files
    state = _nested(plan, on_progress)
    with new_files(open_store(plan.folder), replaced=plan.replaced) as create, create(file.key) as sink:
        write_torch_file(sink, state)


def _reader(plan: ConvertPlan, planned: PlannedValue, on_progress: OnProgress) -> Callable[[], torch.Tensor]:
    def read() -> torch.Tensor:
        tensor = plan.source.read_tensor(planned.value)
        on_progress(tensor.nbytes)
        return tensor

    return read


def _index_of(plan: ConvertPlan) -> bytes:
    weight_map = {planned.name: file.key for file in plan.files for planned in file.values}
    index = {"metadata": {"total_size": plan.nbytes}, "weight_map": dict(sorted(weight_map.items()))}
    return (json.dumps(index, indent=2) + "\n").encode()


def _nested(plan: ConvertPlan, on_progress: OnProgress) -> dict[str, Any]:
    """The state dict as it was saved, with tensors that are read when their bytes are due."""
    state: dict[str, Any] = {}
    placed: list[tuple[PlannedValue, Any]] = []
    tied: dict[Hashable, LazyTensor] = {}
    unknown: list[str] = []
    for planned in plan.values:
        value = planned.value
        if value.dtype is None:
            content = plan.source.read_python(value)
            placed.append((planned, content))
            if not _is_known_to_torch(content):
                unknown.append(planned.name)
            continue
        lazy = LazyTensor(getattr(torch, value.dtype), value.shape, _reader(plan, planned, on_progress))
        placed.append((planned, lazy if value.memory is None else tied.setdefault(value.memory, lazy)))
    try:
        for planned, content in placed:
            set_element(state, _path(planned), content)
        hidden = [one.value.name for one, content in placed if get_element(state, _path(one)) is not content]
    except (TypeError, KeyError, IndexError, AttributeError) as error:
        raise StateDictError("the names do not fit into one nested state dict") from error
    if hidden:
        raise StateDictError("two values would have one place in the state dict", hidden)
    if unknown:
        logger.warning(
            "torch.load(weights_only=True) refuses this file for values that ray_dcp takes for plain, and torch does "
            "not: %s. Leave them out (--exclude, --skip-python), or read it by torch.load(weights_only=False)",
            joined(unknown),
        )
    return cast(dict[str, Any], with_containers(state, plan.containers))


def _is_known_to_torch(value: Any) -> bool:
    """Whether ``torch.load(weights_only=True)`` reads a Python value, as it is set up here."""
    if type(value) in LEAVES:
        return True
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        buffer.seek(0)
        torch.load(buffer, weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, TypeError, ValueError, AttributeError):
        return False
    return True


def _path(planned: PlannedValue) -> tuple[str | int, ...]:
    """The keys that led to the value; its name alone, at the top, where it has another name now."""
    return planned.value.path if planned.name == planned.value.name else (planned.name,)
