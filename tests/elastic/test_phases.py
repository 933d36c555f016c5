"""Where the time of a change goes."""

from __future__ import annotations

import re

from nbelastic.elastic.phases import Phases


def names(words: str) -> list[str]:
    assert re.fullmatch(r"(\w+ \d+\.\d, )*\w+ \d+\.\d ms", words)
    return re.findall(r"([a-z]+) ", words)


def test_phases_are_told_in_their_order_from_the_moment_a_change_is_noticed() -> None:
    phases = Phases()
    phases.note("ready")  # the first generation is no change
    assert not phases.under_way
    phases.begin()
    phases.begin()
    for phase in ("aborted", "ready", "planned"):
        phases.note(phase)
    words = phases.end()
    assert words.startswith("noticed 0.0, ")
    assert names(words) == ["noticed", "aborted", "ready", "planned", "stepped"]
    assert not phases.under_way


def test_of_changes_that_run_together_the_last_counts() -> None:
    phases = Phases()
    phases.begin()
    for phase in ("ready", "planned", "ready", "planned", "connected"):
        phases.note(phase)
    assert names(phases.end()) == ["noticed", "ready", "planned", "connected", "stepped"]
