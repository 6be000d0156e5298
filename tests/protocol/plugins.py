"""Plug-ins as users write them for ``torch.distributed.checkpoint``, from its documentation or in its style."""

from __future__ import annotations

import dataclasses
import io
import os
import pickle
import threading
from concurrent.futures import Future as PythonFuture
from pathlib import Path

import torch
from torch.distributed.checkpoint import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    FileSystemReader,
    FileSystemWriter,
    LoadPlan,
    SavePlan,
    StorageReader,
    StorageWriter,
)
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, WriteItemType
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

import ray_dcp as dcp
from tests.slack import within


def done(value):
    future: Future = Future()
    future.set_result(value)
    return future


# Planners.


class RenamingSavePlanner(DefaultSavePlanner):
    """All names are saved with a prefix."""

    def set_up_planner(self, state_dict, storage_meta=None, is_coordinator=False):
        super().set_up_planner({f"foo_{k}": v for k, v in state_dict.items()}, storage_meta, is_coordinator)


class RenamingLoadPlanner(DefaultLoadPlanner):
    """Loads what ``RenamingSavePlanner`` saved."""

    def set_up_planner(self, state_dict, metadata=None, is_coordinator=False):
        self.original_state_dict = state_dict
        renamed = {f"foo_{k}": v for k, v in state_dict.items()}
        self.state_dict, self.mappings = flatten_state_dict(renamed)
        self.metadata = metadata
        self.is_coordinator = is_coordinator

    def load_bytes(self, read_item, value):
        self.original_state_dict[read_item.dest_index.fqn[4:]] = torch.load(value, weights_only=False)


class HalfPlanner(DefaultSavePlanner):
    """Tensors are saved as fp16: the plan says so, and the data is."""

    def create_local_plan(self):
        plan = super().create_local_plan()
        for item in plan.items:
            if item.tensor_data is not None:
                item.tensor_data.properties.dtype = torch.float16
        return plan

    def resolve_data(self, write_item):
        value = super().resolve_data(write_item)
        return value if write_item.type == WriteItemType.BYTE_IO else value.to(torch.float16)


class SecretlyHalfPlanner(DefaultSavePlanner):
    """Tensors are saved as fp16, but the plan does not say so."""

    def resolve_data(self, write_item):
        value = super().resolve_data(write_item)
        return value if write_item.type == WriteItemType.BYTE_IO else value.to(torch.float16)


class ExtraDataPlanner(DefaultSavePlanner):
    """Every rank adds something of its own to the metadata. For ``flatten_state_dict=False``."""

    def __init__(self, extra):
        super().__init__(flatten_state_dict=False)
        self.extra = extra

    def create_local_plan(self) -> SavePlan:
        return dataclasses.replace(super().create_local_plan(), planner_data=self.extra)

    def create_global_plan(self, all_plans):
        global_plan, metadata = super().create_global_plan(all_plans)
        merged = [plan.planner_data for plan in global_plan]
        return global_plan, dataclasses.replace(metadata, planner_data=merged)


class OldPlanner(DefaultSavePlanner):
    """From before ``storage_meta``."""

    def set_up_planner(self, state_dict, is_coordinator):
        super().set_up_planner(state_dict, None, is_coordinator)


class RememberingPlanner(DefaultSavePlanner):
    """The global step uses what the local step left on this object, as on torch's coordinator rank."""

    def create_local_plan(self):
        plan = super().create_local_plan()
        self.num_local_items = len(plan.items)
        return plan

    def create_global_plan(self, all_plans):
        plans, metadata = super().create_global_plan(all_plans)
        remembered = {"local items": self.num_local_items, "coordinator": self.is_coordinator}
        return plans, dataclasses.replace(metadata, planner_data=metadata.planner_data | remembered)


class RememberingLoadPlanner(DefaultLoadPlanner):
    """The global step uses what ``set_up_planner`` was given."""

    def create_global_plan(self, global_plan):
        assert self.is_coordinator
        assert self.metadata is not None
        wanted = {item.storage_index.fqn for plan in global_plan for item in plan.items}
        assert wanted <= self.metadata.state_dict_metadata.keys()
        return super().create_global_plan(global_plan)


class MaterializingLoadPlanner(DefaultLoadPlanner):
    """Tensors are read into fresh memory and put in place when complete."""

    def resolve_tensor(self, read_item):
        return torch.empty_like(super().resolve_tensor(read_item), device="cpu")

    def commit_tensor(self, read_item, tensor):
        self.original_state_dict[read_item.dest_index.fqn] = tensor


# Writers and readers.


class InFolder:
    """What a writer and a reader of a folder have in common."""

    def __init__(self, path):
        super().__init__()
        self.path = Path(path)

    def reset(self, checkpoint_id=None):
        if checkpoint_id is not None:
            self.path = Path(checkpoint_id)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id):
        return True


class PtFolderWriter(InFolder, StorageWriter):
    """A ``.pt`` file an item. Its methods take no keyword arguments that torch added later."""

    def set_up_storage_writer(self, is_coordinator):
        self.is_coordinator = is_coordinator

    def prepare_local_plan(self, plan):
        self.path.mkdir(parents=True, exist_ok=True)
        return plan

    def prepare_global_plan(self, plans):
        assert self.is_coordinator
        return [dataclasses.replace(plan, storage_data=f"of-{n}") for n, plan in enumerate(plans)]

    def write_data(self, plan, planner):
        results = []
        for number, item in enumerate(plan.items):
            name = f"{plan.storage_data}-{number}.pt"
            value = planner.resolve_data(item)
            if isinstance(value, io.BytesIO):
                (self.path / name).write_bytes(value.getvalue())
            else:
                torch.save(value.detach().cpu().clone(), self.path / name)
            results.append(WriteResult(item.index, (self.path / name).stat().st_size, name))
        return done(results)

    def finish(self, metadata, results):
        metadata.storage_data = {result.index: result.storage_data for of_rank in results for result in of_rank}
        (self.path / "metadata.pkl").write_bytes(pickle.dumps(metadata))


class PtFolderReader(InFolder, StorageReader):
    def read_metadata(self):
        return pickle.loads((self.path / "metadata.pkl").read_bytes())

    def set_up_storage_reader(self, metadata, is_coordinator):
        self.storage_data = metadata.storage_data

    def prepare_local_plan(self, plan):
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]):
        return plans

    def read_data(self, plan, planner):
        for item in plan.items:
            path = self.path / self.storage_data[item.storage_index]
            if item.type == LoadItemType.BYTE_IO:
                planner.load_bytes(item, io.BytesIO(path.read_bytes()))
            else:
                stored = torch.load(path)
                for dim, (offset, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                    stored = stored.narrow(dim, offset, length)
                target = planner.resolve_tensor(item).detach()
                target.copy_(stored)
                planner.commit_tensor(item, target)
        return done(None)


class OneFileWriter(PtFolderWriter):
    """Everything in one pickle that the coordinator writes: the results carry the values."""

    def prepare_local_plan(self, plan):
        return plan

    def write_data(self, plan, planner):
        results = []
        for item in plan.items:
            value = planner.resolve_data(item)
            if not isinstance(value, io.BytesIO):
                content = io.BytesIO()
                torch.save(value.detach().clone(), content)
                value = content
            results.append(WriteResult(item.index, len(value.getvalue()), value.getvalue()))
        return done(results)

    def finish(self, metadata, results):
        metadata.storage_data = {result.index: result.storage_data for of_rank in results for result in of_rank}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_bytes(pickle.dumps(metadata))


class OneFileReader(PtFolderReader):
    def read_metadata(self):
        return pickle.loads(self.path.read_bytes())

    def read_data(self, plan, planner):
        for item in plan.items:
            content = io.BytesIO(self.storage_data[item.storage_index])
            if item.type == LoadItemType.BYTE_IO:
                planner.load_bytes(item, content)
            else:
                stored = torch.load(content)
                for dim, (offset, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                    stored = stored.narrow(dim, offset, length)
                planner.resolve_tensor(item).detach().copy_(stored)
        return done(None)


class SigningWriter(FileSystemWriter):
    """torch's writer, with a file of its own beside the checkpoint's."""

    def finish(self, metadata, results):
        super().finish(metadata, results)
        (Path(self.path) / "SIGNED").write_text(str(sum(len(of_rank) for of_rank in results)))


class SignedReader(FileSystemReader):
    """torch's reader, which wants to see that file."""

    def read_metadata(self, *args, **kwargs):
        metadata = super().read_metadata(*args, **kwargs)
        assert int((Path(self.path) / "SIGNED").read_text()) == len(metadata.storage_data)
        return metadata


class LockingWriter(PtFolderWriter):
    """Cannot be pickled."""

    def __init__(self, path):
        super().__init__(path)
        self.lock = threading.Lock()


class LockingStoreWriter(dcp.StoreWriter):
    """Cannot be pickled."""

    def __init__(self, path):
        super().__init__(path)
        self.lock = threading.Lock()


class CountingWriter(PtFolderWriter):
    """Commits with what ``write_data`` left on this object, as torch's coordinator rank can."""

    def write_data(self, plan, planner):
        self.num_written = len(plan.items)
        return super().write_data(plan, planner)

    def finish(self, metadata, results):
        assert self.num_written == len(results[0])
        super().finish(metadata, results)


class LoggingWriter(CountingWriter):
    """Holds a file that it opens when set up."""

    def set_up_storage_writer(self, is_coordinator, *args, **kwargs):
        super().set_up_storage_writer(is_coordinator)
        self.path.mkdir(parents=True, exist_ok=True)
        self.log = (self.path / f"log-{kwargs['rank']}").open("a")
        self.log.write("set up\n")

    def finish(self, metadata, results):
        super().finish(metadata, results)
        self.log.write("finished\n")
        self.log.flush()


class FailingInFinish(PtFolderWriter):
    def finish(self, metadata, results):
        raise ConnectionError("the database is gone")


class LockingReader(PtFolderReader):
    """Cannot be pickled, and has a global step."""

    def __init__(self, path):
        super().__init__(path)
        self.lock = threading.Lock()

    def prepare_global_plan(self, plans):
        assert self.storage_data
        return super().prepare_global_plan(plans)


class LockingPlanner(DefaultSavePlanner):
    """Cannot be pickled."""

    def __init__(self):
        super().__init__()
        self.lock = threading.Lock()


class HalfSilentWriter(FileSystemWriter):
    """``thread_count=2``, and the helper thread cannot write: torch 2.13 loses the error and reports half."""

    def __init__(self, path):
        super().__init__(path, thread_count=2)

    def _write_data(self, planner, file_queue):
        create_stream = self.fs.create_stream

        def failing_in_helpers(path, mode):
            if threading.current_thread() is not caller:
                raise OSError("disk full")
            barrier.wait(within(5))  # until the helper has taken its file, which it then loses
            return create_stream(path, mode)

        caller, barrier = threading.current_thread(), threading.Event()
        write = self.fs.create_stream

        def in_order(path, mode):
            if threading.current_thread() is not caller:
                barrier.set()
            return failing_in_helpers(path, mode)

        self.fs.create_stream = in_order
        try:
            return super()._write_data(planner, file_queue)
        finally:
            self.fs.create_stream = write


class StorageMetaWriter(PtFolderWriter):
    """Tells planners where it writes."""

    def storage_meta(self):
        return StorageMeta(checkpoint_id=os.fspath(self.path), save_id="mine")


# Stagers.


class CloningStager(AsyncStager):
    """Stages at once."""

    def __init__(self):
        self.num_synchronized = 0

    def stage(self, state_dict):
        return {
            k: v.clone() if isinstance(v, torch.Tensor) else pickle.loads(pickle.dumps(v))
            for k, v in state_dict.items()
        }

    def synchronize_staging(self):
        self.num_synchronized += 1


class LaterStager(CloningStager):
    """Stages when asked to synchronize."""

    def stage(self, state_dict):
        self.state_dict = state_dict
        self.staged = {}
        return self.staged

    def synchronize_staging(self):
        super().synchronize_staging()
        self.staged.update(CloningStager.stage(self, self.state_dict))


class FutureStager(CloningStager):
    """Stages in a thread of its own, and gives a future."""

    def stage(self, state_dict):
        future: PythonFuture = PythonFuture()
        threading.Thread(target=lambda: future.set_result(CloningStager.stage(self, state_dict))).start()
        return future
