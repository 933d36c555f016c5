"""The end of a job, whatever the classes and modules of its user do."""

from __future__ import annotations

import bdb
import builtins
import threading
from concurrent.futures import Future
from dataclasses import dataclass
from unittest.mock import MagicMock

import pytest

from nbelastic import messages as ev
from nbelastic.cluster.rank_error import MOST_FRAMES, pack_error, unpack_error
from nbelastic.cluster.worker.rank.program import NO_CONSOLE
from nbelastic.driver.kernel_log import KernelLog
from nbelastic.driver.options import Options
from nbelastic.driver.outcome import settle
from nbelastic.driver.thread import Driver
from nbelastic.errors import JobError, JobStopped, NotEnoughWorkers, RankFailed
from nbelastic.pickling import dumps

KINDS = [SystemExit, KeyboardInterrupt, GeneratorExit, ValueError]

FAILED = ev.Outcome("failed", error=ev.FailureKind.RANK_FAILED, starts=(0,))
FINISHED = ev.Outcome("finished", starts=(0,))


def explode(kind):
    raise kind("while it is read")


def test_ranks_that_set_up_for_too_long_are_named_with_their_lines():
    log, future = KernelLog(), Future()
    line = ev.CodeLine("/x/train.py", 8, "load")
    log.note_telemetry([ev.RankTelemetry("job", 1, line=line)])
    ranks = tuple(ev.RankId(start, None, f"tcp://{start}") for start in (0, 1))
    outcome = ev.Outcome("failed", ev.FailureKind.NOT_ENOUGH_WORKERS, ev.NotReady(ranks, 8.0))
    settle(future, "job", log, outcome, None, detached=False)
    words = "start 0 on tcp://0; start 1 on tcp://1, which is at /x/train.py, line 8, in load. R"
    assert isinstance(future.exception(), NotEnoughWorkers) and words in str(future.exception())


class Explosive:
    def __init__(self, kind):
        self.kind = kind

    def __reduce__(self):
        return explode, (self.kind,)


class ExplosiveError(Exception):
    def __reduce__(self):
        return explode, (self.args[0],)


class NoHeirsError(Exception):
    def __init_subclass__(cls, **options):
        raise SystemExit("no subclasses")


class Strange(type):
    def __call__(cls, *args):
        if cls.__name__ != "StrangeError":
            return 7
        return super().__call__(*args)


class StrangeError(Exception, metaclass=Strange):
    pass


class MuteError(Exception):
    def __str__(self):
        raise SystemExit

    __repr__ = __str__

    def __getattr__(self, name):
        raise KeyboardInterrupt

    def with_traceback(self, traceback):
        raise GeneratorExit


@dataclass(frozen=True)
class FrozenError(Exception):
    code: int


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


@pytest.mark.parametrize("kind", KINDS)
def test_a_result_that_raises_when_read_is_an_error(kind):
    error = end(FINISHED, result=Explosive(kind))
    assert type(error) is JobError
    assert isinstance(error.__cause__, kind)
    assert f"a result of job 'digits' cannot be read here: {kind.__name__}" in str(error)


UNCOMBINED = [
    *map(ExplosiveError, KINDS),
    NoHeirsError("m"),
    StrangeError("m"),
    SystemExit("m"),
    KeyboardInterrupt("m"),
    bdb.BdbQuit(NO_CONSOLE),  # of which IPython shows nothing
]
if hasattr(builtins, "ExceptionGroup"):  # from Python 3.11 on
    UNCOMBINED.append(builtins.ExceptionGroup("m", [ValueError("x")]))


@pytest.mark.parametrize("original", UNCOMBINED, ids=lambda each: type(each).__name__)
def test_a_class_that_cannot_be_combined_or_read_is_the_cause_if_there_is_one(original):
    error = end(FAILED, failure=original)
    assert type(error) is RankFailed
    kind = type(None if isinstance(original, ExplosiveError) else original)
    assert type(error.__cause__) is kind
    for words in (type(original).__name__, str(original), "raise failure"):
        assert words in str(error)


@pytest.mark.parametrize(("kind", "shown"), [(FrozenError, "FrozenError: 7"), (MuteError, "Mute")])
def test_a_strange_error_keeps_its_type_and_lines(kind, shown):
    error = end(FAILED, failure=kind(7))
    assert isinstance(error, kind) and isinstance(error, RankFailed)
    assert type(error.__cause__) is kind
    assert shown in str(error) and "raise failure" in str(error)


@pytest.mark.parametrize("kind", KINDS)
def test_the_driver_settles_whatever_ends_its_thread(kind):
    class Broken:
        def put(self, item):
            """Take it."""

        def get(self, *, timeout):
            raise kind("a bug")

    ended = []
    driver = Driver("digits", Options(), lambda: ended.append(True), inbox=Broken())
    driver.job_client = MagicMock()
    driver.run()
    error = driver.future.exception(0)
    assert isinstance(error, JobError) and isinstance(error.__cause__, kind)
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
        driver.tell(ev.StopRequested(now=True, reason=ev.StopReason.CANCELLED))
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
    assert len(shown) <= 2 * 2 * MOST_FRAMES + 1
    assert "in test_a_recursion_is_shown_in_few_lines" in shown[0]
    assert shown[2 * MOST_FRAMES].endswith(" more frames]")
