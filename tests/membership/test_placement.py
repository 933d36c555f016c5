"""Choice and order of the members of a plan."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nbelastic.membership.placement import arrange, choose, choose_released, places_of
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


@pytest.mark.parametrize(
    ("survivors", "newcomers", "order"),
    [
        ("", "A0 B0 A1", "A0 A1 B0"),
        ("A0 B0", "C0", "A0 B0 C0"),
        ("A0 B0", "C0 B1 A1", "A0 A1 B0 B1 C0"),
        ("B1 A0", "A1 B0", "B1 B0 A0 A1"),
        ("C0", "", "C0"),
        ("", "", ""),
    ],
)
def test_arrange(survivors: str, newcomers: str, order: str) -> None:
    assert line(arrange(candidates(survivors), candidates(newcomers))) == order


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


names = st.lists(
    st.builds("{}{}".format, st.sampled_from("ABCD"), st.integers(0, 9)), unique=True, max_size=12
)


@given(names, st.integers(0, 12))
def test_whatever_the_candidates(everyone: list[str], old: int) -> None:
    first = arrange([], candidates(" ".join(everyone[:old])))
    newcomers = candidates(" ".join(everyone[old:]))
    crew = arrange(first, newcomers)
    assert [candidate for candidate in crew if candidate in first] == first
    hosts = [host for host, _ in groupby(candidate.slot.host for candidate in crew)]
    assert len(hosts) == len(set(hosts))
    assert set(crew) == {*first, *newcomers}


@given(names.filter(bool))
def test_places_are_consistent(everyone: list[str]) -> None:
    slots = [candidate.slot for candidate in arrange([], candidates(" ".join(everyone)))]
    all_places = places_of(slots)
    assert [place.rank for place in all_places] == list(range(len(slots)))
    assert {place.size for place in all_places} == {len(slots)}
    for place in all_places:
        peers = [other for other in all_places if other.local_rank == place.local_rank]
        assert [peer.cross_rank for peer in peers] == list(range(place.cross_size))
        assert 0 <= place.local_rank < place.local_size


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
