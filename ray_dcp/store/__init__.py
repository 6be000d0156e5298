"""Stores: bytes by key, whatever holds them. Begin with ``store``, the protocol; ``open`` makes one from a path or URL.

``local`` and ``memory`` are here, buckets in ``bucket/``, what a user writes as a place in ``location/``. Retries and
parallel reads are wrappers. Nothing here knows what a checkpoint is.
"""
