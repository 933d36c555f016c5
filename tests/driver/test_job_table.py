"""The jobs of a cluster as a table."""

from __future__ import annotations

from nbelastic.driver import JobInfo
from nbelastic.driver.status import JobTable

JOBS = JobTable(
    [
        JobInfo("resnet", "running", 3, 1200, 0.0, True, 5, 2.0, 2, 8, 3, 3),
        JobInfo("<bert>", "waiting", 0, 0, 0.0, False),
    ]
)


def test_it_is_a_tuple_of_jobs():
    assert [job.name for job in JOBS] == ["resnet", "<bert>"]
    assert tuple(JOBS) == JOBS


def test_it_is_shown_as_a_table():
    assert repr(JOBS).splitlines() == [
        "name    state    priority  weight  np        slots  share  commits  kernel",
        "resnet  running  5         2       2 to 8    3      3      1,200    yes",
        "<bert>  waiting  0         1       1 to all  0             0        no",
    ]
    assert repr(JobTable()) == "no jobs"


def test_html_is_escaped():
    html = JOBS._repr_html_()
    assert "&lt;bert&gt;" in html
    assert html.count("<tr>") == 3
