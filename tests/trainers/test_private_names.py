"""What is private to the trainers' libraries: named in one file each, and there in this version."""

import ast
import importlib.util
import re
from pathlib import Path

import pytest

import nbelastic

ROOT = Path(nbelastic.__file__).parent

FILES = {
    "accelerate": ("state.py", {"accelerate": "*.py"}),
    "lightning": ("loop.py", {"lightning": "*.py", "torchmetrics": "*.py"}),
    "transformers": ("trainer.py", {"transformers": "train*.py"}),
}
"""The file of each room, and the packages whose modules have what it names."""

OVERRIDDEN = {"_configure_launcher"}
"""Methods of Lightning's strategy, which ours overrides in its own class."""


def named_in(path):
    """Return private names of others that a file has as attributes, strings or imports."""
    own, used, certain = set(), set(), set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            own.add(node.name)
        elif isinstance(node, ast.Attribute):
            of = ast.unparse(node.value)
            (own if of == "self" else certain if of == "super()" else used).add(node.attr)
        elif isinstance(node, ast.ImportFrom):
            certain.update(each.name for each in node.names)
        elif isinstance(node, ast.Constant):
            certain.update(re.findall(r"\A_[a-z_]+\Z", str(node.value)))
    found = certain | used - own
    return {each for each in found if each[:1] == "_" and not each.startswith(("__", "_nbelastic"))}


def defined_in(package, pattern):
    """Return all names that modules of a package define or assign."""
    (folder,) = importlib.util.find_spec(package).submodule_search_locations
    texts = [path.read_text() for path in Path(folder).rglob(pattern)]
    defined = re.compile(r"(?:def|class) (\w+)|\b(_\w+)(?:: [^=\n]+)? =|\b(_\w+): ")
    return {name for match in defined.findall("\n".join(texts)) for name in match}


@pytest.mark.parametrize("room", FILES)
def test_private_names_are_in_one_file_and_in_the_version_that_is_installed(room):
    pytest.importorskip(room)
    file, packages = FILES[room]
    named = {path.name: named_in(path) for path in (ROOT / room).glob("*.py")}
    assert [name for name, found in named.items() if found] == [file], named
    there = set().union(*(defined_in(*each) for each in packages.items()))
    assert named[file] | (OVERRIDDEN if room == "lightning" else set()) <= there
