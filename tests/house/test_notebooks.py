"""Notebooks: an assertion that fails tells its reader what was expected."""

from __future__ import annotations

import ast
from pathlib import Path

import nbformat
import pytest

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_each_assertion_says_what_it_expects(path: Path) -> None:
    bare = []
    for cell in nbformat.read(path, as_version=4).cells:
        if cell.cell_type == "code":
            lines = ["" if line.startswith("%") else line for line in cell.source.splitlines()]
            for node in ast.walk(ast.parse("\n".join(lines))):
                if isinstance(node, ast.Assert) and not isinstance(
                    node.msg, (ast.Constant, ast.JoinedStr)
                ):
                    bare.append(ast.unparse(node))
    assert not bare, "assertions without words"
