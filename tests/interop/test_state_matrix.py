"""docs/state.md says of every kind of state how it comes back; each cell of its table is a test here."""

from __future__ import annotations

import functools
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import ray_dcp as dcp
from tests.interop import layouts
from tests.interop.state_kinds import (
    AT_SAVE,
    KINDS,
    MODES,
    ON_A_MESH,
    RESTORED,
    SAVED_BY,
    SIZES,
    Kind,
    blank,
    differences,
    held,
    spoil,
    table,
    whole,
)
from tests.ranks import ThreadGroup, ThreadRanks, require_no_errors

PAGE = Path(__file__).parents[2] / "docs" / "state.md"


def cells(kinds: list[Kind]) -> Any:
    listed = [(kind, mode, size) for kind in kinds for mode in MODES for size in SIZES]
    ids = [f"{kind.name}-{mode}-{size}" for kind, mode, size in listed]
    return pytest.mark.parametrize(("kind", "mode", "size"), listed, ids=ids)


ALWAYS_RESTORED = [kind for kind in KINDS if set(kind.outcomes) == {RESTORED}]
OTHERS = [kind for kind in KINDS if kind not in ALWAYS_RESTORED]


def save_rank(ranks: ThreadRanks, rank: int, state: dict[str, Any], mode: str, place: Path) -> None:
    group: Any = ThreadGroup(ranks, rank)
    if mode == "save":
        dcp.save(state, checkpoint_id=place, group=group)
        return
    response = dcp.async_save(state, checkpoint_id=place, group=group)
    spoil(state)
    response.upload_completion.result(timeout=60)


def load_rank(ranks: ThreadRanks, rank: int, template: dict[str, Any], place: Path) -> Any:
    return dcp.load(template, checkpoint_id=place, group=ThreadGroup(ranks, rank))  # type: ignore[arg-type]


def template_of(kind: Kind, rank: int, world_size: int) -> dict[str, Any]:
    return kind.template(rank, world_size) if kind.template else blank(kind.state(rank, world_size))


def require_restored(kind: Kind, rank: int, world_size: int, filled: dict[str, Any]) -> None:
    assert differences(filled, (kind.expected or kind.state)(rank, world_size)) == []
    kind.check(filled)


@pytest.fixture(scope="module")
def loaded_together(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(mode, number of ranks) -> each rank's templates, filled, of all kinds that always come back.

    They go into one checkpoint a mode, each kind under its own name: 400 of them would take a minute.
    """
    folder = tmp_path_factory.mktemp("together")

    @functools.cache
    def saved(mode: str) -> Path:
        ranks = ThreadRanks(SAVED_BY)
        states = [{kind.name: kind.state(rank, SAVED_BY) for kind in ALWAYS_RESTORED} for rank in range(SAVED_BY)]
        require_no_errors(ranks.run(lambda rank: save_rank(ranks, rank, states[rank], mode, folder / mode)))
        return folder / mode

    @functools.cache
    def loaded(mode: str, world_size: int) -> list[dict[str, Any]]:
        ranks = ThreadRanks(world_size)
        templates = [
            {kind.name: template_of(kind, rank, world_size) for kind in ALWAYS_RESTORED} for rank in range(world_size)
        ]
        require_no_errors(ranks.run(lambda rank: load_rank(ranks, rank, templates[rank], saved(mode))))
        return templates

    saved("save"), saved("async_save")  # here, in one thread
    return loaded


@cells(ALWAYS_RESTORED)
def test_it_comes_back(kind: Kind, mode: str, size: str, loaded_together: Any) -> None:
    for rank, templates in enumerate(loaded_together(mode, SIZES[size])):
        require_restored(kind, rank, SIZES[size], templates[kind.name])


@cells(OTHERS)
def test_it_is_refused_where_the_page_says_so(kind: Kind, mode: str, size: str, tmp_path: Path) -> None:
    place, saving = tmp_path / "c", ThreadRanks(SAVED_BY)
    outcomes = saving.run(lambda rank: save_rank(saving, rank, kind.state(rank, SAVED_BY), mode, place))
    outcome, world_size = kind.outcome(size), SIZES[size]
    if outcome == AT_SAVE:
        assert all(isinstance(one, dcp.CheckpointException) for one in outcomes), outcomes
        assert re.search(kind.says, str(outcomes[0]), re.DOTALL), outcomes[0]
        assert not place.exists() or list(place.iterdir()) == []
        return
    require_no_errors(outcomes)
    ranks = ThreadRanks(world_size)
    templates = [template_of(kind, rank, world_size) for rank in range(world_size)]
    loads = ranks.run(lambda rank: load_rank(ranks, rank, templates[rank], place))
    if outcome == RESTORED:
        require_no_errors(loads)
        for rank, template in enumerate(templates):
            require_restored(kind, rank, world_size, template)
        return
    assert all(isinstance(one, dcp.CheckpointException) for one in loads), loads
    assert re.search(kind.says, str(loads[0]), re.DOTALL), loads[0]
    for rank, template in enumerate(templates):
        assert differences(template, template_of(kind, rank, world_size)) == []


@pytest.mark.parametrize("mode", MODES)
def test_a_save_that_one_name_spoils_leaves_nothing_of_any_kind(mode: str, tmp_path: Path) -> None:
    place, ranks = tmp_path / "c", ThreadRanks(SAVED_BY)
    states = [{kind.name: kind.state(rank, SAVED_BY) for kind in ALWAYS_RESTORED} for rank in range(SAVED_BY)]
    states[1]["zz"] = lambda: 0
    outcomes = ranks.run(lambda rank: save_rank(ranks, rank, states[rank], mode, place))
    assert all("zz: a function that cannot be pickled" in str(one) for one in outcomes), outcomes
    assert not place.exists() or list(place.iterdir()) == []


def test_a_load_that_one_name_spoils_changes_nothing_of_any_kind(tmp_path: Path) -> None:
    saving, ranks = ThreadRanks(SAVED_BY), ThreadRanks(3)
    states = [{kind.name: kind.state(rank, SAVED_BY) for kind in ALWAYS_RESTORED} for rank in range(SAVED_BY)]
    require_no_errors(saving.run(lambda rank: save_rank(saving, rank, states[rank], "save", tmp_path)))
    templates = [{kind.name: template_of(kind, rank, 3) for kind in ALWAYS_RESTORED} for rank in range(3)]
    templates[1]["zz"] = 0
    loads = ranks.run(lambda rank: load_rank(ranks, rank, templates[rank], tmp_path))
    assert all("zz: Missing key" in str(one) for one in loads), loads
    for rank, template in enumerate(templates):
        for kind in ALWAYS_RESTORED:
            assert differences(held(template[kind.name]), held(template_of(kind, rank, 3)), kind.name) == []


def save_on_mesh(rank: int, folder: Path) -> list[list[str]]:
    """What each kind's save says in each mode; nothing where it went well."""
    return [
        [said(partial(save_one, kind, mode, rank, folder / mode / str(number))) for mode in MODES]
        for number, kind in enumerate(ON_A_MESH)
    ]


def save_one(kind: Kind, mode: str, rank: int, place: Path) -> None:
    state = kind.state(rank, SAVED_BY)
    if mode == "save":
        dcp.save(state, checkpoint_id=place)
        return
    response = dcp.async_save(state, checkpoint_id=place)
    spoil(whole_parts(state))
    response.upload_completion.result(timeout=60)


def whole_parts(state: Any) -> Any:
    """The memory of this rank in ``state``."""
    if isinstance(state, dcp.TrainState):
        return whole_parts(state.state_dict())
    if isinstance(state, dict):
        return {key: whole_parts(value) for key, value in state.items()}
    return state.to_local() if hasattr(state, "to_local") else state


def said(do: Any) -> str:
    try:
        do()
    except dcp.CheckpointException as error:
        return str(error)
    return ""


def load_on_mesh(rank: int, world_size: int, folder: Path) -> list[str]:
    """What is not as it should be, after loading every kind in every mode."""
    wrong = []
    for number, kind in enumerate(ON_A_MESH):
        if kind.outcome("more") == AT_SAVE:
            continue
        expected = whole(kind.state(rank, world_size))
        for mode in MODES:
            template = kind.template(rank, world_size) if kind.template else kind.state(rank, world_size)
            if kind.template is None:
                spoil(whole_parts(dict(template)))
            assert differences(whole(template), expected)
            dcp.load(template, checkpoint_id=folder / mode / str(number))
            wrong += [f"{kind.name} {mode} {one}" for one in differences(whole(template), expected)]
    return wrong


@pytest.mark.ray
def test_what_lies_on_a_mesh_comes_back_as_the_page_says(ranks: Any, tmp_path: Path) -> None:
    for outcomes in layouts.in_group(ranks, SAVED_BY, save_on_mesh, tmp_path, tmp_path / "c"):
        for kind, by_mode in zip(ON_A_MESH, outcomes, strict=True):
            for message in by_mode:
                refused = kind.outcome("fewer") == AT_SAVE
                assert bool(message) == refused, message
                assert re.search(kind.says, message, re.DOTALL), message
    for world_size in SIZES.values():
        found = layouts.in_group(ranks, world_size, load_on_mesh, tmp_path, world_size, tmp_path / "c")
        assert found == [[]] * world_size


def test_the_page_has_this_table() -> None:
    page = PAGE.read_text()
    assert table(KINDS + ON_A_MESH) in page, (
        "python -m tests.interop.state_kinds prints the table that belongs in docs/state.md"
    )


def test_a_template_of_the_matrix_holds_nothing_of_what_is_loaded() -> None:
    """Else a value that is not filled would pass."""
    for kind in KINDS:
        if kind.outcome("fewer") == RESTORED and kind.name not in ("`None`", "an empty tensor"):
            template = template_of(kind, 0, 1)
            assert differences(template, (kind.expected or kind.state)(0, 1)), kind.name
