"""Rules for source files that no linter has."""

import ast
import functools
import importlib.util
from collections import defaultdict
from pathlib import Path

import ray_dcp.errors

PACKAGE = Path(ray_dcp.errors.__file__).parent
SOURCES = sorted(PACKAGE.rglob("*.py"))
MAX_LINES = 450
MIN_LINES = 30
MAX_MODULES = 10
DRAWERS = {"utils", "util", "helpers", "helper", "common", "core", "misc", "types"}


@functools.cache
def tree_of(source):
    return ast.parse(source.read_text())


def wrong(find, but=()):
    """What ``find`` finds in each source, by the source's name: nothing is left out, and nothing is what is wanted."""
    found = {str(source.relative_to(PACKAGE)): find(source) for source in SOURCES if source not in but}
    return {name: one for name, one in found.items() if one}


def test_there_are_sources():
    assert PACKAGE / "errors.py" in SOURCES


def num_lines(source):
    return len(source.read_text().splitlines())


def test_a_module_is_short_enough_to_read():
    long = wrong(lambda source: num_lines(source) > MAX_LINES)
    assert long == {}, "split it by what it is about"


def test_a_module_is_worth_its_name():
    doors = [source for source in SOURCES if source.name in ("__init__.py", "version.py") or is_torchs(source)]
    short = wrong(lambda source: num_lines(source) < MIN_LINES, but=doors)
    assert short == {}, "put it beside what it serves"


def is_torchs(source):
    """Whether it is there only to have torch's names under a name of torch's."""
    name = f"torch.distributed.checkpoint.{source.stem}"
    return source.parent == PACKAGE and importlib.util.find_spec(name) is not None


def test_a_package_has_few_modules():
    of_packages = defaultdict(list)
    for source in SOURCES:
        if source.name != "__init__.py" and source.parent != PACKAGE:
            of_packages[source.parent].append(source.stem)
    assert {str(package): names for package, names in of_packages.items() if len(names) > MAX_MODULES} == {}


def test_no_two_modules_have_one_name():
    assert repeated((source.stem, source) for source in SOURCES if source.name != "__init__.py") == {}


def test_no_two_classes_have_one_name():
    assert repeated((node.name, source) for source, node in nodes_of(ast.ClassDef)) == {}


def test_no_constant_has_two_values():
    assigned = defaultdict(set)
    for source in SOURCES:
        for node in tree_of(source).body:
            if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
                target = node.targets[0] if isinstance(node, ast.Assign) else node.target
                value = ast.unparse(node.value)
                if isinstance(target, ast.Name) and is_constant(target.id) and not value.startswith(TYPE_VARIABLES):
                    assigned[target.id.lstrip("_")].add(f"{source.relative_to(PACKAGE)}: {value[:60]}")
    values = {name: {one.partition(": ")[2] for one in found} for name, found in assigned.items()}
    assert {name: found for name, found in assigned.items() if len(values[name]) > 1} == {}


TYPE_VARIABLES = ("TypeVar(", "ParamSpec(", "TypeVarTuple(")


def is_constant(name):
    return name.lstrip("_").isupper()


def nodes_of(kind):
    return ((source, node) for source in SOURCES for node in ast.walk(tree_of(source)) if isinstance(node, kind))


def repeated(named):
    places = defaultdict(list)
    for name, source in named:
        places[name].append(str(source.relative_to(PACKAGE)))
    return {name: found for name, found in places.items() if len(found) > 1}


def test_a_module_is_named_for_what_it_is_about():
    drawers = wrong(lambda source: DRAWERS & {part.removesuffix(".py") for part in source.relative_to(PACKAGE).parts})
    assert drawers == {}, "a drawer, not a floor: name it after the noun that it serves"


def test_a_module_says_what_it_is():
    empty = [source for source in SOURCES if source.name == "__init__.py" and not source.read_text().strip()]
    silent = wrong(lambda source: not ast.get_docstring(tree_of(source)), but=empty)
    assert silent == {}, "begin it with a docstring"


def hidden_imports(source):
    calls = [node for node in ast.walk(tree_of(source)) if isinstance(node, ast.Call) and node.args]
    return [
        ast.unparse(node)
        for node in calls
        if ast.unparse(node.func).endswith("import_module") and ast.unparse(node.args[0]).lstrip("f")[1:8] == "ray_dcp"
    ]


def test_a_module_is_imported_by_an_import_statement():
    # Names of the public API are found when they are asked for.
    hidden = wrong(hidden_imports, but=[PACKAGE / "__init__.py"])
    assert hidden == {}, "neither mypy nor import-linter would see it"


def test_source_is_ascii():
    def lines_that_are_not(source):
        return [number for number, line in enumerate(source.read_text().splitlines(), 1) if not line.isascii()]

    assert wrong(lines_that_are_not) == {}
