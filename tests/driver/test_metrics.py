"""Speed, progress and metrics of a job, and their way to experiment loggers."""

from __future__ import annotations

import time
from concurrent.futures import Future
from itertools import pairwise
from types import SimpleNamespace

import pytest

from nbelastic import messages as ev
from nbelastic.cluster.job_log import JobLog
from nbelastic.driver import loggers
from nbelastic.driver.job import Job
from nbelastic.driver.kernel_log import KernelLog
from nbelastic.driver.metrics import MOST_POINTS, MetricsAggregator
from nbelastic.driver.options import Options
from nbelastic.driver.thread import Driver
from nbelastic.errors import OptionError
from nbelastic.status import DataStatus
from tests.support.clusters import until


def rank(start, *rows, **figures):
    """Return the telemetry of a rank; a row is the arguments of a report."""
    reports = tuple(ev.MetricsReport(*row) for row in rows)
    return ev.RankTelemetry("job", start, **figures, reports=reports)


def test_a_row_is_the_mean_over_ranks_in_the_order_of_training_and_its_newest_try():
    metrics = MetricsAggregator()
    first = (5, 0, 1, None, {"x": 1.0, "y": 1.0})
    metrics.take(1.0, [rank(0, first, (2, 1, 1, 17, {"x": 3.0, "only": 5.0}))])
    metrics.take(2.0, [rank(1, first, (2, 0, 1, None, {"x": 2.0}))])
    metrics.take(2.0, [rank(1, (2, 1, 1, 17, {"x": 5.0}))])
    metrics.take(3.0, [rank(0, (5, 0, 2, None, {"x": 9.0}))])  # done again after a rollback
    metrics.take(4.0, [rank(1, first)])  # late, of the old generation
    assert metrics.rows() == [
        {"step": 0.0, "time": 2.0, "ranks": 1, "x": 2.0},
        {"step": 17, "time": 1.0, "ranks": 2, "x": 4.0, "only": 5.0},  # the user's own step
        {"step": 2.0, "time": 3.0, "ranks": 1, "x": 9.0},
    ]


def test_speed_is_measured_over_a_window_and_added_up():
    metrics = MetricsAggregator()
    for second in range(-9, 0):  # setting up is no slowness
        metrics.take(second, [rank(0), rank(2)])
    assert metrics.of_rank(0)["steps_per_s"] is None
    for second in range(11):
        metrics.take(second, [rank(0, samples=100 * second, step=2 * second)])
        metrics.take(second, [rank(1, samples=50 * second), rank(2, step=second)])
    assert (metrics.total([0]), metrics.total([0, 1]), metrics.total([])) == (100.0, 150.0, None)
    found = metrics.of_rank(0)
    assert (found["steps_per_s"], found["samples_per_s"], found["step"]) == (2.0, 100.0, 20)
    assert metrics.total([2]) is None  # which counts no samples
    metrics.take(20, [rank(0, samples=1000)])
    metrics.take(24, [rank(0, samples=1000)])
    assert metrics.total([0]) == 0.0


@pytest.mark.parametrize(
    ("total", "reports", "place", "fraction", "remaining"),
    [
        ({"batches": 6000}, [(0, 1, 0, 0), (10, 2, 0, 1500)],
         (0, 0, 1501, 6000), 1501 / 6000, 10 * 4499 / 1500),
        ({"epochs": 4, "batches": 10}, [(0, 1, 0, 0), (10, 2, 1, 0)],
         (1, 1, 0, 0), 1.1 / 4, 10 * (1 - 1.1 / 4) / (1 / 4)),
        # What a checkpoint had done says nothing about the pace.
        ({"epochs": 60, "batches": 10}, [(0, 0, 0, 0), (5, 1, 25, 0), (15, 40, 30, 0)],
         (30, 1, 0, 0), 30.1 / 60, 10 * (60 - 30.1) / 5),
    ],
)  # fmt: skip
def test_progress_and_remaining_time(total, reports, place, fraction, remaining):
    metrics = MetricsAggregator()
    assert metrics.progress(0.0, [0]) is None
    for now, step, epoch, batch in reports:
        metrics.take(now, [rank(0, step=step, epoch=epoch, batch=batch, **total)])
        progress = metrics.progress(now, [0])
        assert (progress.remaining_s is None) == (now < 10)
    assert (progress.epoch, progress.batch, progress.step, progress.steps) == place
    assert progress.fraction == pytest.approx(fraction)
    assert progress.remaining_s == pytest.approx(remaining)
    assert metrics.progress(now, [0], finished=True).fraction == 1.0


def test_a_kernel_that_attaches_has_the_times_at_which_reports_came():
    log = JobLog()
    log._now = lambda: 1010.0
    log.note_telemetry([rank(0, (1, 0, 1, None, {"loss": 2.0}))])
    metrics = MetricsAggregator(started=1000.0)
    metrics.take(60.0, log.contents().telemetry)
    assert [row["time"] for row in metrics.rows()] == [10.0]


def test_curves_and_the_pace_are_thinned_evenly_up_to_the_newest():
    metrics = MetricsAggregator()
    assert metrics.curves(10) == {}
    for version in range(1003):
        metrics.take(1.0, [rank(0, (version, 0, 1, None, {"x": float(version)}))])
        if version == 7:
            assert metrics.curves(10)["x"] == [(float(i), float(i)) for i in range(8)]
    points = metrics.curves(10)["x"]
    assert len(points) == 10
    assert points[-1] == (1002.0, 1002.0)
    assert {after[0] - before[0] for before, after in pairwise(points)} == {101.0}
    for tenth in range(20 * MOST_POINTS):
        metrics.note_pace(tenth / 10, 1.0 * tenth)
    pace = metrics.pace()
    assert MOST_POINTS / 4 < len(pace) <= MOST_POINTS
    assert pace[0][0] < 60 and pace[-1][0] > 2 * MOST_POINTS - 60


def test_rows_are_those_of_the_rank_that_is_furthest():
    def rows(seen, *, redone=0):
        return (DataStatus("Parquet", 1, seen - 100, 200 - seen, seen, redone, 0),)

    metrics = MetricsAggregator()
    assert metrics.data([0]) == ()
    metrics.take(1.0, [rank(0, data=rows(140)), rank(1, data=rows(180)), rank(2)])
    metrics.take(2.0, [rank(3, data=rows(199, redone=8))])  # which is lost
    (found,) = metrics.data([0, 1, 2])
    assert (found.source, found.epoch, found.done, found.left) == ("Parquet", 1, 80, 20)
    assert (found.seen, found.redone, found.lost) == (180, 8, 0)
    assert metrics.data([])[0].seen == 199


def test_a_clock_that_is_set_back_makes_no_job_younger(monkeypatch):
    job = Job(Driver("digits", Options(), lambda: None))
    log = job._driver.log
    log.note(ev.Record("joined"))
    earlier = SimpleNamespace(**vars(time) | {"time": lambda: log.started - 3600.0})
    monkeypatch.setattr("nbelastic.cluster.job_log.time", earlier)
    monkeypatch.setattr("nbelastic.driver.kernel_log.time", earlier)
    log.note(ev.Record("reset"))
    assert 0 <= job.status.elapsed < 3600
    first, second = job.history
    assert log.started <= first.time <= second.time
    nothing = ev.LogContents({}, {}, (), {}, (), ())
    log.adopt(log.started + 7200.0, nothing)  # the scheduler's clock is ahead
    assert 0 <= job.status.elapsed < 3600


# -- loggers: each committed step once, in order, whatever raises ----------------------------------


class FakeDriver:
    """A driver whose commits and reports the test sets."""

    name = "job"
    detached = False

    def __init__(self) -> None:
        self.log = KernelLog()
        self.future: Future[list] = Future()
        self.commits, self.state = -1, "running"
        self.got: list[tuple[float, float]] = []

    def take(self, step, values):
        self.got.append((step, values["loss"]))

    def view(self):
        return SimpleNamespace(commits=self.commits, state=self.state)

    def report(self, commit, value, *, generation=1, number=0, step=None, start=0):
        made = ev.MetricsReport(commit, number, generation, step, {"loss": value})
        self.log.metrics.take(1.0, [ev.RankTelemetry("job", start, reports=(made,))])

    def end(self, made, state="finished"):
        self.state = state
        self.future.set_result([None])
        made.finish()


@pytest.fixture
def driver(monkeypatch):
    monkeypatch.setattr(loggers, "INTERVAL_S", 0.005)
    monkeypatch.setattr(loggers, "SETTLE_S", 0.02)
    return FakeDriver()


def test_steps_are_sent_when_they_are_committed_and_repeated_ones_once(driver):
    made = loggers.MetricsLogger(driver, driver.take)
    driver.report(0, 0.0, start=0)
    driver.report(0, 2.0, start=1)  # the mean of both ranks
    driver.report(1, 5.0)
    driver.report(2, 9.0)  # a fault takes it back
    driver.commits = 2
    until(lambda: len(driver.got) == 2, "two steps", 10)
    driver.report(2, 7.0, generation=2)
    driver.report(3, 8.0, generation=2)
    driver.commits = 3
    driver.end(made, "failed")  # what is in no commit is not sent
    assert driver.got == [(0, 1.0), (1, 5.0), (2, 7.0)]


def test_a_logger_that_raises_is_tried_again_and_said_once(driver, monkeypatch):
    raised = []

    def log(step, values):
        if len(raised) < 3:
            raised.append(step)
            raise ConnectionError("no network")
        driver.take(step, values)

    for commit in range(3):
        driver.report(commit, 1.0, step=10 * commit)
    driver.end(loggers.MetricsLogger(driver, log))
    assert (driver.got, raised) == ([(0, 1.0), (10, 1.0), (20, 1.0)], [0, 0, 0])
    (warning,) = driver.log.warnings()
    assert "failed: ConnectionError: no network; it is tried again" in warning
    monkeypatch.setattr(loggers, "TRIES", 3)
    loggers.MetricsLogger(driver, lambda step, values: 1 / 0).finish()
    assert "failed 3 times in a row" in driver.log.warnings()[2]


@pytest.mark.parametrize("wrong", [None, 3, "wandb", dict])
def test_a_logger_is_a_function(driver, wrong):
    with pytest.raises(OptionError, match="must be a function that is called with a step and a di"):
        loggers.MetricsLogger(driver, wrong)
