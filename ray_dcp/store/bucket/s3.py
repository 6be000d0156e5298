"""``S3Store``: a prefix of an S3 bucket, on AWS or whatever else speaks its protocol."""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from typing import Any

import pyarrow
from pyarrow.fs import AwsStandardS3RetryStrategy, S3FileSystem, resolve_s3_region

from ray_dcp.settings import RetryPolicy
from ray_dcp.store.bucket.arrow import ArrowStore
from ray_dcp.store.bucket.s3_options import S3Options
from ray_dcp.store.location.urls import BucketUrl
from ray_dcp.store.retry import try_again
from ray_dcp.store.translate import store_errors

_MAX_CLIENT_WAIT_S = 20


class S3Store(ArrowStore):
    """Objects below an ``s3://`` URL. The URL and environment variables say how to reach them, see ``S3Options``.

    Each operation is tried once, as everywhere: ``RetryStore`` tries again. The exception is a streamed upload, whose
    parts only Arrow can send again: each ``part_attempts`` times at most, as the policy allows.
    An upload that ends in the middle (a killed process) leaves parts in the bucket that no listing shows and that cost:
    have the bucket abort incomplete uploads after some days.
    """

    def __init__(self, url: str) -> None:
        place = BucketUrl.parse(url)
        options = S3Options.from_url(url, os.environ)
        connection = connect(options, place.bucket)
        self.options = options
        self.part_attempts = part_attempts(options.retry)
        super().__init__(
            connection.requests, place.path, url=url, uploads=connection.uploads, max_parallel=options.max_parallel
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return S3Store, (self.url,)  # so that keys in variables stay where they are


@dataclass(frozen=True)
class Connection:
    """Two of Arrow's clients for one place."""

    requests: S3FileSystem
    """Sends each request once. An object below Arrow's part size goes up as one."""
    uploads: S3FileSystem
    """Begins an upload in parts when the stream is opened, and sends each part again as the policy allows."""


@functools.lru_cache(maxsize=32)
def connect(options: S3Options, bucket: str) -> Connection:
    """Clients that reach ``bucket``; the same ones for the same options, since they hold the connections."""
    region = options.region
    if region is None and options.endpoint is None:
        region = try_again(lambda: _find_region(bucket), options.retry, what=f"find the region of {bucket}")
    if pyarrow.io_thread_count() < options.max_parallel:
        pyarrow.set_io_thread_count(options.max_parallel)
    requests = _client(options, region, attempts=1, is_delayed=True)
    return Connection(requests, _client(options, region, attempts=part_attempts(options.retry), is_delayed=False))


def _find_region(bucket: str) -> str:
    with store_errors("find the region of", url=f"s3://{bucket}"):
        region: str = resolve_s3_region(bucket)
    return region


def part_attempts(policy: RetryPolicy) -> int:
    """How often Arrow may send a part so that its waits, which it draws from up to 2, 4, 8 s ..., fit the policy twice.

    Twice, since parts that wait for a thread begin when others have failed, while a service is down.
    """
    attempts, waited_s = 1, 0.0
    while attempts < policy.max_attempts:
        waited_s += min(2.0**attempts, _MAX_CLIENT_WAIT_S)
        if 2 * waited_s > policy.max_elapsed_s:
            break
        attempts += 1
    return attempts


def _client(options: S3Options, region: str | None, *, attempts: int, is_delayed: bool) -> S3FileSystem:
    return S3FileSystem(
        access_key=options.access_key,
        secret_key=options.secret_key,
        session_token=options.session_token,
        anonymous=options.anonymous,
        region=region,
        scheme=options.scheme,
        endpoint_override=options.endpoint,
        force_virtual_addressing=options.force_virtual_addressing,
        tls_ca_file_path=options.tls_ca_file_path,
        connect_timeout=options.connect_timeout_s,
        request_timeout=options.request_timeout_s,
        background_writes=True,
        allow_delayed_open=is_delayed,
        retry_strategy=AwsStandardS3RetryStrategy(max_attempts=attempts),
    )
