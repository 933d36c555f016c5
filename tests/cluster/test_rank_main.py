"""A rank's main thread and memory."""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from nbelastic.cluster.worker.rank import main as room
from nbelastic.cluster.worker.rank.main import SIGNAL, SignalInterrupt


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


def test_nothing_is_raised_without_a_request_or_once_it_is_dropped(interrupt, monkeypatch) -> None:
    with interrupt.reachable():
        interrupt.nudge()
        signal.raise_signal(SIGNAL)
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


# -- memory that a rank had before: workers under a nanny give it back at once, ranks do not ------


MEASURE = """
import resource
import torch
from nbelastic.cluster.worker.rank.main import keep_freed_memory

def faults():  # pages of memory that came from the system: for gradients of 44 MB, 11,264
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(5):
        some = [torch.ones(1 << 20), torch.ones(10 << 20)]
        del some
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

print(faults())
keep_freed_memory()
for _ in range(4):
    faults()  # until all of it lies where it fits
print(faults())
"""


def measured(environment, code=MEASURE):
    if platform.libc_ver()[0] != "glibc":
        pytest.skip("there is no glibc")
    process = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return [int(line) for line in process.stdout.split()]


def test_a_rank_keeps_memory_for_its_next_step():
    before, inside = measured({"MALLOC_TRIM_THRESHOLD_": "65536"})
    assert before > 50_000
    assert inside < 2_000


def test_what_a_user_has_chosen_stays(monkeypatch):
    monkeypatch.setenv("MALLOC_TOP_PAD_", "131072")
    monkeypatch.setattr(room, "ctypes", None)  # it is not used
    room.keep_freed_memory()


FIRST_STEP = """
import os, resource, sys
import torch
import nbelastic.torch as hvd
from nbelastic.cluster.worker.rank.main import keep_freed_memory

hvd.init()
small = [bytearray(n % 5000) for n in range(50_000)]  # as code before the loop leaves them
model = torch.nn.Sequential(*(torch.nn.Linear(2048, 2048, bias=False) for _ in range(3)))
optimizer = torch.optim.Adam(model.parameters())
state = hvd.elastic.TorchState(model, optimizer)
for parameter in model.parameters():  # as if received
    entry = optimizer.state[parameter]
    entry["step"] = torch.tensor(1.0)
    entry["exp_avg"], entry["exp_avg_sq"] = torch.ones(2, *parameter.shape)
keep_freed_memory(state._step_bytes())
del small[::2]
more = [bytearray(n % 6000) for n in range(1_000)]  # as code after it takes them
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
model(torch.ones(4, 2048)).sum().backward()
optimizer.step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
os._exit(0 if sys.stdout.flush() is None else 1)
"""


def test_a_newcomer_has_the_memory_of_its_first_step_before_others_wait_for_it():
    pages = 3 * 2048 * 2048 * 4 // 4096  # of the gradients
    (faults,) = measured({}, FIRST_STEP)
    assert faults < pages / 2  # without it, more than all; first touches of libraries are in it
