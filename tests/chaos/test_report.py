"""What a plan has cost, worked out from made-up histories; no cluster."""

import itertools
from unittest.mock import Mock

import pytest

from nbelastic import HistoryEvent, chaos
from nbelastic.chaos.fault_plan import FaultPlan
from nbelastic.chaos.report import with_recovery
from nbelastic.errors import OptionError


def event(time, kind, worker=None):
    return HistoryEvent(time, kind, worker, None, 1, "")


def hit(time, kind="kill", worker="a"):
    return chaos.FaultOutcome(kind, 1, worker, time)


@pytest.mark.parametrize(
    ("hits", "history", "recoveries"),
    [
        pytest.param(
            [hit(10.0)],
            [event(1.0, "formed"), event(10.1, "formed"), event(10.2, "lost", "a"),
             event(10.5, "formed"), event(11.0, "formed")],
            [0.5],
            id="a newcomer's generation may still have the rank that is about to be lost",
        ),
        pytest.param(
            [hit(10.0)], [event(9.99, "lost", "a"), event(10.1, "formed")], [0.1],
            id="a loss may be known before the word of its fault",
        ),
        pytest.param(
            [hit(10.0, "stop"), hit(11.0, "slow", "b")],
            [event(1.0, "formed"), event(12.0, "lost", "b"), event(12.5, "formed")],
            [None, None],
            id="who was not lost by its fault need not recover",
        ),
        pytest.param(
            [hit(10.0, "stop"), hit(20.0)],
            [event(20.1, "lost", "a"), event(20.5, "formed")],
            [None, 0.5],
            id="a loss belongs to the newest fault on that worker",
        ),
        pytest.param(
            [hit(10.0, "partition")], [event(9.98, "formed"), event(10.3, "formed")], [0.3],
            id="cut connections have recovered when the same ranks have formed anew",
        ),
    ],
)  # fmt: skip
def test_recovery_lasts_until_a_generation_without_the_lost_rank(hits, history, recoveries):
    found = [outcome.recovery for outcome in with_recovery(hits, history)]
    assert found == [each and pytest.approx(each) for each in recoveries]


def test_a_report_has_a_line_for_each_kind():
    kills = [chaos.FaultOutcome("kill", 1, "a", 1.0, recovery=span) for span in (0.25, None, 1.5)]
    skipped = chaos.FaultOutcome("hang", 9, "", 0.0, problem="there are <4> ranks")
    made = chaos.Report((*kills, chaos.FaultOutcome("slow", 0, "b", 2.0), skipped), 3, 0)
    assert str(made).splitlines() == [
        "kill: 3 injected, 2 resets, the longest took 1.50 s",
        "slow: 1 injected, 0 resets",
        "redone: 3 steps; started over: 0 times",
        "not done: hang of rank 9: there are <4> ranks",
    ]


def test_one_seed_is_one_plan():
    def first(seed):
        return list(itertools.islice(chaos.random(seed, every=5).draws(), 300))

    assert first(1) == first(1) != first(2)
    draws = first(3)
    waits, places, faults = zip(*draws, strict=True)
    assert {fault.kind for fault in faults} == set(chaos.KINDS)
    assert sum(waits) / len(waits) == pytest.approx(5, rel=0.25)
    assert 0 in waits  # several at once
    assert 0 <= min(places) < 0.1 and 0.9 < max(places) < 1


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda: chaos.kill(rank=-1), "rank=-1: must not be negative"),
        (lambda: chaos.kill(rank=1.5), "rank=1.5: must be a whole number"),
        (lambda: chaos.kill(rank=1, step=3, after=2.0), "exclude each other"),
        (lambda: chaos.hang(rank=1, forming=True), "happens in the training function"),
        (lambda: chaos.random(1, every=0), "every=0: must be above 0"),
        (lambda: chaos.random(1, every=1, kinds=("flood",)), "must be some of"),
    ],
)
def test_faults_that_cannot_be_meant_are_refused(make, complaint):
    with pytest.raises(OptionError, match=complaint):
        make()


def test_a_random_fault_is_for_the_process_that_was_drawn():
    driver = Mock()
    ranks = [Mock(rank=n, start=10 + n, state="running", commits=1) for n in range(4)]
    driver.view.return_value = Mock(ranks=ranks, commits=1, state="running")
    plan = FaultPlan(Mock(_driver=driver), (chaos.random(7, 1e-9, ("crash",)),))
    for numbers in 2 * ((0, 1, 2, 3), (3, 0, 1, 2), (2, 3, 0, 1)):  # of other processes
        for each, number in zip(ranks, numbers, strict=True):
            each.rank = number
        plan._look()
    orders = driver.job_client.inject.call_args_list
    reached = [fault.number for order in orders for fault in order.args[1]]
    assert len(reached) == len({*reached}) == 3, "each for one process, and one stays well"
