"""Rules for source files that no linter has."""

import ast
from pathlib import Path

import pytest

import ray_dcp.errors

PACKAGE = Path(ray_dcp.errors.__file__).parent
SOURCES = sorted(PACKAGE.rglob("*.py"))
MAX_LINES = 450
DRAWERS = {"utils", "util", "helpers", "helper", "common", "core", "misc", "types"}
each_source = pytest.mark.parametrize("source", SOURCES, ids=[str(source.relative_to(PACKAGE)) for source in SOURCES])


def test_there_are_sources():
    assert PACKAGE / "errors.py" in SOURCES


@each_source
def test_a_module_is_short_enough_to_read(source):
    assert len(source.read_text().splitlines()) <= MAX_LINES, "split it by what it is about"


@each_source
def test_a_module_is_named_for_what_it_is_about(source):
    names = {part.removesuffix(".py") for part in source.relative_to(PACKAGE).parts}
    assert not names & DRAWERS, "a drawer, not a floor: name it after the noun that it serves"


@each_source
def test_a_module_says_what_it_is(source):
    text = source.read_text()
    if source.name == "__init__.py" and not text.strip():
        return
    assert ast.get_docstring(ast.parse(text)), "begin it with a docstring"


@each_source
def test_a_module_is_imported_by_an_import_statement(source):
    if source == PACKAGE / "__init__.py":
        pytest.skip("names of the public API are found when they are asked for")
    calls = [node for node in ast.walk(ast.parse(source.read_text())) if isinstance(node, ast.Call) and node.args]
    hidden = [
        ast.unparse(node)
        for node in calls
        if ast.unparse(node.func).endswith("import_module") and ast.unparse(node.args[0]).lstrip("f")[1:8] == "ray_dcp"
    ]
    assert hidden == [], "neither mypy nor import-linter would see it"


@each_source
def test_source_is_ascii(source):
    lines = source.read_text().splitlines()
    assert [number for number, line in enumerate(lines, 1) if not line.isascii()] == []
