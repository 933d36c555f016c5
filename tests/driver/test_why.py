"""What was decided on a job or a rank, in words."""

from __future__ import annotations

import pytest

from nbelastic.cluster.journal import JournalFile
from nbelastic.driver.records.why import MOST, explain, explain_journal
from nbelastic.driver.status import HistoryEvent
from nbelastic.errors import OptionError
from nbelastic.membership import Machine
from nbelastic.messages import Limits, Slot, SlotsFound, SlotSilent

LOST = HistoryEvent(
    0.0, "lost", "tcp://w3", 3, 4, "held up the others for 60 s", 3, "w3", {}, "the clock: a limit"
)


def test_a_decision_says_what_was_seen_by_which_process_and_the_rule():
    other = HistoryEvent(1.0, "left", "tcp://w1", 1, 5, "as planned", 2, "w1")
    text = str(explain("job", [LOST, other], rank=3))
    assert "lost rank 3 on w3, in generation 4" in text
    assert "held up the others for 60 s" in text
    assert "seen by the clock: a limit" in text
    assert "longer than its limit, is dropped" in text
    assert "w1" not in text
    assert "as planned" in explain("job", [LOST, other])
    assert repr(explain("job", [LOST])) == str(explain("job", [LOST]))


def test_of_many_decisions_the_newest_are_shown_and_of_none_that_is_said():
    events = [HistoryEvent(0.0, "reset", None, None, n, f"change {n}") for n in range(3 * MOST)]
    text = explain("job", events)
    assert text.count("change ") == MOST
    assert f"change {3 * MOST - 1}" in text
    assert explain("job", [], rank=1) == "rank 1 of job 'job': nothing was decided so far"


def test_a_journal_is_explained_with_its_own_times(tmp_path):
    machine = Machine(Limits())
    path = tmp_path / "job.jsonl"
    journal = JournalFile(path, "job", machine)
    slot = Slot("s0", "tcp://w0", "w0", "host")
    for now, event in ((1.0, SlotsFound((slot,))), (20.0, SlotSilent("s0", seconds=10.0))):
        journal.write(event, now, 0.5, machine.handle(event, now, 0.5), machine)
    journal.close()
    text = explain_journal(path)
    assert "its worker has sent no heartbeat for 10 s" in text
    assert "seen by the scheduler: slot silent" in text
    with pytest.raises(OptionError, match="cannot be read"):
        explain_journal(tmp_path / "none.jsonl")
