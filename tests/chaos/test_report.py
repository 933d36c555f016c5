"""What a plan has cost, worked out from made-up histories; no cluster."""

from __future__ import annotations

import itertools

import pytest

from nbelastic import HistoryEvent, chaos
from nbelastic.chaos.fault_plan import CommitRate
from nbelastic.chaos.report import with_recovery
from nbelastic.errors import OptionError


def event(time, kind, worker=None):
    return HistoryEvent(time, kind, worker, None, 1, "")


def hit(time, kind="kill", worker="a"):
    return chaos.FaultOutcome(kind, 1, worker, time)


def recoveries(injections, history):
    return [injection.recovery for injection in with_recovery(injections, history)]


def test_recovery_lasts_until_a_generation_without_the_lost_rank_has_formed():
    history = [
        event(1.0, "formed"),
        event(10.1, "formed"),  # a newcomer's, still with the rank that is about to be lost
        event(10.2, "lost", "a"),
        event(10.5, "formed"),
        event(11.0, "formed"),
    ]
    assert recoveries([hit(10.0)], history) == [pytest.approx(0.5)]


def test_a_loss_that_is_known_before_the_word_of_the_fault_counts():
    history = [event(9.99, "lost", "a"), event(10.1, "formed")]
    assert recoveries([hit(10.0)], history) == [pytest.approx(0.1)]


def test_who_was_not_lost_need_not_recover():
    history = [event(1.0, "formed"), event(12.0, "lost", "b"), event(12.5, "formed")]
    assert recoveries([hit(10.0, "stop"), hit(11.0, "slow", "b")], history) == [None, None]


def test_a_loss_belongs_to_the_newest_fault_on_that_worker():
    history = [event(20.1, "lost", "a"), event(20.5, "formed")]
    assert recoveries([hit(10.0, "stop"), hit(20.0)], history) == [None, pytest.approx(0.5)]


def test_cut_connections_have_recovered_when_the_same_ranks_have_formed_anew():
    history = [event(9.98, "formed"), event(10.3, "formed")]
    assert recoveries([hit(10.0, "partition")], history) == [pytest.approx(0.3)]


def report(*injections, **values):
    given = {
        "seconds": 60.0,
        "steps_redone": 3,
        "samples_redone": 96,
        "restarts": 0,
        "pace": 9.0,
        "undisturbed": 10.0,
        **values,
    }
    return chaos.Report(injections=tuple(injections), **given)


def test_a_report_has_a_row_for_each_kind_and_one_for_all():
    spans = [0.1 * number for number in range(1, 11)]
    kills = [chaos.FaultOutcome("kill", 1, "a", 1.0, recovery=span) for span in spans]
    skipped = chaos.FaultOutcome("hang", 9, "", 0.0, problem="there are 4 ranks")
    made = report(*kills, chaos.FaultOutcome("slow", 0, "b", 2.0), skipped)
    kill, slow, everything = made.rows
    assert (kill.kind, kill.injected, kill.resets) == ("kill", 10, 10)
    assert (kill.p50, kill.p99) == (pytest.approx(0.5), pytest.approx(1.0))
    assert (slow.injected, slow.resets, slow.p50) == (1, 0, None)
    assert everything.injected == 11
    assert made.goodput == pytest.approx(0.9)
    text = str(made)
    assert "500 ms" in text and "1.00 s" in text
    assert "goodput: 90%" in text
    assert "not done: hang of rank 9: there are 4 ranks" in text


def test_a_report_without_anything_to_compare_with_names_no_goodput():
    assert report(pace=None).goodput is None
    assert "goodput" not in str(report(undisturbed=None))


def test_a_report_is_escaped_in_a_notebook():
    made = report(chaos.FaultOutcome("kill", 1, "a", 0.0, problem="<script>"))
    assert "<script>" not in made._repr_html_()
    assert "&lt;script&gt;" in made._repr_html_()


def test_the_pace_is_measured_between_changes():
    tally = CommitRate()
    for number in range(1, 6):
        tally.note(float(number), 10 * number)
    tally.mark()
    for number in range(6, 11):
        tally.note(float(number), 45 + 5 * (number - 5))
    assert tally.before() == pytest.approx(10.0)
    assert tally.since(10.1) == pytest.approx(4.0)
    assert tally.since(15.0) == pytest.approx(2.0)  # there have been none for long
    assert tally.since(None) == pytest.approx(4.0)


def test_one_seed_is_one_plan():
    def first(seed):
        return list(itertools.islice(chaos.random(seed, every=5).draws(), 300))

    assert first(1) == first(1) != first(2)
    draws = first(3)
    assert {draw.kind for draw in draws} == set(chaos.KINDS)
    assert sum(draw.wait for draw in draws) / len(draws) == pytest.approx(5, rel=0.25)
    assert any(draw.wait == 0 for draw in draws)  # several at once


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
