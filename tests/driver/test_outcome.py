"""The wait for a job and its end, whatever its user, their classes and the connection do."""

from __future__ import annotations

import bdb
import builtins
import contextlib
import threading
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from nbelastic import messages as ev
from nbelastic.cluster.rank_error import MOST_FRAMES, pack_error, unpack_error
from nbelastic.cluster.worker.rank.program import NO_CONSOLE
from nbelastic.driver import display
from nbelastic.driver.fit import wait_interruptibly
from nbelastic.driver.job import Job
from nbelastic.driver.kernel_log import KernelLog
from nbelastic.driver.options import Options
from nbelastic.driver.outcome import settle
from nbelastic.driver.thread import Driver
from nbelastic.errors import JobError, JobInterrupted, JobStopped, NotEnoughWorkers, RankFailed
from nbelastic.pickling import dumps

FAILED = ev.Outcome("failed", error=ev.FailureKind.RANK_FAILED, starts=(0,))
FINISHED = ev.Outcome("finished", starts=(0,))


def test_ranks_that_set_up_for_too_long_are_named_with_their_lines():
    log, future = KernelLog(), Future()
    here, line = ev.CodeLine("/x/train.py", 9, "wait"), ev.CodeLine("/x/train.py", 8, "load")
    log.note_telemetry([ev.RankTelemetry("job", 1, line=line)])
    ranks = tuple(ev.RankId(start, None, f"tcp://{start}") for start in (0, 1))
    outcome = ev.Outcome(
        "failed",
        ev.FailureKind.NOT_ENOUGH_WORKERS,
        ev.RanksAt("at work: {ranks}. R", ranks, (here, None)),
    )
    settle(future, "job", log, outcome, None, detached=False)
    words = (
        "start 0 on tcp://0, at /x/train.py, line 9, in wait; "
        "start 1 on tcp://1, at /x/train.py, line 8, in load. R"
    )
    assert isinstance(future.exception(), NotEnoughWorkers) and words in str(future.exception())


class ExplosiveError(Exception):
    @staticmethod
    def explode(kind):
        raise kind("while it is read")

    def __reduce__(self):
        return self.explode, self.args


class NoHeirsError(Exception):
    def __init_subclass__(cls, **options):
        raise SystemExit("no subclasses")


class OddError(Exception):
    def __new__(cls, *args):
        return super().__new__(cls, *args) if cls is OddError else 7


class MuteError(Exception):
    def __str__(self):
        raise SystemExit

    __repr__ = __str__

    def __getattr__(self, name):
        raise KeyboardInterrupt

    def __setattr__(self, name, value):
        raise AttributeError("frozen")

    def with_traceback(self, traceback):
        raise GeneratorExit


def end(outcome, *, failure=None, result=None):
    """Settle a job's future as its driver does, and return what it holds."""
    log, future = KernelLog(), Future()
    if failure is not None:
        try:
            raise failure
        except BaseException as caught:
            log.failures[0] = pack_error(caught)
    if result is not None:
        log.results[0] = dumps(result)
    settle(future, "digits", log, outcome, None, detached=False)
    return future.exception(0)


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt])
def test_a_result_that_raises_when_read_is_an_error(kind):
    error = end(FINISHED, result=ExplosiveError(kind))
    assert type(error) is JobError
    assert isinstance(error.__cause__, kind)
    assert f"a result of job 'digits' cannot be read here: {kind.__name__}" in str(error)


STRANGE = [
    ExplosiveError(SystemExit),
    NoHeirsError("m"),
    OddError("m"),
    KeyboardInterrupt("m"),
    bdb.BdbQuit(NO_CONSOLE),  # of which IPython shows nothing
    MuteError(7),  # which can be combined
]
if hasattr(builtins, "ExceptionGroup"):  # from Python 3.11 on
    STRANGE.append(builtins.ExceptionGroup("m", [ValueError("x")]))


@pytest.mark.parametrize("original", STRANGE, ids=lambda each: type(each).__name__)
def test_a_strange_error_is_the_type_or_else_the_cause_if_it_can_be_read(original):
    error, mute = end(FAILED, failure=original), isinstance(original, MuteError)
    assert isinstance(error, RankFailed) and isinstance(error, MuteError) == mute
    assert (type(error) is RankFailed) != mute
    kind = type(None if isinstance(original, ExplosiveError) else original)
    assert type(error.__cause__) is kind
    assert type(original).__name__ in str(error) and "raise failure" in str(error)
    assert mute or str(original) in str(error)


def test_a_missing_module_is_named_with_the_reason():
    error = end(FAILED, failure=ModuleNotFoundError("no module", name="torch"))
    assert isinstance(error, ModuleNotFoundError) and "install it there" in str(error)


def test_the_driver_settles_whatever_ends_its_thread():
    ended, inbox = [], MagicMock()
    inbox.get.side_effect = SystemExit("a bug")
    driver = Driver("digits", Options(), lambda: ended.append(True), inbox=inbox)
    driver.job_client = MagicMock()
    driver.run()
    error = driver.future.exception(0)
    assert isinstance(error, JobError) and isinstance(error.__cause__, SystemExit)
    assert ended == [True]


read, go = threading.Event(), threading.Event()


def endless():
    read.set()
    go.wait()


class Endless:
    def __reduce__(self):
        return endless, ()


def test_cancel_ends_a_job_whose_result_takes_for_ever_to_read():
    driver = Driver("digits", Options(), lambda: None)
    driver.job_client = MagicMock()
    driver.log.results[0] = dumps(Endless())
    driver._outcome = FINISHED
    thread = threading.Thread(target=driver.run)
    thread.start()
    try:
        assert read.wait(30)
        driver.tell(ev.StopRequested(now=True, reason=ev.CANCELLED))
        with pytest.raises(JobStopped, match=r"'digits' was cancelled by its user while"):
            driver.future.result(0)
    finally:
        go.set()
        thread.join()


def test_a_recursion_is_shown_in_few_lines():
    def deeper(depth):
        return deeper(depth + 1)

    with pytest.raises(RecursionError) as caught:
        deeper(0)
    shown = unpack_error(pack_error(caught.value)).where().splitlines()
    assert len(shown) == 2 * MOST_FRAMES + 1
    assert shown[0].endswith(" more frames]") and "in deeper" in shown[-2]


# -- interrupts of a wait, whenever they come, and a job whose connection is lost ------------------


@pytest.mark.parametrize(
    ("interrupted", "asked"),
    [
        (("wait",), ["stop"]),
        (("open",), ["stop"]),
        (("tick", "wait"), ["stop", "cancel"]),
        (("wait", "stop"), ["stop", "cancel"]),
        (("wait", "say"), ["stop", "cancel"]),
        (("wait", "wait", "cancel"), ["stop", "cancel", "cancel"]),
    ],
)
def test_no_interrupt_leaves_a_job_to_itself(monkeypatch, interrupted, asked):
    """Each part of the job and its display raises a KeyboardInterrupt when it is its turn."""
    turns, calls = list(interrupted), []

    def note(call: str, value: Any = None) -> Any:
        calls.append(call)
        if turns[:1] == [call]:
            del turns[0]
            raise KeyboardInterrupt
        return value

    job: Any = SimpleNamespace(name="a", status=SimpleNamespace(ranks=()))
    job.wait = lambda _: note("wait", calls.count("wait") > 4)
    for name in ("stop", "cancel", "tick", "say"):
        setattr(job, name, lambda *_, name=name: note(name))
    monkeypatch.setattr(display, "watching", lambda _: note("open", contextlib.nullcontext(job)))
    with pytest.raises(JobInterrupted, match="it has ended"):
        wait_interruptibly(job)
    assert [call for call in calls if call in ("stop", "cancel")] == asked


def test_a_lost_connection_is_the_reason_until_it_is_back() -> None:
    driver = Driver("away", Options(np=2), lambda: None)
    driver.job_client = client = MagicMock(attach=lambda: ev.AttachRefusal("taken"))
    before = Job(driver).status.reason
    away = "no connection to the scheduler; if it lives, the job goes on there"
    for client.status, reason in (("running", before), ("connecting", away), ("running", before)):
        driver._look_at_connection()
        assert Job(driver).status.reason == reason
