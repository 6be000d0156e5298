"""``.metadata`` and manifest are read as one, also while a save replaces both."""

import uuid

import pytest

from ray_dcp.catalog.committed import read_committed
from ray_dcp.errors import ObjectNotFoundError
from ray_dcp.format.names import MANIFEST, METADATA
from ray_dcp.store.open import open_store
from tests.catalog.test_listing import commit


class ReplacedMeanwhile:
    """A store in which the next of ``files`` replace both after each read of ``.metadata``."""

    def __init__(self, store, files):
        self._store, self._files = store, list(files)
        self.url = store.url
        self.reads = 0

    def get(self, key):
        content = self._store.get(key)
        if key == METADATA:
            self.reads += 1
            if self._files:
                for name, replacement in self._files.pop(0).items():
                    self._store.put(name, replacement)
        return content


@pytest.fixture
def saves():
    """What three saves of one id leave."""
    root = f"memory://{uuid.uuid4().hex}/root"
    found = []
    for number in range(3):
        commit(root, f"step-{number}", step=number)
        store = open_store(f"{root}/step-{number}")
        found.append({name: store.get(name) for name in (MANIFEST, METADATA)})
    return found


def store_with(files):
    store = open_store(f"memory://{uuid.uuid4().hex}/step-1")
    for name, content in files.items():
        store.put(name, content)
    return store


def test_what_belongs_together_is_read_once(saves):
    store = ReplacedMeanwhile(store_with(saves[0]), [])
    assert read_committed(store) == (saves[0][METADATA], saves[0][MANIFEST])
    assert store.reads == 1


def test_what_is_replaced_between_the_two_reads_is_read_anew(saves):
    store = ReplacedMeanwhile(store_with(saves[0]), saves[1:2])
    assert read_committed(store) == (saves[1][METADATA], saves[1][MANIFEST])
    assert store.reads == 2


def test_a_manifest_of_a_save_that_has_not_committed_is_none(saves):
    store = ReplacedMeanwhile(store_with({**saves[0], MANIFEST: saves[1][MANIFEST]}), [])
    assert read_committed(store) == (saves[0][METADATA], None)
    assert store.reads == 3


def test_without_a_manifest_there_is_none_and_without_metadata_nothing_is_committed(saves):
    assert read_committed(store_with({METADATA: saves[0][METADATA]})) == (saves[0][METADATA], None)
    with pytest.raises(ObjectNotFoundError):
        read_committed(store_with({MANIFEST: saves[0][MANIFEST]}))
