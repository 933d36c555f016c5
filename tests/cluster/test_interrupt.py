"""Where an order to end reaches a rank's main thread, and where it must not."""

from __future__ import annotations

import signal
import threading
import time
from typing import TYPE_CHECKING

import pytest

from nbelastic.cluster.worker.rank import main as room
from nbelastic.cluster.worker.rank.main import SIGNAL, SignalInterrupt

if TYPE_CHECKING:
    from collections.abc import Iterator


class Told(BaseException):
    """What the tests raise."""


@pytest.fixture
def interrupt() -> Iterator[SignalInterrupt]:
    before = signal.getsignal(SIGNAL)
    yield SignalInterrupt()
    signal.signal(SIGNAL, before)


def soon(action) -> threading.Thread:
    """Do something in a thread, as the one that reads orders does."""
    thread = threading.Thread(target=action)
    thread.start()
    return thread


@pytest.mark.parametrize("wait", [lambda: time.sleep(60), threading.Event().wait, None])
def test_the_function_is_interrupted_where_it_stands(interrupt, wait) -> None:
    here, told = threading.Event(), threading.Event()

    def order() -> None:
        here.wait()
        interrupt.request(Told)
        while not told.wait(0.05):  # as each heartbeat does: a signal just before a wait is lost
            interrupt.nudge()

    thread = soon(order)
    with pytest.raises(Told), interrupt.reachable():  # noqa: PT012 - where it is raised is open
        here.set()
        if wait is not None:
            wait()
        while True:
            pass
    told.set()
    thread.join()


def test_nothing_is_raised_without_a_request(interrupt) -> None:
    with interrupt.reachable():
        interrupt.nudge()
        signal.raise_signal(SIGNAL)


def test_a_request_that_is_dropped_in_time_is_not_raised(interrupt, monkeypatch) -> None:
    with interrupt.reachable():
        with monkeypatch.context() as patch:
            patch.setattr(room, "_OURS", (__file__,))  # it is not to be interrupted now
            interrupt.request(Told)
        interrupt.drop()
        interrupt.nudge()


def test_in_our_own_rooms_which_obey_by_themselves_it_waits(interrupt, monkeypatch) -> None:
    with pytest.raises(Told), interrupt.reachable():  # noqa: PT012 - likewise
        with monkeypatch.context() as patch:
            patch.setattr(room, "_OURS", (__file__,))
            interrupt.request(Told)
            interrupt.nudge()
        interrupt.nudge()  # as each heartbeat does
        pytest.fail("it was not raised")


def test_outside_of_the_function_it_waits(interrupt) -> None:
    with interrupt.reachable():
        pass
    interrupt.request(Told)
    signal.raise_signal(SIGNAL)  # one that was under way
    with pytest.raises(Told), interrupt.reachable():
        interrupt.nudge()
    with interrupt.reachable():
        interrupt.nudge()  # it has been obeyed


def test_our_own_rooms_are_where_a_rank_waits() -> None:
    from nbelastic.collectives import operations
    from nbelastic.elastic.ranks.session import Session

    for waits in (Session.form, operations.OperationHandle.wait):
        assert waits.__code__.co_filename.startswith(room._OURS)
