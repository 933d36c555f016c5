"""A budget of lines for each room, so that the house does not grow unnoticed.

A budget is raised only in a commit of its own, whose message says why. A change that adds a
mechanism names the one that it removes. Lower a budget when a room has become smaller.
"""

from __future__ import annotations

from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "nbelastic"
SOURCES = {".py", ".pyi", ".cpp", ".hpp", ".inc"}
SLACK = 500
"""Lines that a room may be below its budget."""

BUDGET = {
    "accelerate": 300,
    "chaos": 1_000,
    "cli": 3_000,
    "cluster": 9_850,
    "collectives": 7_950,
    "data": 4_800,
    "driver": 4_050,
    "elastic": 5_550,
    "keras": 3_700,
    "lightning": 600,
    "membership": 5_100,
    "native": 3_900,
    "notebook": 2_100,
    "render": 1_500,
    "sharing": 900,
    "tensorflow": 500,
    "torch": 13_100,
    "trainers": 100,
    "transformers": 550,
}


def lines_of(room: Path) -> int:
    files = (path for path in room.rglob("*") if path.suffix in SOURCES)
    return sum(len(path.read_text().splitlines()) for path in files)


def test_each_room_has_a_budget() -> None:
    rooms = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert rooms == set(BUDGET)


@pytest.mark.parametrize("room", BUDGET)
def test_no_room_is_larger_than_its_budget_or_much_smaller(room: str) -> None:
    lines = lines_of(PACKAGE / room)
    assert BUDGET[room] - SLACK <= lines <= BUDGET[room], f"{room}: {lines} lines"
