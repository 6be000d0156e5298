"""``Store``: what every storage backend does, and what callers may rely on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, cast, runtime_checkable

from ray_dcp.errors import ObjectNotFoundError


@dataclass(frozen=True, slots=True)
class StoredObject:
    """One object as a listing shows it."""

    key: str
    """Key relative to the store's root, with forward slashes."""
    nbytes: int
    modified: float
    """Time of the last change, in seconds since the epoch; 0.0 where the backend does not say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreTraits:
    """What kind of store a store is: how it is best read, and what it offers beyond ``Store``.

    A wrong one about reading costs time, never values. A store of your own sets what is true of it.
    """

    page_cache: bool = False
    """Whether reads are copies out of this machine's memory, as those of a mounted file system are: then they are
    short and few at a time, so that what is read is checked while the CPU's cache has it."""
    request_nbytes: int = 16 << 20
    """How many bytes one read had best ask for where ``page_cache`` is False."""
    folders: bool = False
    """Whether it is a ``FolderStore``: folders exist by themselves, and so does what dead processes leave in them."""
    renames: bool = False
    """Whether it is a ``RenamingStore``."""


class ObjectWriter(Protocol):
    """A sequential sink for one new object."""

    def write(self, chunk: bytes | bytearray | memoryview) -> int:
        """Append all of ``chunk``; return its length in bytes. Short writes are retried inside or raise."""
        ...

    def tell(self) -> int:
        """Bytes accepted so far."""
        ...


@runtime_checkable
class Preallocates(Protocol):
    """An ``ObjectWriter`` that can make room before the first byte comes."""

    def preallocate(self, nbytes: int) -> None:
        """Make room for about ``nbytes``. Raises ``StoreError`` where there is not enough."""
        ...


class Store(Protocol):
    """Holds bytes by key, under one root (a folder, a bucket prefix, a dict).

    Keys are relative, use ``/``, and never leave the root, save for a leading ``../`` that names a
    sibling checkpoint in ``get`` (an item may point at another checkpoint's file). Implementations do
    not retry; that is a wrapper's job. Every failure is a ``StoreError`` or a subclass of it.
    Instances may be used from several threads and survive pickling. A store without ``traits`` has the defaults of
    ``StoreTraits``; a wrapper passes on those of the store within.
    """

    url: str
    """The root's place, as the user would write it; used in messages and to open the same store elsewhere."""

    def put(self, key: str, content: bytes, *, last_look: Callable[[], None] | None = None) -> None:
        """Replace or create an object in one step: readers see all of the old or all of the new.

        When it returns, the object is durable, its name included. On failure readers see all of the old one or,
        where only making the name durable failed, all of the new one. ``last_look`` is called once, as late as the
        backend can before readers see the new object; what it raises gives the put up, and passes unchanged.
        """
        ...

    def put_new(self, key: str) -> AbstractContextManager[ObjectWriter]:
        """Open a writer for an object that does not exist yet.

        Raises ``StoreError`` if the key exists. Leaving the block normally makes the object durable,
        its name included; leaving it by an exception removes what was written as far as possible.
        """
        ...

    def get(self, key: str, offset: int = 0, nbytes: int | None = None) -> bytes:
        """Return ``nbytes`` from ``offset`` (all that follows when None).

        Raises ``ObjectNotFoundError``, or ``ObjectTooShortError`` when the object ends before the range does. Sees
        what every ``put`` has returned for, even where listings show it later.
        """
        ...

    def list(self, prefix: str = "") -> Sequence[StoredObject]:
        """All objects whose key is in the folder ``prefix`` or below it, sorted by key. To find none is not an error.

        Raises ``StoreError`` where ``prefix`` (or the root) is a file instead of a folder. Some object stores show a
        new object late: what is not listed may still be there, and ``get`` knows.
        """
        ...

    def list_folders(self, prefix: str = "") -> Sequence[str]:
        """Names of the folders directly inside ``prefix``, sorted. To find none is not an error."""
        ...

    def delete(self, key: str) -> None:
        """Remove an object; a missing one is not an error. A folder that is empty then may vanish, or stay listed."""
        ...


def get_or_none(store: Store, key: str) -> bytes | None:
    """The whole content of an object, or None where there is no such object."""
    try:
        return store.get(key)
    except ObjectNotFoundError:
        return None


def exists(store: Store, key: str) -> bool:
    """Whether there is an object, as ``get`` sees it; a listing may show it late. No byte of it is read."""
    try:
        store.get(key, 0, 0)
    except ObjectNotFoundError:
        return False
    return True


class FolderStore(Protocol):
    """A store on a file system: its folders exist by themselves, and it puts an object by renaming a temporary file.

    A process that dies may leave both behind; ``list`` shows neither.
    """

    def list_temporaries(self, prefix: str = "") -> Sequence[StoredObject]:
        """The temporary files directly in the folder ``prefix``, also those of a ``put`` under way. ``delete`` takes
        their keys."""
        ...

    def delete_empty_folder(self, prefix: str) -> bool:
        """Remove the folder ``prefix`` if nothing at all is in it; return whether it is gone. Writers make it again."""
        ...

    def is_link(self, prefix: str) -> bool:
        """Whether the folder ``prefix`` is a symbolic link: what it shows lies in another folder."""
        ...

    def link_target(self, prefix: str) -> str:
        """The place that the symbolic link ``prefix`` leads to, as it says itself."""
        ...

    def is_there(self, prefix: str) -> bool:
        """Whether something lies at ``prefix``, an empty folder too. A link that leads nowhere is not something."""
        ...

    def real_url(self) -> str:
        """The root's one name, whichever path leads to it: links are followed."""
        ...


class RenamingStore(Store, Protocol):
    """A store that gives an object another name without a copy."""

    def rename(self, key: str, new_key: str) -> None:
        """Move an object in one step, over another one that has that key; durable when it returns."""
        ...


def traits_of(store: Store) -> StoreTraits:
    """What kind of store ``store`` is, as it says itself."""
    traits: StoreTraits = getattr(store, "traits", _DEFAULT_TRAITS)
    return traits


def as_folders(store: Store) -> FolderStore | None:
    """``store`` where its traits say that it is a ``FolderStore``; None where not."""
    return cast(FolderStore, store) if traits_of(store).folders else None


def as_renaming(store: Store) -> RenamingStore | None:
    """``store`` where its traits say that it is a ``RenamingStore``; None where not."""
    return cast(RenamingStore, store) if traits_of(store).renames else None


_DEFAULT_TRAITS = StoreTraits()


def chunk_bytes(chunk: bytes | bytearray | memoryview) -> memoryview:
    """``chunk`` as flat bytes, not copied."""
    view = memoryview(chunk)
    # cast() refuses a shape that has a zero in it.
    return view.cast("B") if view.nbytes else memoryview(b"")
