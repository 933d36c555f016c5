import dataclasses

import pytest

from nbelastic.driver.status import DataStatus, Progress
from nbelastic.render import JobSnapshot, abbreviate, count, duration, line, number, text
from nbelastic.render.formatting import limits, rate, some_lines

from .fakes import STARTED, event, job_status, rank_status


@pytest.mark.parametrize(
    ("changes", "ends"),
    [
        ({}, "nbelastic job quickstart: finished · 4 ranks · 2 resets · 120 commits"),
        ({"size": 1, "resets": 1, "commits": 1}, "1 rank · 1 reset · 1 commit"),
        (
            {"data": (DataStatus("Parquet", 1, 960, 0, 1920, 48, 0),)},
            "120 commits · 1,920 rows once, 48 redone, 0 lost",
        ),
    ],
)
def test_a_finished_job_is_told_by_its_counts(changes, ends):
    assert text(JobSnapshot(job_status(state="finished", **changes))).endswith(ends)


def test_a_warning_is_in_the_line_by_its_first_line():
    status = job_status(state="finished", warnings=("ranks never met: 2 trainings\nbecause",))
    assert text(JobSnapshot(status)).endswith("· warning: ranks never met: 2 trainings")
    running = line(JobSnapshot(job_status(warnings=status.warnings)))
    assert running.endswith("· warning: ranks never met: 2 trainings")


@pytest.mark.parametrize("state", ["waiting", "forming", "running", "failed", "stopped"])
def test_what_depends_on_the_moment_is_not_in_the_text(state):
    first = JobSnapshot(job_status(state=state), (event("lost", 3, size=3),), STARTED)
    later = dataclasses.replace(
        job_status(state=state),
        size=3, commits=7, resets=9, generation=11, elapsed=99.5, samples_per_s=3.0,
        data=(DataStatus("Parquet", 1, 960, 0, 1920, 48, 0),),
        reason="waiting 17 s for tcp://10.0.0.3:40122", ranks=(rank_status(7),),
    )  # fmt: skip
    said = text(JobSnapshot(later, (), STARTED + 5))
    live = state not in ("failed", "stopped")
    words = "under way · 2 to 8 ranks" if live else state
    assert text(first) == said == f"nbelastic job quickstart: {words}"


def test_the_text_is_one_line_whatever_the_name():
    assert "\n" not in text(JobSnapshot(job_status(name="a\nb" * 100)))
    assert len(text(JobSnapshot(job_status(name="a" * 1000)))) < 200


@pytest.mark.parametrize(
    ("backend", "over"), [("hierarchical", " over shared memory and Gloo"), ("solo", ""), ("", "")]
)
def test_a_terminal_is_told_how_far_the_job_has_come(backend, over):
    progress = Progress(1, 4, 0, 0, remaining_s=75.0)
    facts = {"reason": "1 more needed", "progress": progress, "backend": backend}
    assert line(JobSnapshot(job_status(state="waiting", **facts))) == (
        f"quickstart: waiting (1 more needed) · 4 ranks{over} · 120 commits"
        " · 25% · 1,000 samples/s · 1:15 left"
    )


def test_numbers_read_well():
    assert [duration(s) for s in (0, 42.9, 725, 3723)] == ["0:00", "0:42", "12:05", "1:02:03"]
    assert [rate(v) for v in (None, float("nan"), 0.123, 1234.5)] == ["–", "–", "0.12", "1,234"]
    assert [number(v) for v in (0.123456, 12345.6, 1e12)] == ["0.1235", "12,346", "1e+12"]
    assert [limits(*x) for x in ((4, 4), (2, 8), (1, None))] == ["4", "2 to 8", "1 or more"]
    assert count(2, "rank lost") == "2 ranks lost"
    assert some_lines("a\nb\nc\nd", 3) == "a\nb\n… 1 more lines\nd"
    names = [f"dask-SLURMCluster-gpu-node0123-17-of-128-validation-{end}" for end in ("01", "02")]
    for most in (20, 32, 40):  # what differs at the end looks different
        short = [abbreviate(name, most) for name in names]
        assert short[0] != short[1] and [len(each) for each in short] == [most] * 2
