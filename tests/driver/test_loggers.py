"""Metrics reach experiment loggers: each committed step once, in order, whatever raises."""

from __future__ import annotations

import sys
import threading
from concurrent.futures import Future
from types import SimpleNamespace

import pytest

from nbelastic.driver import loggers
from nbelastic.driver.kernel_log import KernelLog
from nbelastic.errors import OptionError
from nbelastic.messages import MetricsReport, RankTelemetry, Record


class FakeDriver:
    """A driver whose commits and reports the test sets."""

    name = "job"
    detached = False

    def __init__(self) -> None:
        self.log = KernelLog()
        self.future: Future[list] = Future()
        self.commits, self.state = -1, "running"

    def view(self):
        return SimpleNamespace(commits=self.commits, state=self.state)

    def report(self, commit, value, *, generation=1, number=0, step=None, start=0):
        made = MetricsReport(commit, number, generation, step, {"loss": value})
        self.log.metrics.take(1.0, [RankTelemetry("job", start, reports=(made,))])

    def note_logged(self, name, sent, rows):
        figures = {"commit": sent[0], "number": sent[1], "rows": rows}
        self.log.note(Record("logged", detail=name, figures=figures))

    def end(self, state="finished"):
        self.state = state
        self.future.set_result([None])


@pytest.fixture
def driver(monkeypatch):
    monkeypatch.setattr(loggers, "INTERVAL_S", 0.005)
    monkeypatch.setattr(loggers, "SETTLE_S", 0.02)
    return FakeDriver()


def test_steps_are_sent_when_they_are_committed_and_repeated_ones_once(driver):
    got, there = [], threading.Event()

    def log(step, values):
        got.append((step, values["loss"]))
        if len(got) == 2:
            there.set()

    made = loggers.MetricsLogger(driver, log)
    driver.report(0, 0.0, start=0)
    driver.report(0, 2.0, start=1)  # the mean of both ranks
    driver.report(1, 5.0)
    driver.report(2, 9.0)  # a fault takes it back
    driver.commits = 2
    assert there.wait(10)
    driver.report(2, 7.0, generation=2)
    driver.report(3, 8.0, generation=2)
    driver.commits = 3
    driver.end("failed")  # what is in no commit is not sent
    made.finish()
    assert got == [(0, 1.0), (1, 5.0), (2, 7.0)]


def test_another_kernel_goes_on_where_the_last_one_was(driver):
    got = []

    def log(step, values):
        got.append((step, values["loss"]))

    for round in range(2):
        driver.future = Future()
        driver.report(2 * round, 1.0)
        driver.report(2 * round + 1, 2.0)
        made = loggers.MetricsLogger(driver, log)
        driver.end()
        made.finish()
    assert got == [(0, 1.0), (1, 2.0), (2, 1.0), (3, 2.0)]
    assert sum(event.kind == "logged" for event in driver.log.history()) == 1


def test_a_logger_that_raises_is_tried_again_and_said_once(driver):
    got, raised = [], []

    def log(step, values):
        if len(raised) < 3:
            raised.append(step)
            raise ConnectionError("no network")
        got.append(step)

    for commit in range(3):
        driver.report(commit, 1.0, step=10 * commit)
    made = loggers.MetricsLogger(driver, log)
    driver.end()
    made.finish()
    assert (got, raised) == ([0, 10, 20], [0, 0, 0])
    (warning,) = driver.log.warnings()
    assert "failed: ConnectionError: no network; it is tried again" in warning


def test_a_logger_that_always_raises_gets_no_more(driver, monkeypatch):
    monkeypatch.setattr(loggers, "TRIES", 3)
    driver.report(0, 1.0)
    made = loggers.MetricsLogger(driver, lambda step, values: 1 / 0)
    driver.end()
    made.finish()
    assert "failed 3 times in a row" in driver.log.warnings()[1]


@pytest.mark.parametrize("wrong", [None, 3, "wandb", dict])
def test_what_is_no_logger_is_refused(wrong):
    with pytest.raises(OptionError, match="must be a run of wandb or MLflow"):
        loggers.sender(wrong)


def test_each_kind_of_logger_gets_a_row_by_its_own_call(monkeypatch):
    got = []

    def log_metric(run_id, key, value, timestamp=None, step=None):
        got.append((key, value, step))

    def add_scalar(tag, scalar_value, global_step=None):
        got.append((tag, scalar_value, global_step))

    tracking = SimpleNamespace(MlflowClient=lambda: SimpleNamespace(log_metric=log_metric))
    monkeypatch.setitem(sys.modules, "mlflow", SimpleNamespace(tracking=tracking))
    wandb = SimpleNamespace(id="w", log=lambda data, step: got.append((*data.popitem(), step)))
    for name, target in (
        ("MLflow run r", SimpleNamespace(info=SimpleNamespace(run_id="r"))),
        ("TensorBoard d", SimpleNamespace(log_dir="d", add_scalar=add_scalar, flush=got.copy)),
        ("wandb run w", wandb),
    ):
        found, send = loggers.sender(target)
        send(3.0, {"loss": 0.5})
        assert (found, got.pop()) == (name, ("loss", 0.5, 3))
