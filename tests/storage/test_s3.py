"""The contract on a real bucket: set RAY_DCP_TEST_S3 to s3://bucket/prefix?endpoint_override=host:port&scheme=http."""

import os
import uuid

import pytest
from pyarrow.fs import FileSystem, FileType

from ray_dcp.storage.open import open_store
from ray_dcp.storage.urls import join_url
from tests.storage.contract import StoreContract

URL = os.environ.get("RAY_DCP_TEST_S3", "")


if not URL:
    pytest.skip("RAY_DCP_TEST_S3 names no bucket", allow_module_level=True)


class TestBucket(StoreContract):
    @pytest.fixture
    def store(self):
        store = open_store(join_url(URL, uuid.uuid4().hex))
        yield store
        for one in store.list():
            store.delete(one.key)

    def put_behind(self, store, key, content):
        files, base = FileSystem.from_uri(store.url)
        with files.open_output_stream(f"{base}/{key}") as stream:
            stream.write(content)

    def get_behind(self, store, key):
        files, base = FileSystem.from_uri(store.url)
        if files.get_file_info(f"{base}/{key}").type != FileType.File:
            return None
        with files.open_input_file(f"{base}/{key}") as opened:
            return opened.read()
