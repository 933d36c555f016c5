"""A rank's main thread and memory."""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys
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


def test_it_waits_outside_of_the_function_and_in_our_rooms_until_it_is_dropped(
    interrupt, monkeypatch
) -> None:
    def in_our_rooms() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(room, "_OURS", (__file__,))  # which obey by themselves
            interrupt.request(Told)

    with interrupt.reachable():
        interrupt.nudge()
        signal.raise_signal(SIGNAL)
        in_our_rooms()
        interrupt.drop()
        interrupt.nudge()
        in_our_rooms()
    signal.raise_signal(SIGNAL)  # one that was under way
    with pytest.raises(Told), interrupt.reachable():
        interrupt.nudge()  # as each heartbeat does
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
    words, variables = [sys.executable, "-c", code], {**os.environ, **environment}
    return [int(line) for line in subprocess.check_output(words, env=variables).split()]


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
optimizer = torch.optim.SGD(model.parameters(), 0.1)
state = hvd.elastic.TorchState(model, optimizer)
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
