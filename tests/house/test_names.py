"""One name, one thing: no class name is defined twice in the package."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "nbelastic"


def test_no_class_name_is_defined_twice():
    places: dict[str, list[str]] = defaultdict(list)
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(str(path.relative_to(PACKAGE)))
    assert {name: where for name, where in places.items() if len(where) > 1} == {}


def test_only_doors_say_what_they_export():
    """`__all__` stands in packages, and in modules that pass on names of others."""
    for path in sorted(PACKAGE.rglob("*.py")):
        tree = ast.parse(path.read_text())
        exported = {
            name
            for node in tree.body
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
            for name in ast.literal_eval(node.value)
        }
        imported = {
            alias.asname or alias.name
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }
        is_door = path.name == "__init__.py" or exported & imported
        assert is_door or not exported, f"{path}: only a door has __all__"


def test_a_public_method_has_a_docstring_unless_it_overrides_one():
    classes: dict[str, ast.ClassDef] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                classes[node.name] = node

    def methods(node: ast.ClassDef) -> dict[str, ast.FunctionDef]:
        return {each.name: each for each in node.body if isinstance(each, ast.FunctionDef)}

    def inherits(node: ast.ClassDef, method: str) -> bool:
        bases = (ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in node.bases)
        known = [classes.get(base) for base in bases if base != "Protocol"]
        return any(
            each is None or method in methods(each) or inherits(each, method)
            for each in known  # one that is not ours may have any
        )

    found = [
        f"{name}.{method}"
        for name, node in classes.items()
        for method, each in methods(node).items()
        if not name.startswith("_") and not method.startswith("_") and not ast.get_docstring(each)
        if not any("setter" in ast.unparse(each) for each in each.decorator_list)
        if not inherits(node, method)
    ]
    assert not found
