"""Speed, progress and metrics of a whole job, from what its ranks tell."""

from __future__ import annotations

import time
from itertools import pairwise
from types import SimpleNamespace

from nbelastic.cluster.job_log import JobLog
from nbelastic.driver.job import Job
from nbelastic.driver.options import Options
from nbelastic.driver.records.metrics import MOST_POINTS, MetricsAggregator
from nbelastic.driver.thread import Driver
from nbelastic.membership import RankView
from nbelastic.messages import (
    DataProgress,
    LogContents,
    MetricsReport,
    RankTelemetry,
    Record,
)


def rank(start, *rows, **figures):
    """Return the telemetry of a rank; a row is the arguments of a report."""
    reports = tuple(MetricsReport(*row) for row in rows)
    return RankTelemetry("job", start, **figures, reports=reports)


def test_a_metric_is_the_mean_over_the_ranks_that_report_it():
    metrics = MetricsAggregator()
    metrics.take(1.0, [rank(0, (0, 0, 1, None, {"loss": 1.0, "only": 5.0}))])
    metrics.take(2.0, [rank(1, (0, 0, 1, None, {"loss": 3.0}))])
    assert metrics.rows() == [{"step": 0.0, "time": 1.0, "ranks": 2, "loss": 2.0, "only": 5.0}]


def test_rows_are_in_the_order_of_training():
    metrics = MetricsAggregator()
    metrics.take(1.0, [rank(0, (2, 0, 1, None, {"x": 3.0}), (0, 1, 1, None, {"x": 2.0}))])
    metrics.take(1.0, [rank(1, (0, 0, 1, None, {"x": 1.0}))])
    assert [row["x"] for row in metrics.rows()] == [1.0, 2.0, 3.0]
    assert [row["step"] for row in metrics.rows()] == [0.0, 1.0, 2.0]


def test_a_step_of_the_users_own_is_kept():
    metrics = MetricsAggregator()
    metrics.take(1.0, [rank(0, (0, 0, 1, 17, {"x": 1.0}))])
    assert metrics.rows()[0]["step"] == 17


def test_rows_after_a_rollback_replace_those_before():
    metrics = MetricsAggregator()
    first = [(5, 0, 1, None, {"x": 1.0})]
    metrics.take(1.0, [rank(0, *first), rank(1, *first)])
    metrics.take(2.0, [rank(0, (5, 0, 2, None, {"x": 9.0}))])
    metrics.take(3.0, [rank(1, (5, 0, 1, None, {"x": 0.0}))])  # late, of the old generation
    (row,) = metrics.rows()
    assert (row["x"], row["ranks"]) == (9.0, 1)


def test_speed_is_measured_over_a_window_and_added_up():
    metrics = MetricsAggregator()
    for second in range(11):
        metrics.take(second, [rank(0, samples=100 * second)])
        metrics.take(second, [rank(1, samples=50 * second)])
    assert metrics.total([0]) == 100.0
    assert metrics.total([0, 1]) == 150.0
    assert metrics.total([]) is None
    metrics.take(20, [rank(0, samples=1000)])
    metrics.take(24, [rank(0, samples=1000)])
    assert metrics.total([0]) == 0.0


def test_setting_up_does_not_count_as_slowness():
    metrics = MetricsAggregator()
    for second in range(10):
        metrics.take(second, [rank(0)])
    metrics.take(10, [rank(0, samples=100)])
    assert metrics.total([0]) == 100.0


def test_steps_have_a_speed_also_where_no_samples_are_counted():
    metrics = MetricsAggregator()
    place = RankView(0, 0, "tcp://a", "a", "a", "running", 0)
    assert metrics.status(place).steps_per_s is None
    for second in range(4):
        metrics.take(second, [rank(0, step=2 * second)])
    status = metrics.status(place)
    assert (status.steps_per_s, status.samples_per_s, status.step) == (2.0, None, 6)


def test_a_loop_without_epochs_has_progress_in_steps():
    metrics = MetricsAggregator()
    metrics.take(0.0, [rank(0, step=1, batch=0, batches=6000)])
    assert metrics.progress(0.0, [0]).remaining_s is None
    metrics.take(10.0, [rank(0, batch=1500, batches=6000)])
    progress = metrics.progress(10.0, [0])
    assert (progress.step, progress.steps, progress.epochs) == (1501, 6000, 0)
    assert abs(progress.remaining_s - 10.0 * 4499 / 1500) < 1e-6
    assert metrics.progress(11.0, [0], finished=True).fraction == 1.0


def test_progress_and_remaining_time():
    metrics = MetricsAggregator()
    assert metrics.progress(0.0, [0]) is None
    metrics.take(0.0, [rank(0, step=1, epoch=0, batch=0, epochs=4, batches=10)])
    assert metrics.progress(0.0, [0]).remaining_s is None
    metrics.take(10.0, [rank(0, epoch=1, batch=0, epochs=4, batches=10)])
    progress = metrics.progress(10.0, [0])
    assert (progress.epoch, progress.epochs, progress.batch) == (1, 4, 1)
    assert abs(progress.fraction - 1.1 / 4) < 1e-9
    assert abs(progress.remaining_s - 10.0 * (1 - 1.1 / 4) / (1.0 / 4)) < 1e-9
    assert metrics.progress(11.0, [0], finished=True).fraction == 1.0


def test_what_a_checkpoint_had_done_says_nothing_about_the_pace():
    metrics = MetricsAggregator()
    for now, step, epoch in ((0.0, 0, 0), (5.0, 1, 25), (15.0, 40, 30)):
        metrics.take(now, [rank(0, step=step, epoch=epoch, batch=0, epochs=60, batches=10)])
        progress = metrics.progress(now, [0])
    assert abs(progress.remaining_s - 10.0 * (60 - 30.1) / 5) < 1e-6


def test_a_kernel_that_attaches_has_the_times_at_which_reports_came():
    log = JobLog()
    log._now = lambda: 1010.0
    log.note_telemetry([rank(0, (1, 0, 1, None, {"loss": 2.0}))])
    metrics = MetricsAggregator(started=1000.0)
    metrics.take(60.0, log.contents().telemetry)
    assert [row["time"] for row in metrics.rows()] == [10.0]


def test_curves_are_thinned_evenly_up_to_the_newest():
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


def test_the_pace_is_thinned_evenly():
    metrics = MetricsAggregator()
    for tenth in range(20 * MOST_POINTS):
        metrics.note_pace(tenth / 10, 1.0 * tenth)
    pace = metrics.pace()
    assert MOST_POINTS / 4 < len(pace) <= MOST_POINTS
    assert pace[0][0] < 60 and pace[-1][0] > 2 * MOST_POINTS - 60


def rows(seen, *, redone=0, length=100):
    return (DataProgress("Parquet", 1, length, seen - 100, seen, redone, 0),)


def test_rows_are_those_of_the_rank_that_is_furthest():
    metrics = MetricsAggregator()
    assert metrics.data([0]) == ()
    metrics.take(1.0, [rank(0, data=rows(140)), rank(1, data=rows(180)), rank(2)])
    metrics.take(2.0, [rank(3, data=rows(199, redone=8))])  # which is lost
    (found,) = metrics.data([0, 1, 2])
    assert (found.source, found.epoch, found.done, found.left) == ("Parquet", 1, 80, 20)
    assert (found.seen, found.redone, found.lost) == (180, 8, 0)
    assert metrics.data([])[0].seen == 199


def test_what_is_left_of_a_source_without_a_length_is_not_known():
    metrics = MetricsAggregator()
    metrics.take(1.0, [rank(0, data=rows(140, length=0))])
    assert metrics.data([0])[0].left is None


def test_a_clock_that_is_set_back_makes_no_job_younger(monkeypatch):
    job = Job(Driver("digits", Options(), lambda: None))
    log = job._driver.log
    log.note(Record("joined"))
    earlier = SimpleNamespace(**vars(time) | {"time": lambda: log.started - 3600.0})
    monkeypatch.setattr("nbelastic.cluster.job_log.time", earlier)
    monkeypatch.setattr("nbelastic.driver.records.job_log.time", earlier)
    log.note(Record("reset"))
    assert 0 <= job.status.elapsed < 3600
    first, second = job.history
    assert log.started <= first.time <= second.time
    log.adopt(
        log.started + 7200.0, LogContents({}, {}, (), {}, (), ())
    )  # the scheduler's clock is ahead
    assert 0 <= job.status.elapsed < 3600
