"""``ArrowStore`` keeps the contract, here over Arrow's local filesystem; test_s3.py has a real bucket."""

import pytest
from pyarrow.fs import LocalFileSystem

from ray_dcp.errors import StorePermissionError
from ray_dcp.store.bucket.arrow import ArrowStore
from ray_dcp.testing.store_contract import FolderStoreContract


class TestArrowStore(FolderStoreContract):
    put_is_atomic = False  # files, unlike objects, are seen while they are written

    @pytest.fixture
    def store(self, tmp_path):
        return ArrowStore(LocalFileSystem(), str(tmp_path / "root"), url=str(tmp_path / "root"))


def test_a_denied_request_is_a_permission_error(monkeypatch, tmp_path):
    class Denying(LocalFileSystem):
        def open_input_file(self, path):
            # What Arrow's S3 filesystem raises for a key that this user may not read.
            raise OSError(
                "When reading information for key 'x' in bucket 'b': AWS Error ACCESS_DENIED during HeadObject"
            )

    with pytest.raises(StorePermissionError, match="ACCESS_DENIED"):
        ArrowStore(Denying(), str(tmp_path), url="s3://b/p").get("x")
