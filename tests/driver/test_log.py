"""What ranks print; versions; details and decisions in words."""

from __future__ import annotations

import pytest

import nbelastic
from nbelastic.driver.job import Job
from nbelastic.driver.kernel_log import KernelLog, detail_of
from nbelastic.driver.options import Options
from nbelastic.driver.thread import Driver
from nbelastic.driver.why import MOST, explain
from nbelastic.errors import OptionError
from nbelastic.messages import CodeLine, LogContents, Record
from nbelastic.status import HistoryEvent, Output
from tests.membership.test_reasons import GONE, RAISED, STALLED

LINE = "x" * 999 + "\n"


@pytest.fixture
def kept(monkeypatch):
    monkeypatch.setenv("NBELASTIC_LOG_BYTES", "100 kB")


def print_lines(log, count, start=0):
    for number in range(count):
        log.note_output(start, f"{number:06d}{LINE}")


def test_the_newest_output_is_kept_and_the_rest_is_told_of(kept):
    job = job_with()
    print_lines(job._driver.log, 500)
    text = job.logs()
    assert 60_000 < len(text) < 100_500
    assert text.endswith(f"000499{LINE}")
    assert "only the last 100,000 bytes of what ranks printed are in memory" in text
    assert "NBELASTIC_LOG_BYTES" in text
    warnings = [event for event in job.history if event.kind == "warning"]
    assert len(warnings) == 1 and "in memory" in warnings[0].detail


def test_a_reader_gets_each_kept_piece_once(kept):
    log = KernelLog()
    print_lines(log, 10)
    cursor, pieces = log.printed.since(0)
    assert [piece.text[:6] for piece in pieces] == [f"{n:06d}" for n in range(10)]
    assert log.printed.since(cursor) == (cursor, ())
    assert log.printed.last(None, 1_500) == pieces[8].text + pieces[9].text
    print_lines(log, 500)
    cursor, pieces = log.printed.since(cursor)
    assert 50 < len(pieces) < 100 and pieces[-1].text.startswith("000499")
    log.note_output(0, "more")
    cursor, (piece,) = log.printed.since(cursor)
    assert piece.text == "more"
    log.note_output(0, "x" * 200_000)  # one beyond the limit
    assert log.printed.since(cursor) == (cursor + 1, ())


@pytest.mark.parametrize("value", ["much", "-1", "1e400"])
def test_a_wrong_limit_is_refused(monkeypatch, value):
    monkeypatch.setenv("NBELASTIC_LOG_BYTES", value)
    with pytest.raises(OptionError, match=r"NBELASTIC_LOG_BYTES='.*': must be a number of bytes"):
        KernelLog()


def test_a_driver_that_is_back_has_the_schedulers_log():
    log = KernelLog()
    log.note_output(0, "one\n")
    log.note(Record("joined"))
    log.adopt(0.0, LogContents({}, {}, (), {}, (Output(0, None, "one\n"),), ()))
    assert log.history() == (), "it is the scheduler's"
    log.note_output(0, "two\n")
    assert [piece.text for piece in log.printed.since(0)[1]] == ["one\n", "two\n"]


def job_with(**options):
    return Job(Driver("digits", Options(**options), lambda: None))


def test_the_versions_of_a_report_are_printed(capsys):
    nbelastic.show_versions()
    shown = capsys.readouterr().out
    assert f"nbelastic      {nbelastic.__version__}\n" in shown and "\nshared memory  " in shown


# -- details and decisions in words --------------------------


PHASES = {"noticed": 0.0, "stepped": 7.5, "batches": 0.0, "samples": 0.0}
CELL, FILE = CodeLine("In [3]", 4, "f"), CodeLine("a.py", 9, "g")


@pytest.mark.parametrize(
    ("record", "words"),
    [
        (Record("lost", reason=GONE, line=CELL), "its worker left the cluster"),
        (Record("lost", reason=STALLED, line=CELL),
         "held up the others for 20 s (stall_timeout); it was executing In [3], line 4, in f"),
        (Record("lost", reason=RAISED, line=CELL), "ValueError: x; raised at a.py, line 9, in g"),
        (Record("phases", figures=PHASES), "noticed 0.0, stepped 7.5 ms"),
        (Record("phases", figures={"stepped": 7.5, "batches": 1.0}),
         "stepped 7.5 ms; 1 batch redone"),
        (Record("phases", figures={"stepped": 7.5, "batches": 3.0, "samples": 1200.0}),
         "stepped 7.5 ms; 3 batches of 1,200 samples redone"),
        (Record("joined", detail="soon"), "soon"),
    ],
)  # fmt: skip
def test_the_history_names_lines_and_figures_and_no_rank(record: Record, words: str) -> None:
    assert detail_of(record, FILE if record.reason is RAISED else None) == words


LOST = HistoryEvent(
    0.0, "lost", "tcp://w3", 3, 4, "held up the others for 60 s", 3, "w3", {}, "the clock: a limit"
)


def test_a_decision_says_what_was_seen_and_of_many_the_newest_are_shown():
    other = HistoryEvent(1.0, "left", "tcp://w1", 1, 5, "as planned", 2, "w1")
    text = str(explain("job", [LOST, other], rank=3))
    assert "lost rank 3 on w3: held up the others for 60 s (generation 4)\n" in text
    assert "\n    seen by the clock: a limit" in text
    assert "w1" not in text
    assert "as planned" in explain("job", [LOST, other])
    assert "phases" not in explain("job", [HistoryEvent(0.0, "phases", None, None, 1, "x"), LOST])
    assert repr(explain("job", [LOST])) == str(explain("job", [LOST]))
    events = [HistoryEvent(0.0, "reset", None, None, n, f"change {n}") for n in range(3 * MOST)]
    assert explain("job", events).count("change ") == MOST
    assert f"change {3 * MOST - 1}" in explain("job", events)
    assert explain("job", [], rank=1) == "rank 1 of job 'job': nothing was decided so far"
