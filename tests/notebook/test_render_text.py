from __future__ import annotations

import dataclasses

import pytest

from nbelastic.driver.status import DataStatus, Progress
from nbelastic.render import JobSnapshot, line, text
from nbelastic.render.formatting import count, duration, limits, number, rate, some_lines

from .fakes import STARTED, event, job_status, rank_status


def test_a_finished_job_is_told_by_its_counts():
    status = job_status(state="finished", size=4, resets=2, commits=120)
    assert text(JobSnapshot(status)) == (
        "nbelastic job quickstart: finished · 4 ranks · 2 resets · 120 commits"
    )


def test_a_warning_is_in_the_line_by_its_first_line():
    status = job_status(state="finished", warnings=("ranks never met: 2 trainings\nbecause",))
    assert text(JobSnapshot(status)).endswith("· warning: ranks never met: 2 trainings")
    running = line(JobSnapshot(job_status(warnings=status.warnings)))
    assert running.endswith("· warning: ranks never met: 2 trainings")


def test_the_rows_of_a_finished_job_are_in_the_line():
    data = (DataStatus("Parquet", 1, 960, 0, 1920, 48, 0),)
    assert text(JobSnapshot(job_status(state="finished", data=data))).endswith(
        "120 commits · 1,920 rows once, 48 redone, 0 lost"
    )
    assert "rows" not in text(JobSnapshot(job_status(data=data)))


def test_one_of_something_is_not_plural():
    status = job_status(state="finished", size=1, resets=1, commits=1)
    assert text(JobSnapshot(status)).endswith("1 rank · 1 reset · 1 commit")


@pytest.mark.parametrize("state", ["waiting", "forming", "running", "failed", "stopped"])
def test_what_depends_on_the_moment_is_not_in_the_text(state):
    first = JobSnapshot(job_status(state=state), (event("lost", 3, size=3),), STARTED)
    later = dataclasses.replace(
        job_status(state=state),
        size=3, commits=7, resets=9, generation=11, elapsed=99.5, samples_per_s=3.0,
        reason="waiting 17 s for tcp://10.0.0.3:40122", ranks=(rank_status(7),),
    )  # fmt: skip
    assert text(first) == text(JobSnapshot(later, (), STARTED + 5))


def test_the_text_is_the_same_in_every_state_of_a_live_job():
    said = {
        text(JobSnapshot(job_status(state=state))) for state in ("waiting", "forming", "running")
    }
    assert said == {"nbelastic job quickstart: under way · 2 to 8 ranks"}


def test_the_text_is_one_line_whatever_the_name():
    assert "\n" not in text(JobSnapshot(job_status(name="a\nb" * 100)))
    assert len(text(JobSnapshot(job_status(name="a" * 1000)))) < 200


def test_a_terminal_is_told_how_far_the_job_has_come():
    status = job_status(progress=Progress(1, 4, 0, 0, remaining_s=75.0))
    said = line(JobSnapshot(status))
    assert said == (
        "quickstart: running · 4 ranks · 120 commits · 25% · 1,000 samples/s · 1:15 left"
    )


@pytest.mark.parametrize(
    ("backend", "said"),
    [
        ("shm", "4 ranks over shared memory ·"),
        ("gloo", "4 ranks over Gloo ·"),
        ("hierarchical", "4 ranks over shared memory and Gloo ·"),
        ("solo", "4 ranks ·"),
        ("", "4 ranks ·"),
    ],
)
def test_a_terminal_is_told_what_tensors_travel_over(backend, said):
    assert said in line(JobSnapshot(job_status(backend=backend)))


def test_the_text_does_not_depend_on_the_backend():
    status = job_status(state="finished")
    assert text(JobSnapshot(status)) == text(
        JobSnapshot(dataclasses.replace(status, backend="shm"))
    )


def test_a_terminal_is_told_what_a_job_waits_for():
    said = line(JobSnapshot(job_status(state="waiting", reason="1 worker there; 1 more needed")))
    assert "waiting (1 worker there; 1 more needed)" in said


def test_numbers_read_well():
    assert [duration(s) for s in (0, 42.9, 725, 3723)] == ["0:00", "0:42", "12:05", "1:02:03"]
    assert [rate(v) for v in (None, float("nan"), 0.123, 1234.5)] == ["–", "–", "0.12", "1,234"]
    assert [number(v) for v in (0.123456, 12345.6, 1e12)] == ["0.1235", "12,346", "1e+12"]
    assert [limits(*x) for x in ((4, 4), (2, 8), (1, None))] == ["4", "2 to 8", "1 or more"]
    assert count(2, "rank lost") == "2 ranks lost"
    assert some_lines("a\nb\nc\nd", 3) == "a\nb\n… 1 more lines\nd"
