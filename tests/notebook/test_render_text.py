import dataclasses

import pytest

from nbelastic.render import JobSnapshot, abbreviate, count, duration, line, number, text
from nbelastic.render.formatting import limits, rate, some_lines
from nbelastic.status import DataStatus, Progress

from .fakes import STARTED, event, job_status, rank_status

ROWS = (DataStatus("Parquet", 1, 960, 0, 1920, 48, 0),)


def test_a_finished_job_is_told_by_its_counts_and_warnings_and_a_name_is_cut():
    warnings = ("ranks never met: 2 trainings\nbecause",)
    status = job_status(state="finished", commits=1, data=ROWS, warnings=warnings)
    assert text(JobSnapshot(status)) == (
        "nbelastic job quickstart: finished · 4 ranks · 2 resets · 1 commit"
        " · 1,920 rows once, 48 redone, 0 lost · warning: ranks never met: 2 trainings"
    )
    said = text(JobSnapshot(job_status(name="a\nb" * 1000)))
    assert 60 < len(said) < 200 and "\n" not in said
    running = line(JobSnapshot(job_status(warnings=status.warnings)))
    assert running.endswith("· warning: ranks never met: 2 trainings")


@pytest.mark.parametrize("state", ["running", "failed"])
def test_what_depends_on_the_moment_is_not_in_the_text(state):
    first = JobSnapshot(job_status(state=state), (event("lost", 3, size=3),), STARTED)
    later = dataclasses.replace(
        job_status(state=state),
        size=3, commits=7, resets=9, generation=11, elapsed=99.5, samples_per_s=3.0,
        data=ROWS, reason="waiting 17 s for tcp://10.0.0.3:40122", ranks=(rank_status(7),),
    )  # fmt: skip
    said = text(JobSnapshot(later, (), STARTED + 5))
    words = "under way · 2 to 8 ranks" if state == "running" else state
    assert text(first) == said == f"nbelastic job quickstart: {words}"


def test_a_terminal_is_told_how_far_the_job_has_come():
    progress = Progress(1, 4, 0, 0, remaining_s=75.0)
    facts = {"reason": "1 more needed", "progress": progress, "backend": "hierarchical"}
    assert line(JobSnapshot(job_status(state="waiting", **facts))) == (
        "quickstart: waiting (1 more needed) · 4 ranks over shared memory and Gloo · 120 commits"
        " · 25% · 1,000 samples/s · 1:15 left"
    )
    assert "4 ranks · 120" in line(JobSnapshot(job_status(backend="solo")))


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
