"""The rules of the house: who may import whom, what an import costs, and one name for one thing.

Tests leave the modules of the standard library as they are: the clusters of a session have threads
in this process. A clock that is replaced in ``time`` itself ends their event loops; a test replaces
the name in the module under test instead.
"""

import ast
import re
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE, TESTS = ROOT / "nbelastic", ROOT / "tests"
MODULES = 14  # most modules of a folder, without its door; a room that has more gets sub-rooms
LINES = 60  # fewest of a module that is no door; a smaller one belongs into its user
DOORS = {"cli/entry.py", "tensorflow/elastic.py", "torch/elastic/sampler.py"}
"""Doors that import little, or have Horovod's names."""


def test_a_folder_has_few_modules():
    count = Counter(
        str(path.parent.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if path.name != "__init__.py"
    )
    assert not {room: n for room, n in count.items() if n > MODULES}


def test_a_module_holds_an_idea():
    made = (ast.FunctionDef, ast.ClassDef)
    small = {
        path
        for path, tree in trees().items()
        if (PACKAGE / path).read_bytes().count(b"\n") < LINES
        and any(isinstance(node, made) for node in tree.body)
    }
    assert not {path for path in small - DOORS if not path.endswith("__init__.py")}


@pytest.mark.slow
def test_rooms_import_only_from_lower_floors():
    linter = Path(sys.executable).with_name("lint-imports")
    result = subprocess.run(
        [linter, "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr


NAMES = """
import nbelastic, types
names = {each for each in nbelastic.__all__ if not each.endswith("ipython_extension")}
found = {name: getattr(nbelastic, name) for name in names - {"elastic", "errors"}}
assert not [name for name, each in found.items() if isinstance(each, types.ModuleType)]
assert found.keys() <= {*nbelastic.driver.__all__, *nbelastic.elastic.__all__}
assert nbelastic.report is nbelastic.elastic.report and nbelastic.chaos.Fault
"""
LIGHT = """
import sys, {}
assert not {{"torch", "IPython", "ipywidgets"}} & sys.modules.keys()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "code",
    [
        NAMES,
        LIGHT.format("nbelastic.elastic.sampler"),
        LIGHT.format("nbelastic.notebook.cell, nbelastic.notebook.names"),
    ],
)
def test_a_fresh_interpreter_has_public_names_and_imports_little(code):
    subprocess.run([sys.executable, "-c", code], check=True)


@cache
def trees() -> dict[str, ast.Module]:
    paths = sorted(PACKAGE.rglob("*.py"))
    return {str(path.relative_to(PACKAGE)): ast.parse(path.read_text()) for path in paths}


def classes() -> Iterator[tuple[str, ast.ClassDef]]:
    for path, tree in trees().items():
        yield from ((path, node) for node in ast.walk(tree) if isinstance(node, ast.ClassDef))


def test_no_class_name_is_defined_twice():
    places: dict[str, list[str]] = defaultdict(list)
    for path, node in classes():
        places[node.name].append(path)
    assert {name: where for name, where in places.items() if len(where) > 1} == {}


def test_a_public_method_has_a_docstring_unless_it_overrides_one():
    known = {node.name: node for _, node in classes()}

    def methods(node: ast.ClassDef) -> dict[str, ast.FunctionDef]:
        return {each.name: each for each in node.body if isinstance(each, ast.FunctionDef)}

    def inherits(node: ast.ClassDef, method: str) -> bool:
        bases = (ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in node.bases)
        found = [known.get(base) for base in bases if base != "Protocol"]
        return any(
            each is None or method in methods(each) or inherits(each, method)
            for each in found  # one that is not ours may have any
        )

    found = [
        f"{name}.{method}"
        for name, node in known.items()
        for method, each in methods(node).items()
        if not name.startswith("_") and not method.startswith("_") and not ast.get_docstring(each)
        if not any("setter" in ast.unparse(each) for each in each.decorator_list)
        if not inherits(node, method)
    ]
    assert not found


ALLOWED = {
    ("cli/test_options.py", "sys"),  # its stdout, to which no cluster writes
    ("benchmarks/test_benchmarks.py", "sys"),  # its arguments, for a benchmark in this process
    ("conftest.py", "os"),  # fork(), for this thread alone
    ("cli/test_script.py", "os"),  # access(), which denies root nothing
}


def test_no_module_of_the_standard_library_is_changed():
    changes = re.compile(r"\.setattr\(\s*(?:\w+\.)*(\w+),(?!.*raising=)")
    found = {
        (str(path.relative_to(TESTS)), name)
        for path in sorted(TESTS.rglob("*.py"))
        for name in changes.findall(path.read_text())
        if name in sys.stdlib_module_names
    }
    assert found == ALLOWED


NEWER = {
    "typing": {"LiteralString", "Never", "NotRequired", "Required", "Self", "TypeVarTuple"}
    | {"Unpack", "assert_never", "assert_type", "dataclass_transform", "override", "reveal_type"},
    "enum": {"ReprEnum", "StrEnum", "member", "nonmember", "property", "verify"},
    "asyncio": {"Barrier", "Runner", "TaskGroup", "timeout", "timeout_at"},
    "datetime": {"UTC"},
    "contextlib": {"chdir"},
    "itertools": {"batched"},
    "tomllib": {"load", "loads"},
}
"""Names of the standard library that Python 3.10, the oldest supported, does not have."""


def test_nothing_is_imported_that_the_oldest_python_lacks():
    assert not [
        (path, node.module, each.name)
        for path, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for each in node.names
        if each.name in NEWER.get(node.module or "", ())
        and node.col_offset == 0  # else for types alone
    ]
