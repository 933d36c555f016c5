"""Reports of jobs and versions, as an issue needs them."""

from __future__ import annotations

import json
import zipfile

import pytest

import nbelastic
from nbelastic.driver.job import Job
from nbelastic.driver.options import Options
from nbelastic.driver.thread import Driver


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


def test_a_report_of_a_failed_job_has_its_error(tmp_path):
    job = job_with()
    job._driver.future.set_exception(ValueError("no such label"))
    assert "ValueError: no such label" in texts(job.save_report(tmp_path / "r.zip"))["error.txt"]


def test_a_report_has_no_passwords_of_urls(tmp_path):
    job = job_with(checkpoint="ftp://me:hunter22@host/run?token=abcdef99")
    job._driver.log.note_output(0, "writing to ftp://me:hunter22@host/run\n")
    found = texts(job.save_report(tmp_path / "r.zip"))
    assert "hunter22" not in str(found) and "abcdef99" not in str(found)
    assert "ftp://" in found["options.json"]


def test_a_report_has_no_values_of_variables(tmp_path):
    values = {"HF_TOKEN": "hunter22", "NCCL_DEBUG": "INFO", "OTHER": "abcdef99"}
    job = job_with(env=values)
    job._driver.log.note_output(0, "INFO logging in with hunter22\n")
    job._driver.future.set_exception(ValueError("401 for hunter22"))
    found = texts(job.save_report(tmp_path / "r.zip"))
    assert json.loads(found["options.json"])["env"] == dict.fromkeys(values, "***")
    assert "hunter22" not in str(found) and "abcdef99" not in str(found)
    assert "INFO" in found["output.txt"]


def test_output_that_is_no_utf8_is_reported(tmp_path):
    job = job_with()
    job._driver.log.note_output(0, "a\udc80b\n")
    assert "a\\udc80b" in texts(job.save_report(tmp_path / "r.zip"))["output.txt"]


def test_a_report_goes_only_where_a_file_can_be_written(tmp_path):
    with pytest.raises(FileNotFoundError):
        job_with().save_report(tmp_path / "nowhere" / "r.zip")


def test_versions_are_printed_with_the_use_of_shared_memory(capsys):
    nbelastic.show_versions()
    shown = capsys.readouterr().out
    assert f"nbelastic      {nbelastic.__version__}" in shown
    assert "shared memory" in shown and "torch" in shown
