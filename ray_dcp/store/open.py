"""Opens the store that a path or URL names."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from urllib.parse import quote

from ray_dcp.errors import ConfigError, StoreError
from ray_dcp.settings import RetryPolicy
from ray_dcp.store.local import LocalStore
from ray_dcp.store.location.place import absolute
from ray_dcp.store.location.urls import BucketUrl, add_scheme, shown_url, url_scheme
from ray_dcp.store.store import Store
from ray_dcp.store.translate import store_errors

_openers: dict[str, Callable[[str], Store]] = {}


def register_scheme(scheme: str, opener: Callable[[str], Store]) -> None:
    """Have ``open_store`` open URLs of ``scheme`` with ``opener``: a store of your own, or a wrapper around one.

    ``opener`` gets the whole URL; the store it returns says that URL as its ``url``, and keeps the contract of
    ``Store``. It must be registered in every process that opens such URLs: ranks and the group's coordinator, which
    Ray's ``runtime_env={"worker_process_setup_hook": ...}`` reaches. Registering again replaces the opener; a built-in
    scheme is refused with ``ConfigError``.
    """
    add_scheme(scheme)
    _openers[scheme] = opener


def open_store(url: str | os.PathLike[str]) -> Store:
    """Open the folder or bucket prefix at ``url``: a path, ``file://``, ``memory://``, ``s3://``, ``gs://``.

    It need not exist yet. Raises ``UnknownSchemeError`` for any other scheme that is not registered: to take such a
    URL for a path would write to a local folder of that name. What a place may be: see ``absolute``.
    """
    text = absolute(url, setting="url")
    scheme = url_scheme(text)
    if scheme is None:
        return LocalStore(text)
    if scheme == "memory":
        from ray_dcp.store.memory import MemoryStore

        return MemoryStore(text)
    if scheme in _openers:
        return _openers[scheme](text)
    return _open_bucket(text, scheme)


def opened_alike_elsewhere(url: str | os.PathLike[str]) -> bool:
    """Whether any process of this machine that opens ``url`` has the same store.

    Not so where it is memory of this process, or of a scheme for which this process has a store of the user's.
    """
    scheme = url_scheme(absolute(url, setting="url"))
    return scheme != "memory" and scheme not in _openers


def opens(url: str | os.PathLike[str]) -> bool:
    """Whether ``url`` is a place that ``open_store`` takes, for DCP's ``validate_checkpoint_id``."""
    try:
        open_store(url)
    except (ConfigError, StoreError):
        return False
    return True


def _open_bucket(url: str, scheme: str) -> Store:
    # Not on import: the command line lists a local folder without Arrow and tenacity.
    from ray_dcp.store.parallel import ParallelStore
    from ray_dcp.store.retry import RetryStore

    if scheme == "gs":
        policy = RetryPolicy.from_texts({}, os.environ)
        return ParallelStore(RetryStore(_open_google(url, policy), policy))
    from ray_dcp.store.bucket.s3 import S3Store

    store = S3Store(url)
    options = store.options
    return ParallelStore(
        RetryStore(store, options.retry), part_nbytes=options.part_nbytes, max_parallel=options.max_parallel
    )


def _open_google(url: str, policy: RetryPolicy) -> Store:
    from pyarrow import ArrowInvalid
    from pyarrow.fs import FileSystem

    from ray_dcp.store.bucket.arrow import ArrowStore

    parts = BucketUrl.parse(url)
    # Else Google's client tries again by itself, for a quarter of an hour.
    limit = "" if "retry_limit_seconds" in parts.query else f"retry_limit_seconds={policy.max_elapsed_s:g}"
    query = "&".join(filter(None, (parts.query, limit)))
    # Arrow's URLs have escapes in their keys, ours have none.
    for_arrow = dataclasses.replace(parts, prefix=quote(parts.prefix), query=query)
    try:
        with store_errors("open", url=url):
            filesystem, _ = FileSystem.from_uri(str(for_arrow))
    except ArrowInvalid as error:
        raise ConfigError("url", str(error).replace(str(for_arrow), shown_url(url))) from None
    return ArrowStore(filesystem, parts.path, url=url)
