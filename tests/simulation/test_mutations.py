"""A bug that is put in on purpose must be found: else the simulation sees nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from nbelastic.cluster import JobClient
from nbelastic.cluster.scheduler.job import ScheduledJob
from nbelastic.cluster.scheduler.plugin import ElasticPlugin
from nbelastic.driver.thread import Driver
from nbelastic.elastic import loop as elastic_loop
from nbelastic.elastic.ranks.session import Session
from nbelastic.elastic.sampler import ShardSampler
from nbelastic.elastic.state import ObjectState
from nbelastic.membership import Machine, Phase, Stage, failure_policy, rules
from nbelastic.membership.roster import Roster

from .world import simulate

MOST = 300  # schedules within which each bug must be found

Patch = tuple[Any, str, "Callable[[Any], Any]", int]

MUTATIONS: dict[str, Patch] = {}
"""By name: what is replaced, a function from the original to what it becomes, and the seed of the
schedule that showed it last."""


def _mutation(target: Any, attribute: str, seed: int) -> Callable[[Any], Any]:
    """Decorate what is called instead, with the original as the first argument."""

    def add(instead: Any) -> Any:
        name = instead.__name__.strip("_").replace("_", " ")

        def make(original: Any) -> Any:
            return lambda *args, **kwargs: instead(original, *args, **kwargs)

        MUTATIONS[name] = (target, attribute, make, seed)
        return instead

    return add


@_mutation(Machine, "_on_rank_ready", seed=12)
def _ready_reports_of_older_generations_count(original: Any, self: Any, event: Any) -> None:
    original(self, msgspec.structs.replace(event, left=self.roster.generation))


@_mutation(Machine, "_evict", seed=13)
def _a_rank_that_was_evicted_may_come_back(
    original: Any, self: Any, ranks: Any, *more: Any
) -> None:
    original(self, ranks, *more)
    for rank in ranks:
        rank.stage, rank.since = Stage.STARTING, self._now
        self.roster.ranks[rank.start] = rank


@_mutation(Machine, "_note_finish", seed=0)
def _the_loop_is_over_for_all_when_it_is_for_one(original: Any, self: Any) -> None:
    if self.roster.in_stage(Stage.DONE):
        for rank in self.roster.in_stage(Stage.MEMBER):
            rank.stage = Stage.DONE
    original(self)


@_mutation(Roster, "note_version", seed=23)
def _versions_may_go_back(_: Any, self: Any, rank: Any, version: int) -> None:
    rank.version = version


@_mutation(rules, "free_slots", seed=21)
def _a_slot_may_be_given_to_two_ranks(_: Any, roster: Any) -> list[Any]:
    slots = roster.slots.values()
    return [s for s in slots if s.id not in roster.departing and not roster.excluded(s)]


@_mutation(Machine, "_gather", seed=37)
def _a_plan_does_not_wait_for_members_to_let_go(original: Any, self: Any) -> None:
    if self.roster.phase == Phase.GATHERING and self.roster.in_stage(Stage.READY):
        for rank in self.roster.awaited():
            rank.stage = Stage.STARTING
    original(self)


@_mutation(ScheduledJob, "step", seed=6)
def _a_step_of_the_journal_may_be_missing(original: Any, self: Any, step: Any) -> bool:
    if step.number % 7 == 0:
        self.steps = step.number
        return True
    return bool(original(self, step))


@_mutation(Session, "_ask_all", seed=151)
def _each_rank_leaves_when_it_has_heard(_: Any, self: Any) -> Any:
    return self.change_flag()


@_mutation(elastic_loop, "_leave", seed=209)
def _leaving_saves_without_a_new_version(_: Any, session: Any, state: Any) -> None:
    state.leave()
    state.save()


@_mutation(JobClient, "attach", seed=3)
def _a_driver_that_was_away_keeps_its_epoch(original: Any, self: Any) -> Any:
    before = self.epoch
    packed = original(self)
    self.epoch = before or self.epoch
    return packed


@_mutation(ShardSampler, "progress", seed=122)
def _samples_are_dealt_without_settling_what_was_done(original: Any, self: Any) -> Any:
    return original(self)._replace(done=self._deal.done)


MUTATIONS["one commit more is progress"] = (failure_policy, "REPEATED_COMMITS", lambda _: 0, 223)

DO_NOTHING: dict[str, tuple[Any, str, int]] = {
    "nobody watches for stalls": (Machine, "_check_for_stalls", 122),
    "workers that are to leave are planned": (Machine, "_on_slot_leaving", 2),
    "newcomers get no state": (ObjectState, "align", 21),
    "a failed step is not rolled back": (ObjectState, "restore", 35),
    "slots are never given back": (ElasticPlugin, "_ended", 0),
    "a driver that was away goes on as before": (Driver, "_attach_again", 51),
    "samples that were not committed stay done": (ShardSampler, "go_back", 168),
    "a rank whose loop has ended is waited for": (rules, "waits_for_finished", 58),
}
"""Functions that do nothing any more, with the seeds that have shown it."""

for name, (target, attribute, seed) in DO_NOTHING.items():
    MUTATIONS[name] = (target, attribute, lambda _: lambda *_args, **_kwargs: None, seed)

SHOWN_BY_PLANNED_CHANGES = {"each rank leaves when it has heard"}
"""Those that only a schedule shows in which nothing should be rolled back."""


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_broken_invariant_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target, attribute, make, last = MUTATIONS[name]
    planned = name in SHOWN_BY_PLANNED_CHANGES
    for seed in (last, *range(MOST)):
        with monkeypatch.context() as patch:
            patch.setattr(target, attribute, make(getattr(target, attribute)))
            problem = _problem(seed, planned)
        if problem and not _problem(seed, planned):  # without the bug, nothing is wrong there
            print(f"found with seed {seed}: {problem}")
            return
    pytest.fail(f"{MOST} schedules did not show that {name}")


def _problem(seed: int, planned: bool) -> str:
    try:
        simulate(seed, planned=planned)
    except Exception as error:  # however it shows
        return f"{type(error).__name__}: {error}"
    return ""
