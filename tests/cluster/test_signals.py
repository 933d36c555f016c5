"""Signals in workers' processes: handled while there is an agent, and as before without it."""

from __future__ import annotations

import faulthandler
import os
import signal
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest

from nbelastic.cluster.worker import signals
from nbelastic.cluster.worker.signals import (
    ignore_interrupts,
    leave_on_user_signals,
    pass_on_user_signals,
    start_processes_shielded,
)
from tests.support.clusters import until


@pytest.fixture(autouse=True)
def _handlers():
    before = {each: signal.getsignal(each) for each in (signal.SIGINT, *signals._USER_SIGNALS)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def in_a_thread(function, *args):
    thread = threading.Thread(target=function, args=args)
    thread.start()
    thread.join()


def test_a_worker_ignores_interrupts_until_its_agent_is_gone(monkeypatch):
    """A process that no nanny has started takes them as before."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    ignore_interrupts()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    monkeypatch.setattr(signals, "multiprocessing", SimpleNamespace(parent_process=object))
    undo = ignore_interrupts()
    signal.raise_signal(signal.SIGINT)
    undo()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.slow
def test_what_an_event_loops_thread_starts_is_shielded_and_the_main_thread_is_not():
    seen = []

    def start():
        start_processes_shielded()
        code = "import signal; print(signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, []))"
        seen.append(subprocess.check_output([sys.executable, "-c", code]))

    start()
    in_a_thread(start)
    assert seen == [b"False\n", b"True\n"]


# -- SIGUSR1 and SIGUSR2 ---------------------------------------------------------------------------


@pytest.mark.slow
def test_signals_of_batch_systems_are_handled_until_that_is_undone():
    """In the main thread only, and in no fork."""
    heard = []
    in_a_thread(leave_on_user_signals, heard.append)
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
    undo = leave_on_user_signals(heard.append)
    signal.raise_signal(signal.SIGUSR2)
    signal.raise_signal(signal.SIGUSR1)
    if not (fork := os.fork()):  # is no worker
        signal.raise_signal(signal.SIGUSR1)
        os._exit(len(heard))
    assert os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1]) == 2
    undo()
    assert heard == ["SIGUSR2", "SIGUSR1"]
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL


def test_a_handler_of_the_user_s_stays_and_so_does_one_that_comes_later():
    heard, own = [], []
    signal.signal(signal.SIGUSR1, lambda *_: own.append("first"))
    undo = leave_on_user_signals(heard.append)
    signal.raise_signal(signal.SIGUSR1)
    later = signal.signal(signal.SIGUSR2, lambda *_: own.append("second"))
    assert callable(later), "ours"
    undo()
    signal.raise_signal(signal.SIGUSR2)
    assert own == ["first", "second"]
    assert heard == []


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="Linux shows them only")
def test_a_handler_in_c_stays():
    """As that of faulthandler, which Python's own table of handlers does not have."""
    heard = []
    with open(os.devnull, "w") as nowhere:
        faulthandler.register(signal.SIGUSR1, file=nowhere)
        try:
            undo = leave_on_user_signals(heard.append)
            assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
            os.kill(os.getpid(), signal.SIGUSR1)
            undo()
        finally:
            faulthandler.unregister(signal.SIGUSR1)
    assert heard == []


@pytest.mark.slow
def test_nannies_of_one_process_pass_a_signal_on_to_each_worker():
    class Nanny:
        def __init__(self):
            command = [sys.executable, "-c", "input()"]
            self.process = subprocess.Popen(command, stdin=subprocess.PIPE)

        def is_alive(self):
            return self.process.poll() is None

    nannies = [Nanny(), Nanny()]
    for nanny in nannies:
        pass_on_user_signals(True, nanny)
        pass_on_user_signals(True, nanny)
    pass_on_user_signals(False, nannies[0])
    signal.raise_signal(signal.SIGUSR1)
    assert nannies[1].process.wait(60) == -signal.SIGUSR1
    assert nannies[0].process.poll() is None
    pass_on_user_signals(True, nannies[0])
    signal.raise_signal(signal.SIGUSR1)
    until(lambda: nannies[0].process.poll() is not None, "it has got it")
    for nanny in nannies:
        pass_on_user_signals(False, nanny)
        nanny.process.stdin.close()
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
