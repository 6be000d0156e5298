"""``memory://`` keeps the contract, and holds the same objects as torch's fsspec writer."""

import uuid

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from ray_dcp.store.memory import MemoryStore
from ray_dcp.store.open import open_store
from ray_dcp.testing.store_contract import StoreContract


class TestMemoryStore(StoreContract):
    @pytest.fixture
    def store(self):
        root = f"/{uuid.uuid4().hex}/root"
        yield MemoryStore(f"memory://{root}")
        if MemoryFileSystem().exists(root):
            MemoryFileSystem().rm(root, recursive=True)

    def put_behind(self, store, key, content):
        MemoryFileSystem().pipe_file(f"{store.url.removeprefix('memory://')}/{key}", content)

    def get_behind(self, store, key):
        path = f"{store.url.removeprefix('memory://')}/{key}"
        return MemoryFileSystem().cat_file(path) if MemoryFileSystem().isfile(path) else None


def test_torch_and_the_store_see_the_same_objects():
    torch = pytest.importorskip("torch")
    import torch.distributed.checkpoint as torch_dcp
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter

    url = f"memory://{uuid.uuid4().hex}"
    torch_dcp.save({"w": torch.arange(4)}, storage_writer=FsspecWriter(url), no_dist=True)
    store = open_store(url)
    assert [one.key for one in store.list()] == [".metadata", "__0_0.distcp"]
    assert all(one.modified > 1.6e9 for one in store.list())

    copy = open_store(url + "-copy")
    for one in store.list():
        copy.put(one.key, store.get(one.key))
    loaded = {"w": torch.zeros(4, dtype=torch.int64)}
    torch_dcp.load(loaded, storage_reader=FsspecReader(copy.url), no_dist=True)
    assert loaded["w"].tolist() == [0, 1, 2, 3]
