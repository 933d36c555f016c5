"""Warnings of a job: ranks with different parameters, and ranks that never met."""

from __future__ import annotations

import pytest

from nbelastic import messages as ev
from nbelastic.membership import rules
from nbelastic.membership.roster import Roster
from nbelastic.membership.rules import compare, differ

from .ranks import Script
from .world import job, trained

VALUES = (1.0, -2.0, 0.0, 1e-9)
OTHERS = (1.1, -2.2, 0.3, 2e-9)


@pytest.mark.parametrize(
    ("others", "expected"),
    [
        (VALUES, False),
        (OTHERS, True),
        ((1.0 + 1e-8, -2.0 - 1e-8, 0.0, 1e-9), False),
        ((1.0, -2.0, 0.0, 2e-9), False),
        ((1.0, -2.0, 0.3, 2e-9), True),
        (VALUES[:3], True),
        ((1.0, -2.0, 1e-3, 1e-9), True),
        ((1.0, -2.0, 1e-7, 1e-9), False),
        ((1.001, -2.0, 0.0, 1e-9), False),
    ],
)
def test_samples_differ_if_more_than_a_few_values_do(others, expected):
    assert differ(VALUES, others) is differ(others, VALUES) is expected


def test_moments_and_generations_are_compared_each_by_itself():
    seen = {}
    for sample in (
        ev.WeightsSampled(0, 1, 1, VALUES),
        ev.WeightsSampled(0, 1, 10, OTHERS),
        ev.WeightsSampled(1, 1, 1, VALUES),
        ev.WeightsSampled(1, 1, 10, OTHERS),
        ev.WeightsSampled(1, 2, 1, OTHERS),
        ev.WeightsSampled(0, 2, 1, OTHERS),
    ):
        assert compare(seen, sample) is None
    assert compare(seen, ev.WeightsSampled(2, 2, 1, VALUES, ("SGD",))) == ev.WeightsDiffer(("SGD",))
    assert compare(seen, ev.WeightsSampled(2, 2, 1, VALUES)) == ev.WeightsDiffer(())
    assert compare(seen, ev.WeightsSampled(2, 2, 1, VALUES, besides=True)) is None, "another model"


def test_a_job_records_it_once_and_nothing_of_former_generations():
    world = trained(job("A0", "B0", "C0", np=3, min_np=2, script=Script(batches=400)), 5)
    for start, values in enumerate((VALUES, OTHERS, OTHERS)):
        world.tell(ev.WeightsSampled(start, 1, 1, values))
    world.tell(ev.WeightsSampled(1, 1, 0, VALUES))
    world.tell(ev.WeightsSampled(2, 1, 0, OTHERS))
    assert len(world.records("warning")) == 1
    assert world.of(ev.Record)[-1].kind == "warning"
    fresh = trained(job("A0", "B0", np=2, script=Script(batches=400)), 5)
    for generation in (0, 2):
        fresh.tell(ev.WeightsSampled(0, generation, 1, VALUES))
        fresh.tell(ev.WeightsSampled(1, generation, 1, OTHERS))
    fresh.tell(ev.WeightsSampled(7, 1, 1, VALUES))
    fresh.tell(ev.WeightsSampled(0, 1, 1, OTHERS))
    assert fresh.records("warning") == []


# -- ranks that never exchanged anything -----------------------------------------------------------


APART = {4: ("Lightning",), 7: ("Lightning", "accelerate"), 9: (), 1: ()}


@pytest.mark.parametrize(
    ("starts", "isolated", "warning"),
    [
        ([0], {0: ()}, None),
        ([], {}, None),
        ([0, 1], {}, None),
        ([0, 1], {0: ("Lightning",)}, None),
        ([1, 2], {0: (), 1: ()}, None),
        ([4, 7, 9], APART, ev.NeverMet(3, ("Lightning", "accelerate"))),
    ],
)
def test_ranks_that_never_met_are_warned_of_but_not_a_single_one(starts, isolated, warning) -> None:
    roster = Roster(ev.Limits(), expected=starts, isolated=isolated)
    assert rules.never_met(roster) == warning


@pytest.mark.parametrize(("np", "apart", "warned"), [(2, (), 1), (2, None, 0), (1, (), 0)])
def test_a_job_says_so_as_it_ends(np, apart, warned) -> None:
    world = job(*("A0", "B0")[:np], np=np)
    for start in range(np):
        world.tell(ev.RankReturned(start, isolated=apart))
    assert len(world.records("warning")) == warned
    assert world.of(ev.Record)[-1].kind == "finished"
