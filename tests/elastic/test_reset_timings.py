"""Timings of a reset."""

from __future__ import annotations

from nbelastic.elastic.ranks.reset_timings import ResetTimings


def test_phases_are_in_their_order_from_the_notice_on() -> None:
    timings = ResetTimings()
    timings.mark("ready")  # the first generation is no change
    assert not timings.in_progress
    timings.begin()
    timings.begin()
    for phase in ("aborted", "ready", "planned"):
        timings.mark(phase)
    figures = timings.end()
    assert figures["noticed"] == 0.0
    assert list(figures) == ["noticed", "aborted", "ready", "planned", "stepped"]
    assert not timings.in_progress


def test_of_changes_that_run_together_the_last_counts() -> None:
    timings = ResetTimings()
    timings.begin()
    for phase in ("ready", "planned", "ready", "planned", "connected"):
        timings.mark(phase)
    assert list(timings.end()) == ["noticed", "ready", "planned", "connected", "stepped"]
