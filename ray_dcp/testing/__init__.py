"""Tests for what others write: ``StoreContract`` is what every store must do (``docs/stores.md``). Needs pytest."""

from ray_dcp.testing.store_contract import FolderStoreContract, StoreContract

__all__ = ["FolderStoreContract", "StoreContract"]
