"""What ranks print, bounded in memory and whole in files, and reports with the newest of it."""

from __future__ import annotations

import json
import zipfile

import pytest

import nbelastic
from nbelastic.driver.job import Job
from nbelastic.driver.kernel_log import KernelLog
from nbelastic.driver.options import Options
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


def test_a_reader_gets_each_kept_piece_once(kept):
    log = KernelLog()
    print_lines(log, 10)
    cursor, pieces = log.output(0)
    assert [piece.text[:6] for piece in pieces] == [f"{n:06d}" for n in range(10)]
    assert log.output(cursor) == (cursor, ())
    assert log._kept.last(None, 1_500) == pieces[8].text + pieces[9].text
    print_lines(log, 500)
    cursor, pieces = log.output(cursor)
    assert 50 < len(pieces) < 100 and pieces[-1].text.startswith("000499")
    log.note_output(0, "more")
    cursor, (piece,) = log.output(cursor)
    assert piece.text == "more"
    log.note_output(0, "x" * 200_000)  # one beyond the limit
    assert log.output(cursor) == (cursor + 1, ())


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


@pytest.mark.parametrize(
    ("variable", "value", "says"),
    [
        *(("NBELASTIC_LOG_BYTES", each, "a number of bytes") for each in ("much", "-1", "1e400")),
        ("NBELASTIC_LOG_DIR", __file__, "a directory"),
    ],
)
def test_a_wrong_variable_is_refused(monkeypatch, variable, value, says):
    monkeypatch.setenv(variable, value)
    with pytest.raises(OptionError, match=f"{variable}='.*': must be {says}"):
        KernelLog()


def job_with(**options):
    return Job(Driver("digits", Options(**options), lambda: None))


def texts(path):
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name).decode() for name in archive.namelist()}


def test_a_report_has_what_an_issue_needs(tmp_path):
    job = job_with(np=2)
    job._driver.log.note_output(0, "epoch 1\n")
    found = texts(job.save_report(tmp_path / "r.zip"))
    assert json.loads(found["options.json"])["np"] == 2
    assert json.loads(found["status.json"])["name"] == "digits"
    assert json.loads(found["versions.json"])["nbelastic"] == nbelastic.__version__
    assert "epoch 1" in found["output.txt"]
    assert isinstance(json.loads(found["history.json"]), list)
    assert "error.txt" not in found


def test_a_report_has_no_passwords_and_no_values_of_variables(tmp_path):
    values = {"HF_TOKEN": "hunter33", "NCCL_DEBUG": "INFO", "OTHER": "abcdef99"}
    job = job_with(env=values, checkpoint="ftp://me:hunter22@host/run?token=abcdef88")
    job._driver.log.note_output(0, "INFO logging in with hunter33\n")
    job._driver.log.note_output(0, "writing to ftp://me:hunter22@host/run, a\udc80b\n")
    job._driver.future.set_exception(ValueError("401 for hunter33"))
    found = texts(job.save_report(tmp_path / "r.zip"))
    options = json.loads(found["options.json"])
    assert options["env"] == dict.fromkeys(values, "***") and "ftp://" in options["checkpoint"]
    assert not any(each in str(found) for each in ("hunter", "abcdef"))
    assert "INFO" in found["output.txt"] and "a\\udc80b" in found["output.txt"]
    assert "ValueError: 401 for" in found["error.txt"]


def test_a_report_goes_only_where_a_file_can_be_written(tmp_path):
    with pytest.raises(FileNotFoundError):
        job_with().save_report(tmp_path / "nowhere" / "r.zip")


def test_versions_are_printed_with_the_use_of_shared_memory(capsys):
    nbelastic.show_versions()
    shown = capsys.readouterr().out
    assert f"nbelastic      {nbelastic.__version__}" in shown
    assert "shared memory" in shown and "torch" in shown
