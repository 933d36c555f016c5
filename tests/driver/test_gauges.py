"""Speed, progress and metrics of a whole job, from what its ranks tell."""

from __future__ import annotations

from itertools import pairwise

from nbelastic.driver.gauges import MOST_POINTS, Gauges


def figures(step=0, samples=0, epoch=0, batch=0, epochs=0, batches=0, device="cpu"):
    return [step, samples, device, epoch, batch, epochs, batches, 0, 0, []]


def test_a_metric_is_the_mean_over_the_ranks_that_report_it():
    gauges = Gauges()
    gauges.take(1.0, [(0, figures(), [[0, 0, 1, None, {"loss": 1.0, "only": 5.0}]])])
    gauges.take(2.0, [(1, figures(), [[0, 0, 1, None, {"loss": 3.0}]])])
    assert gauges.rows() == [{"step": 0.0, "time": 1.0, "ranks": 2, "loss": 2.0, "only": 5.0}]


def test_rows_come_in_the_order_of_training_whatever_the_order_of_arrival():
    gauges = Gauges()
    gauges.take(1.0, [(0, figures(), [[2, 0, 1, None, {"x": 3.0}], [0, 1, 1, None, {"x": 2.0}]])])
    gauges.take(1.0, [(1, figures(), [[0, 0, 1, None, {"x": 1.0}]])])
    assert [row["x"] for row in gauges.rows()] == [1.0, 2.0, 3.0]
    assert [row["step"] for row in gauges.rows()] == [0.0, 1.0, 2.0]


def test_a_step_of_the_users_own_is_kept():
    gauges = Gauges()
    gauges.take(1.0, [(0, figures(), [[0, 0, 1, 17, {"x": 1.0}]])])
    assert gauges.rows()[0]["step"] == 17


def test_what_is_done_again_after_a_rollback_replaces_what_was_rolled_back():
    gauges = Gauges()
    first = [[5, 0, 1, None, {"x": 1.0}]]
    gauges.take(1.0, [(0, figures(), first), (1, figures(), first)])
    gauges.take(2.0, [(0, figures(), [[5, 0, 2, None, {"x": 9.0}]])])
    gauges.take(3.0, [(1, figures(), [[5, 0, 1, None, {"x": 0.0}]])])  # late, of the old generation
    (row,) = gauges.rows()
    assert (row["x"], row["ranks"]) == (9.0, 1)


def test_speed_is_measured_over_a_window_and_added_up():
    gauges = Gauges()
    for second in range(11):
        gauges.take(second, [(0, figures(samples=100 * second), [])])
        gauges.take(second, [(1, figures(samples=50 * second), [])])
    assert gauges.rank(0).samples_per_s == 100.0
    assert gauges.total([0, 1]) == 150.0
    assert gauges.total([]) is None
    gauges.take(20, [(0, figures(samples=1000), [])])
    gauges.take(24, [(0, figures(samples=1000), [])])
    assert gauges.rank(0).samples_per_s == 0.0


def test_setting_up_does_not_count_as_slowness():
    gauges = Gauges()
    for second in range(10):
        gauges.take(second, [(0, figures(), [])])
    gauges.take(10, [(0, figures(samples=100), [])])
    assert gauges.rank(0).samples_per_s == 100.0


def test_progress_and_remaining_time():
    gauges = Gauges()
    assert gauges.progress(0.0, [0]) is None
    gauges.take(0.0, [(0, figures(epoch=0, batch=0, epochs=4, batches=10), [])])
    assert gauges.progress(0.0, [0]).remaining_s is None
    gauges.take(10.0, [(0, figures(epoch=1, batch=0, epochs=4, batches=10), [])])
    progress = gauges.progress(10.0, [0])
    assert (progress.epoch, progress.epochs, progress.batch) == (1, 4, 1)
    assert abs(progress.fraction - 1.1 / 4) < 1e-9
    assert abs(progress.remaining_s - 10.0 * (1 - 1.1 / 4) / (1.0 / 4)) < 1e-9


def test_curves_are_thinned_evenly_up_to_the_newest():
    gauges = Gauges()
    assert gauges.curves(10) == {}
    for version in range(1003):
        gauges.take(1.0, [(0, figures(), [[version, 0, 1, None, {"x": float(version)}]])])
        if version == 7:
            assert gauges.curves(10)["x"] == [(float(i), float(i)) for i in range(8)]
    points = gauges.curves(10)["x"]
    assert len(points) == 10
    assert points[-1] == (1002.0, 1002.0)
    assert {after[0] - before[0] for before, after in pairwise(points)} == {101.0}


def test_the_pace_is_thinned_evenly():
    gauges = Gauges()
    for tenth in range(20 * MOST_POINTS):
        gauges.note_pace(tenth / 10, 1.0 * tenth)
    pace = gauges.pace()
    assert MOST_POINTS / 4 < len(pace) <= MOST_POINTS
    assert pace[0][0] < 60 and pace[-1][0] > 2 * MOST_POINTS - 60


def test_a_finished_job_is_all_done():
    gauges = Gauges()
    gauges.take(0.0, [(0, figures(epoch=3, batch=7, epochs=4, batches=10), [])])
    assert gauges.progress(1.0, [0], finished=True).fraction == 1.0
