"""What ranks print: bounded in memory, whole in files where a directory is named."""

from __future__ import annotations

import pytest

from nbelastic.driver.job import Job
from nbelastic.driver.options import Options
from nbelastic.driver.records import KernelLog
from nbelastic.driver.thread import Driver
from nbelastic.errors import OptionError
from nbelastic.messages import LogContents

LINE = "x" * 999 + "\n"


@pytest.fixture
def kept(monkeypatch):
    monkeypatch.setenv("NBELASTIC_LOG_BYTES", "100 kB")


def print_lines(log, count, start=0):
    for number in range(count):
        log.note_output(start, f"{number:06d}{LINE}")


def test_the_newest_output_is_kept_and_the_rest_is_told_of(kept):
    job = Job(Driver("digits", Options(), lambda: None))
    print_lines(job._driver.log, 500)
    text = job.logs()
    assert 60_000 < len(text) < 100_500
    assert text.endswith(f"000499{LINE}")
    assert "only the last 100,000 bytes of what ranks printed are in memory" in text
    assert "NBELASTIC_LOG_BYTES" in text and "NBELASTIC_LOG_DIR" in text
    warnings = [event for event in job.history if event.kind == "warning"]
    assert len(warnings) == 1 and "in memory" in warnings[0].detail


def test_all_that_is_printed_is_kept_below_the_limit():
    job = Job(Driver("digits", Options(), lambda: None))
    print_lines(job._driver.log, 500)
    assert len(job.logs().splitlines()) == 501
    assert not job.history


def test_a_reader_gets_each_kept_piece_once(kept):
    log = KernelLog()
    print_lines(log, 10)
    cursor, pieces = log.output(0)
    assert [piece.text[:6] for piece in pieces] == [f"{n:06d}" for n in range(10)]
    assert log.output(cursor) == (cursor, ())
    print_lines(log, 500)
    cursor, pieces = log.output(cursor)
    assert 50 < len(pieces) < 100 and pieces[-1].text.startswith("000499")
    log.note_output(0, "more")
    assert [piece.text for piece in log.output(cursor)[1]] == ["more"]


def test_one_piece_beyond_the_limit_is_dropped(kept):
    log = KernelLog()
    log.note_output(0, "x" * 200_000)
    assert log.output(0) == (1, ())
    assert "are in memory" in log.output_dropped()


def test_a_directory_gets_all_of_it(kept, monkeypatch, tmp_path):
    monkeypatch.setenv("NBELASTIC_LOG_DIR", str(tmp_path / "logs"))
    log = KernelLog("digits")
    print_lines(log, 300)
    log.note_output(1, "\udc80 ü\r\n")
    (place,) = (tmp_path / "logs").iterdir()
    assert place.name.startswith("digits-")
    assert (place / "start-0.log").read_text().splitlines()[299] == f"000299{LINE}"[:-1]
    assert (place / "start-1.log").read_bytes() == "\\udc80 ü\r\n".encode()
    assert f"all of it is in {place}" in log.output_dropped()


def test_a_driver_that_is_back_does_not_write_again(monkeypatch, tmp_path):
    monkeypatch.setenv("NBELASTIC_LOG_DIR", str(tmp_path))
    contents = LogContents({}, {}, (), {}, ((0, "one\n"),), ())
    first, other = KernelLog("digits"), KernelLog("other")
    first.note_output(0, "one\n")
    for log in (first, other):
        log.adopt(0.0, contents)
        log.note_output(0, "two\n")
    texts = [path.read_text() for path in sorted(tmp_path.glob("*/start-0.log"))]
    assert texts == ["one\ntwo\n", "one\ntwo\n"]


def test_a_file_that_cannot_be_written_is_told_of_once(monkeypatch, tmp_path):
    monkeypatch.setenv("NBELASTIC_LOG_DIR", str(tmp_path))
    log = KernelLog("digits")
    tmp_path.rmdir()
    tmp_path.touch()
    print_lines(log, 3)
    assert len(log.output(0)[1]) == 3
    assert len(log.warnings()) == 1
    assert "what ranks print cannot be written to" in log.warnings()[0]


@pytest.mark.parametrize("value", ["much", "-1", "0", "1e400"])
def test_a_wrong_limit_is_refused(monkeypatch, value):
    monkeypatch.setenv("NBELASTIC_LOG_BYTES", value)
    with pytest.raises(OptionError, match=r"NBELASTIC_LOG_BYTES='.*': must be a number of bytes"):
        KernelLog()


def test_a_directory_that_cannot_be_made_is_refused(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("NBELASTIC_LOG_DIR", str(tmp_path / "file"))
    with pytest.raises(OptionError, match=r"NBELASTIC_LOG_DIR=.*must be a directory"):
        KernelLog()
