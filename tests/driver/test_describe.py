"""Details and decisions of a job in words, and the jobs of a cluster as a table."""

from __future__ import annotations

import pytest

from nbelastic.cluster.journal import JournalFile
from nbelastic.driver import JobInfo
from nbelastic.driver.kernel_log import history_detail, reset_detail, straggler_detail
from nbelastic.driver.status import HistoryEvent, JobTable
from nbelastic.driver.why import MOST, explain, explain_journal
from nbelastic.errors import OptionError
from nbelastic.membership import Machine
from nbelastic.messages import Limits, Slot, SlotsFound, SlotSilent
from tests.membership.test_reasons import GONE, RAISED, STALLED


def test_the_history_names_lines_and_no_rank() -> None:
    lines = {"executing": "In [3], line 4, in train", "raised": "In [3], line 9, in train"}
    assert history_detail(GONE) == "its worker left the cluster"
    assert history_detail(STALLED, executing=lines["executing"]) == (
        "held up the others for 20 s (stall_timeout); it was executing In [3], line 4, in train"
    )
    assert history_detail(RAISED, **lines) == "ValueError: x; raised at In [3], line 9, in train"
    assert history_detail(None) == ""


@pytest.mark.parametrize(
    ("redone", "words"),
    [
        ((0, 0), "noticed 0.0, stepped 7.5 ms"),
        ((1, 0), "noticed 0.0, stepped 7.5 ms; 1 batch redone"),
        ((3, 1200), "noticed 0.0, stepped 7.5 ms; 3 batches of 1,200 samples redone"),
    ],
)
def test_a_reset_has_its_phases_and_the_repeated_work(redone: tuple[int, int], words: str) -> None:
    counts = dict(zip(("batches", "samples"), map(float, redone), strict=True))
    assert reset_detail({"noticed": 0.0, "stepped": 7.5, **counts}) == words


def test_a_straggler_has_its_figures() -> None:
    figures = {"times": 3.04, "micro_batches": 1.0, "before": 4.0, "of": 16.0}
    assert straggler_detail(figures) == (
        "takes 3.0 times as long for a micro-batch as the others; computes 1 of 16 now, 4 before"
    )


JOBS = JobTable(
    [
        JobInfo("resnet", "running", 3, 1200, 0.0, True, 5, 2.0, 2, 8, 3, 3),
        JobInfo("<bert>", "waiting", 0, 0, 0.0, False),
    ]
)


def test_jobs_are_a_tuple_shown_as_a_table() -> None:
    assert [job.name for job in JOBS] == ["resnet", "<bert>"]
    assert repr(JOBS).splitlines() == [
        "name    state    priority  weight  np        slots  share  commits  kernel",
        "resnet  running  5         2       2 to 8    3      3      1,200    yes",
        "<bert>  waiting  0         1       1 to all  0             0        no",
    ]
    assert repr(JobTable()) == "no jobs"
    html = JOBS._repr_html_()
    assert "&lt;bert&gt;" in html
    assert html.count("<tr>") == 3


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
