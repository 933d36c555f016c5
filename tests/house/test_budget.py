"""Budgets of lines: one for the package, its native part included, and one for the tests.

They only fall. A change that adds a mechanism pays for it in its own branch; a change that makes
the house smaller lowers the number to what is there.
"""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = {".py", ".pyi", ".cpp", ".hpp", ".inc"}
BUDGET = {"nbelastic": 49_936, "tests": 40_833}
SLACK = 500  # lines by which a budget may be above what is there


@pytest.mark.parametrize("room", BUDGET)
def test_the_house_only_gets_smaller(room: str) -> None:
    files = (path for path in (ROOT / room).rglob("*") if path.suffix in SOURCES)
    lines = sum(path.read_bytes().count(b"\n") for path in files)
    assert BUDGET[room] - SLACK <= lines <= BUDGET[room], f"{room}: {lines} lines"
