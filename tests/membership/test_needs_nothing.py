"""Messages that need no rules, in situations in which some action is due at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nbelastic.membership import Machine
from nbelastic.messages import (
    End,
    EndRank,
    Limits,
    LimitsChanged,
    Publish,
    RankFormed,
    RankReady,
    Record,
    Slot,
    SlotGone,
    SlotLeaving,
    SlotsFound,
    StartRank,
)

from .invariants import Checked

if TYPE_CHECKING:
    from nbelastic.messages import Effect, Event


def slot(name: str) -> Slot:
    return Slot(id=name, worker=f"tcp://{name}", name=name, host=name)


class Log(Checked):
    """A machine that is told one thing after the other, a millisecond apart."""

    now = 0.0

    def tell(self, *events: Event) -> list[Effect]:
        """Return what came of the last event."""
        effects: list[Effect] = []
        for event in events:
            self.now += 0.001
            effects = self.handle(event, self.now, 0.5)
        return effects

    def form(self, *names: str) -> None:
        """Begin with a rank on each slot, and form the first generation."""
        self.tell(SlotsFound(tuple(map(slot, names))))
        starts = range(len(names))
        self.tell(*(ready(start, left=0, loop=1) for start in starts))
        self.tell(*(RankFormed(start, 1) for start in starts))


def ready(start: int, *, left: int, loop: int, failed: bool = False) -> RankReady:
    return RankReady(start, left, -1, loop, ("", 0), failed=failed)


def test_a_shortage_is_noted_when_the_first_rank_has_left() -> None:
    log = Log(Limits(np=2, min_np=2))
    log.form("A0", "B0")
    log.tell(SlotLeaving("B0"))
    effects = log.tell(ready(0, left=1, loop=1))
    assert [effect.kind for effect in effects if isinstance(effect, Record)] == ["waiting"]
    log.replay()


def test_a_newcomer_left_behind_by_a_plan_ends_with_the_plan() -> None:
    log = Log(Limits(np=2, min_np=1))
    log.tell(SlotsFound((slot("A0"), slot("B0"))))
    assert any(isinstance(e, StartRank) for e in log.tell(SlotsFound((slot("C0"),))))
    log.tell(ready(0, left=0, loop=0))
    effects = log.tell(ready(1, left=0, loop=0))
    assert any(isinstance(effect, Publish) for effect in effects)
    assert [effect.start for effect in effects if isinstance(effect, EndRank)] == [2]
    assert not log.tell(RankFormed(0, 1))
    log.replay()


def test_a_surplus_rank_before_a_commit_ends_with_the_plan() -> None:
    log = Log(Limits(np=4, min_np=1))
    log.form("A0", "B0", "C0", "D0")
    log.tell(SlotGone("D0"), LimitsChanged(min_np=None, max_np=2))
    assert not log.tell(ready(0, left=1, loop=1, failed=True))
    assert not log.tell(ready(1, left=1, loop=1, failed=True))
    effects = log.tell(ready(2, left=1, loop=1, failed=True))
    assert any(isinstance(effect, Publish) for effect in effects)
    assert [effect.start for effect in effects if isinstance(effect, EndRank)] == [2]
    log.replay()


def test_what_is_due_at_the_very_moment_of_a_message_is_done() -> None:
    machine = Machine(Limits(np=3, min_np=3, elastic_timeout=1.0))
    machine.handle(SlotsFound((slot("A0"),)), 1.0)
    effects = machine.handle(SlotsFound((slot("B0"),)), 2.0)  # without a question for the deadline
    assert any(isinstance(effect, End) for effect in effects)
