"""``S3Options``: how to reach a bucket, in a URL or in environment variables."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import parse_qsl, quote, unquote, urlencode

from ray_dcp.errors import ConfigError
from ray_dcp.settings import RETRY_PREFIX, RetryPolicy, read_settings, require_valid, variable_of
from ray_dcp.store.location.urls import BucketUrl, shown_url

_VARIABLES = "S3_"
_OTHER_NAMES = {"endpoint_override": "endpoint"}
_IGNORED = (
    "allow_bucket_creation",
    "allow_bucket_deletion",
    "allow_delayed_open",
    "background_writes",
    "check_directory_existence_before_creation",
)
"""Parameters of Arrow's URLs that ray_dcp sets itself or that make no difference to it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class S3Options:
    """How to reach an S3 bucket, wherever it is served.

    A checkpoint's place stays one string: ``S3Options(endpoint="http://host:9000").url("s3://bucket/run")`` is a URL
    that says all of it, and every rank and the coordinator get that URL. Whatever a URL does not say comes from the
    environment variables ``RAY_DCP_S3_ENDPOINT`` and so on, one for each field, of the process that opens it; then from
    what AWS's own tools use (``AWS_ACCESS_KEY_ID``, ``AWS_PROFILE``, an instance's role, ...).

    A URL with keys in it is kept wherever the checkpoint's place is. Messages leave them out; variables are better.
    """

    endpoint: str | None = None
    """``host:port``, or ``http://host:port``, of a server that is not AWS. None: AWS."""
    region: str | None = None
    """The bucket's region. None looks it up on AWS, and names no region to another server."""
    scheme: str = "https"
    """``http`` or ``https``. An endpoint that begins with one of them sets it."""
    access_key: str | None = field(default=None, repr=False)
    """The access key. None: the keys that AWS's own tools would use."""
    secret_key: str | None = field(default=None, repr=False)
    """The secret key that goes with ``access_key``."""
    session_token: str | None = field(default=None, repr=False)
    """The token that goes with temporary keys."""
    anonymous: bool = False
    """Use no keys at all, as for public buckets."""
    force_virtual_addressing: bool = False
    """Ask ``bucket.host`` instead of ``host/bucket`` of an endpoint; AWS is always asked so."""
    tls_ca_file_path: str | None = None
    """A file with the certificates of authorities to trust, for servers with one of their own."""
    connect_timeout_s: float = 5.0
    """A connection that does not come about within this is given up, and tried again as ``retry`` says."""
    request_timeout_s: float = field(default=30.0, metadata={"least": 1})
    """A request in which nothing at all moves for this long is given up and tried again, too: whole seconds, at least
    1. Behind an upload the client takes some six seconds more to notice."""
    part_nbytes: int = field(default=8 << 20, metadata={"least": 1 << 16})
    """Reads of more are split into ranges of this many bytes. Uploads go in parts of 10 MiB, which Arrow fixes."""
    max_parallel: int = 8
    """Requests in flight at once for one read, and parts for one upload; in a process at most Arrow's
    ``pyarrow.io_thread_count()`` parts, which is raised to this."""
    retry: RetryPolicy = field(default_factory=RetryPolicy)
    """How often and how long failing requests are tried again."""

    def __post_init__(self) -> None:
        if self.endpoint is not None and "://" in self.endpoint:
            scheme, _, endpoint = self.endpoint.partition("://")
            object.__setattr__(self, "scheme", scheme)
            object.__setattr__(self, "endpoint", endpoint.rstrip("/"))
        if self.scheme not in ("http", "https"):
            raise ConfigError("scheme", f"is http or https, not {self.scheme!r}")
        if self.endpoint is not None and (not self.endpoint or set("/?#@ ") & set(self.endpoint)):
            raise ConfigError("endpoint", f"is host:port or http://host:port, not {shown_url(self.endpoint)!r}")
        if (self.access_key is None) != (self.secret_key is None):
            raise ConfigError("secret_key", "access_key and secret_key go together; one of them is missing")
        if self.session_token is not None and self.access_key is None:
            raise ConfigError("session_token", "goes with an access_key and a secret_key")
        if self.anonymous and self.access_key is not None:
            raise ConfigError("anonymous", "needs no keys; leave access_key and secret_key out")
        require_valid(self)

    def url(self, place: str) -> str:
        """``place``, an ``s3://`` URL, with all of these options in it.

        Raises ``ConfigError`` where ``place`` has parameters or keys already.
        """
        if not place.startswith("s3://"):
            raise ConfigError("place", f"begins with s3://bucket, this does not: {shown_url(place)}")
        parts = BucketUrl.parse(place)
        if parts.query or parts.keys:
            raise ConfigError("place", f"says how to reach it already: {shown_url(place)}")
        keys = f"{quote(self.access_key, '')}:{quote(self.secret_key or '', '')}" if self.access_key is not None else ""
        return str(dataclasses.replace(parts, keys=keys, query=urlencode(self._texts())))

    def _texts(self) -> dict[str, str]:
        """What differs from the defaults, by the name of the URL's parameter, keys left out."""
        texts: dict[str, str] = {}
        for setting in dataclasses.fields(self):
            value = getattr(self, setting.name)
            if setting.name in ("access_key", "secret_key", "retry") or value == setting.default:
                continue
            name = "endpoint_override" if setting.name == "endpoint" else setting.name
            texts[name] = str(value).lower() if isinstance(value, bool) else str(value)
        for setting in dataclasses.fields(RetryPolicy):
            value = getattr(self.retry, setting.name)
            if value != setting.default:
                texts[RETRY_PREFIX + setting.name] = str(value)
        return texts

    @classmethod
    def from_url(cls, url: str, variables: Mapping[str, str] | None = None) -> S3Options:
        """The options that ``url`` says, and ``variables`` (a process's environment) where it says nothing.

        Raises ``ConfigError`` naming the parameter that is unknown or makes no sense.
        """
        variables = variables or {}
        texts = cls._texts_of(url)
        keys = ("access_key", "secret_key", "session_token", "anonymous")
        if {"access_key", "anonymous"} & set(texts):  # which keys is said already
            own = {variable_of(name, _VARIABLES) for name in keys}
            variables = {name: text for name, text in variables.items() if name not in own}
        given = read_settings(cls, texts, variables, variable_prefix=_VARIABLES)
        _require_both_keys(given)
        return cls(**given, retry=RetryPolicy.from_texts(texts, variables))

    @classmethod
    def _texts_of(cls, url: str) -> dict[str, str]:
        parts = BucketUrl.parse(url)
        texts: dict[str, str] = {}
        known = {s.name for s in dataclasses.fields(cls)} - {"access_key", "secret_key", "retry"}
        known |= {RETRY_PREFIX + setting.name for setting in dataclasses.fields(RetryPolicy)}
        for given, text in parse_qsl(parts.query, keep_blank_values=True):
            name = _OTHER_NAMES.get(given, given)
            if name not in known and name not in _IGNORED:
                raise ConfigError(
                    "url",
                    f"unknown parameter {given!r}; known are {', '.join(sorted(known))}. "
                    "Parameters follow a question mark, so there can be none in a name",
                )
            texts[name] = text
        for name in _IGNORED:
            texts.pop(name, None)
        if parts.keys:
            access_key, _, secret_key = parts.keys.partition(":")
            texts["access_key"] = unquote(access_key)
            texts["secret_key"] = unquote(secret_key)
        return texts


def _require_both_keys(texts: Mapping[str, str]) -> None:
    """Raise ``ConfigError`` naming the variables where there is one key only; AWS's own may have the other."""
    given, lacking = (name for name in sorted(("access_key", "secret_key"), key=lambda name: name not in texts))
    if given in texts and lacking not in texts:
        lacks = variable_of(lacking, _VARIABLES)
        raise ConfigError(
            lacking,
            f"there is {given}, and no {lacking}: set {variable_of(given, _VARIABLES)} and {lacks} (or both in "
            "the URL), or neither, and AWS_ACCESS_KEY_ID with AWS_SECRET_ACCESS_KEY count; the two pairs do not mix",
        )
