"""Jobs whose ranks never exchanged anything end with a warning."""

from __future__ import annotations

import pytest

from nbelastic.membership import rules
from nbelastic.membership.roster import Roster
from nbelastic.messages import (
    Limits,
    NeverMet,
    RankReturned,
    Record,
    Slot,
    SlotsFound,
    StartRank,
    Tick,
)

from .invariants import Checked


def never_met(starts, isolated) -> NeverMet | None:
    return rules.never_met(Roster(Limits(), expected=starts, isolated=isolated))


@pytest.mark.parametrize(
    ("starts", "isolated"),
    [
        ([0], {0: ()}),
        ([], {}),
        ([0, 1], {}),
        ([0, 1], {0: ("Lightning",)}),
        ([1, 2], {0: (), 1: ()}),
    ],
)
def test_ranks_that_met_or_a_single_one_are_not_warned_of(starts, isolated) -> None:
    assert never_met(starts, isolated) is None


def test_the_warning_has_the_number_of_trainings_and_libraries() -> None:
    isolated = {4: ("Lightning",), 7: ("Lightning", "accelerate"), 9: (), 1: ()}
    assert never_met([4, 7, 9], isolated) == NeverMet(3, ("Lightning", "accelerate"))


@pytest.mark.parametrize(("np", "apart", "warned"), [(2, (), 1), (2, None, 0), (1, (), 0)])
def test_a_job_says_so_as_it_ends(np, apart, warned) -> None:
    machine = Checked(Limits(np=np))
    slots = tuple(Slot(id=n, worker=f"tcp://{n}", name=n, host=n) for n in "ab"[:np])
    effects = machine.handle(SlotsFound(slots), 0.0, 0.5)
    starts = [each.start for each in effects if isinstance(each, StartRank)]
    effects = []
    for now, start in enumerate(starts, 1):
        effects += machine.handle(RankReturned(start, isolated=apart), float(now), 0.5)
    effects += machine.handle(Tick(), 10.0, 0.5)
    kinds = [each.kind for each in effects if isinstance(each, Record)]
    assert kinds.count("warning") == warned
    assert kinds[-1] == "finished"
