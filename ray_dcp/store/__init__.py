"""Stores: bytes by key, whatever holds them. Begin with ``store``, the protocol; ``open`` makes one from a path or URL.

``local`` and ``memory`` are here, buckets in ``bucket/``, what a user writes as a place in ``location/``. Retries and
parallel reads are wrappers. Nothing here knows what a checkpoint is. For a store of your own: ``docs/stores.md``.
"""

from ray_dcp.store.location.urls import require_key, require_prefix
from ray_dcp.store.open import open_store, register_scheme
from ray_dcp.store.store import ObjectWriter, Store, StoredObject, StoreTraits
from ray_dcp.store.translate import require_range

__all__ = [
    "ObjectWriter",
    "Store",
    "StoreTraits",
    "StoredObject",
    "open_store",
    "register_scheme",
    "require_key",
    "require_prefix",
    "require_range",
]
