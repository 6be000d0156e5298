"""Private symbols of torch and Ray: named in one module each, and still there."""

import ast
import importlib
import inspect
import re
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest

import ray_dcp.errors
from ray_dcp import torch_private
from ray_dcp.cluster import ray_private

PACKAGE = Path(ray_dcp.errors.__file__).parent
SYMBOLS = {**torch_private.ESSENTIAL, **torch_private.OPTIONAL, **ray_private.SYMBOLS}
LISTS = [PACKAGE / "torch_private.py", PACKAGE / "cluster" / "ray_private.py"]
FOREIGN = ("torch", "ray")
PRIVATE_OF_RAY = ("ray.experimental", "ray.core.generated", "ray.train.v2")
OF_OTHERS = {
    "_Unpickler": "pickle",
    "_Pickler": "pickle",
    "_extension_cache": "copyreg",
    "_condition": "concurrent.futures",
    "_state": "concurrent.futures",
    "_strip_protocol": "fsspec",
    "_exit": "os",
}
"""Private attributes of neither, and whose they are."""


@pytest.mark.parametrize("symbol", SYMBOLS)
def test_the_installed_version_has(symbol):
    owner, rest = longest_module(symbol)
    for name in rest:
        if not hasattr(owner, name):
            assert holds(owner, name), f"gone, and with it: {SYMBOLS[symbol]}"
            return
        owner = getattr(owner, name)


def longest_module(symbol):
    parts = symbol.split(".")
    for length in range(len(parts), 0, -1):
        try:
            return importlib.import_module(".".join(parts[:length])), parts[length:]
        except ImportError:
            continue
    raise AssertionError(f"{symbol}: no such package")


def holds(owner, name):
    """Whether an attribute is set somewhere in the source of a class or module, or in its compiled file."""
    if isinstance(owner, ModuleType) and not str(owner.__file__).endswith(".py"):
        return name.encode() in Path(owner.__file__).read_bytes()
    return name in inspect.getsource(owner)


def is_private(name):
    return name.startswith("__ray_") or (name.startswith("_") and not name.endswith("__"))


def is_private_symbol(dotted):
    return dotted.startswith(PRIVATE_OF_RAY) or any(map(is_private, dotted.split(".")))


def private_imports(tree):
    """Symbols of torch or Ray that a module imports or reaches by their dotted names, as far as they are private."""
    bound = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            dotted = [(one.asname or one.name.split(".")[0], one.name) for one in node.names]
            bound |= {name: full if one.asname else name for (name, full), one in zip(dotted, node.names, strict=True)}
        elif isinstance(node, ast.ImportFrom):
            dotted = [(one.asname or one.name, f"{node.module}.{one.name}") for one in node.names]
            bound |= dict(dotted)
        else:
            continue
        yield from (full for _, full in dotted if full.split(".")[0] in FOREIGN and is_private_symbol(full))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            first, _, rest = dotted_name(node).partition(".")
            full = f"{bound.get(first, '')}.{rest}"
            if full.split(".")[0] in FOREIGN and is_private_symbol(full):
                yield full
        elif (
            isinstance(node, ast.Constant) and isinstance(node.value, str) and re.fullmatch(r"ray(\.\w+)+", node.value)
        ):
            yield from [node.value] if is_private_symbol(node.value) else []


def dotted_name(node):
    """``a.b.c``; empty for what is no chain of plain names."""
    if isinstance(node, ast.Attribute):
        return f"{dotted_name(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def own_names(trees):
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                yield node.name
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                yield node.id
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_self(node.value):
                yield node.attr


def is_self(node):
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


SOURCES = [source for source in sorted(PACKAGE.rglob("*.py")) if source not in LISTS]
LISTED = {name for symbol in SYMBOLS for name in symbol.split(".") if is_private(name)}
SET_ON_OTHERS_OBJECTS = {"_ray_dcp_told", "_ray_dcp_failure", "_ray_dcp_group"}


def test_a_module_uses_private_symbols_through_the_lists_only():
    trees = {str(source.relative_to(PACKAGE)): ast.parse(source.read_text()) for source in SOURCES}
    where = "name it in torch_private or cluster/ray_private, and say what is lost without it"
    imported = {source: list(private_imports(tree)) for source, tree in trees.items()}
    assert {source: found for source, found in imported.items() if found} == {}, where
    known = set(own_names(trees.values())) | SET_ON_OTHERS_OBJECTS | LISTED | OF_OTHERS.keys()
    attributes = {source: private_attributes(tree) - known for source, tree in trees.items()}
    assert {source: found for source, found in attributes.items() if found} == {}, where


def private_attributes(tree):
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and is_private(node.attr) and not is_self(node.value)
    }


def test_the_lists_name_nothing_that_is_not_used():
    words = Counter(re.findall(r"\w+", "\n".join(source.read_text() for source in (*SOURCES, *LISTS))))
    assert [symbol for symbol in SYMBOLS if words[symbol.rpartition(".")[2]] < 2] == []


def test_an_optional_symbol_that_is_gone_breaks_no_import():
    gone = [symbol for symbol in torch_private.OPTIONAL if symbol.count(".") > 1]
    for symbol in gone:
        assert torch_private._found(f"{symbol}_of_old", "otherwise") == "otherwise"
    assert torch_private._found("torch.no_such_module.Thing", None) is None


def test_a_symbol_of_ray_that_is_gone_is_an_import_error(monkeypatch):
    from ray._private import worker

    monkeypatch.delattr(worker, "global_worker")
    with pytest.raises(ImportError, match="global_worker"):
        ray_private.private("global_worker")
