"""Choice and order of the members of a plan."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from nbelastic.membership.placement import choose, choose_released
from nbelastic.messages import FRESH, Member, Plan, Slot


@dataclass(frozen=True)
class Candidate:
    name: str

    @property
    def slot(self) -> Slot:
        return Slot(self.name, f"tcp://{self.name}", self.name, self.name[0])


def candidates(names: str) -> list[Candidate]:
    return [Candidate(name) for name in names.split()]


def line(crew: list[Candidate]) -> str:
    return " ".join(candidate.name for candidate in crew)


def test_choose_takes_the_first_that_there_is_room_for() -> None:
    chosen = choose(candidates("A0 A1 A2 B0 C0 C1"), most=4, per_host=2)
    assert line(chosen) == "A0 A1 B0 C0"


@pytest.mark.parametrize(
    ("names", "number", "gone"),
    [
        ("A0 A1 A2", 1, "A2"),
        ("A0 B0 C0", 2, "C0 B0"),
        ("A0 B0 B1", 1, "A0"),
        ("A0 A1 B0 B1", 2, "B1 B0"),
        ("A0 A1 B0 B1", 1, "B1"),
        ("A0 A1 A2 B0", 2, "B0 A2"),
        ("A0 A1", 2, "A1 A0"),
    ],
)
def test_the_youngest_leave_and_small_hosts_as_a_whole(names: str, number: int, gone: str) -> None:
    assert line(choose_released(candidates(names), number)) == gone


def plan(*versions: int) -> Plan:
    crew = candidates(" ".join(f"A{number}" for number in range(len(versions))))
    members = [
        Member(start, candidate.slot, ("h", start), version)
        for start, (candidate, version) in enumerate(zip(crew, versions, strict=True))
    ]
    return Plan(generation=1, members=tuple(members), loop=1)


@pytest.mark.parametrize(
    ("versions", "version", "source", "behind"),
    [
        ((3, 3, 3), 3, 0, ()),
        ((2, 3, 3), 3, 1, (0,)),
        ((FRESH, 5, FRESH), 5, 1, (0, 2)),
        ((FRESH, FRESH), FRESH, 0, (1,)),
        ((0, FRESH), 0, 0, (1,)),
        ((3, 3.5, 3), 3.5, 1, (0, 2)),
    ],
)
def test_source_and_behind(
    versions: tuple[float, ...], version: float, source: int, behind: tuple[int, ...]
) -> None:
    made = plan(*versions)
    assert (made.version, made.source, made.behind) == (version, source, behind)
