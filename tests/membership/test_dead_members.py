"""Reports of ranks that a neighbour's process has ended, as the system says."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from nbelastic.messages import (
    FRESH,
    Abort,
    Limits,
    LossReason,
    Lost,
    Publish,
    RankDied,
    RankFormed,
    RankId,
    RankReady,
    Record,
    Slot,
    SlotGone,
    SlotsFound,
    StartRank,
)

from .invariants import Checked

if TYPE_CHECKING:
    from nbelastic.messages import Effect


def slot(name: str) -> Slot:
    return Slot(id=name, worker=f"tcp://{name}", name=name, host=name)


def ready(start: int, generation: int, *gone: int) -> RankReady:
    version = 0 if generation else FRESH
    return RankReady(start, generation, version, 1, ("", 0), failed=generation > 0, gone=gone)


@pytest.fixture
def three() -> Checked:
    """A generation of three ranks, which has formed."""
    machine = Checked(Limits(np=3, min_np=2))
    machine.handle(SlotsFound(tuple(map(slot, ("A0", "B0", "C0")))), 1.0, 0.5)
    for start in range(3):
        machine.handle(ready(start, 0), 2.0, 0.5)
    for start in range(3):
        machine.handle(RankFormed(start, 1), 3.0, 0.5)
    return machine


def records(effects: list[Effect]) -> list[tuple[str, int | None]]:
    return [(e.kind, e.rank) for e in effects if isinstance(e, Record)]


def test_the_others_go_on_before_the_scheduler_knows(three: Checked) -> None:
    effects = three.handle(ready(0, 1, 1), 4.0, 0.5)
    assert ("lost", 1) in records(effects)
    (abort,) = [effect for effect in effects if isinstance(effect, Abort)]
    assert abort.reason == Lost(RankId(1, 1, "tcp://B0"), LossReason.PROCESS_ENDED)
    effects = three.handle(ready(2, 1, 1), 4.1, 0.5)
    (publish,) = [effect for effect in effects if isinstance(effect, Publish)]
    assert [member.start for member in publish.plan.members] == [0, 2]
    three.replay()


def test_what_the_scheduler_says_later_changes_nothing(three: Checked) -> None:
    three.handle(ready(0, 1, 1), 4.0, 0.5)
    three.handle(ready(2, 1, 1), 4.1, 0.5)
    assert three.handle(SlotGone("B0", "its worker left the cluster"), 4.2, 0.5) == []
    three.replay()


def test_a_rank_is_started_there_once_the_worker_says_that_it_lives(three: Checked) -> None:
    effects = three.handle(ready(0, 1, 1), 4.0, 0.5)
    assert not any(isinstance(effect, StartRank) for effect in effects)
    assert records(three.handle(RankDied(1, "was killed"), 4.1, 0.5)) == [("died", 1)]
    effects = three.handle(SlotsFound((slot("B0"),)), 4.2, 0.5)
    assert [effect.slot.id for effect in effects if isinstance(effect, StartRank)] == ["B0"]
    three.replay()


def test_reports_of_oneself_or_of_a_ready_rank_are_ignored(three: Checked) -> None:
    three.handle(ready(0, 1, 0, 7), 4.0, 0.5)
    assert {rank.start for rank in three.machine.roster.ranks.values()} == {0, 1, 2}
    three.handle(replace(ready(1, 1), gone=(0,)), 4.1, 0.5)
    assert {rank.start for rank in three.machine.roster.ranks.values()} == {0, 1, 2}
