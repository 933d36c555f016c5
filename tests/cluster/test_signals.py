"""Signals in workers' processes: interrupts, and those of batch systems."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from nbelastic.cluster.worker import signals


@pytest.fixture(autouse=True)
def _handlers():
    numbers = (signal.SIGINT, signal.SIGHUP, *signals._USER_SIGNALS)
    before = {each: signal.getsignal(each) for each in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_nannys_worker_ignores_interrupts_and_no_other_process(monkeypatch):
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signals.ignore_interrupts()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    monkeypatch.setattr(signals, "multiprocessing", SimpleNamespace(parent_process=object))
    signals.ignore_interrupts()
    signal.raise_signal(signal.SIGINT)
    signal.raise_signal(signal.SIGHUP)


@pytest.mark.slow
def test_what_an_event_loops_thread_starts_is_shielded_and_the_main_thread_is_not():
    seen = []

    def start():
        signals.start_processes_shielded()
        code = "import signal; print(signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, []))"
        seen.append(subprocess.check_output([sys.executable, "-c", code]))

    start()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(start).result()
    assert seen == [b"False\n", b"True\n"]


# -- SIGUSR1 and SIGUSR2 ---------------------------------------------------------------------------


@pytest.mark.slow
def test_signals_of_batch_systems_are_handled_until_that_is_undone():
    """In the main thread only, and in no fork. A handler of the user's stays, also a later one."""
    heard = []
    with ThreadPoolExecutor(1) as pool:
        pool.submit(signals.leave_on_user_signals, heard.append).result()
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
    undo = signals.leave_on_user_signals(heard.append)
    signal.raise_signal(signal.SIGUSR2)
    signal.raise_signal(signal.SIGUSR1)
    if not (fork := os.fork()):  # is no worker
        signal.raise_signal(signal.SIGUSR1)
        os._exit(len(heard))
    assert os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1]) == 2
    own = []
    signal.signal(signal.SIGUSR2, lambda *_: own.append("later"))
    undo()
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
    signal.raise_signal(signal.SIGUSR2)
    undo = signals.leave_on_user_signals(heard.append)
    signal.raise_signal(signal.SIGUSR2)
    undo()
    assert (heard, own) == (["SIGUSR2", "SIGUSR1"], ["later", "later"])


@pytest.mark.slow
def test_nannies_of_one_process_pass_a_signal_on_to_each_worker():
    class Nanny:
        def __init__(self):
            self.process = subprocess.Popen(["sleep", "60"])

        def is_alive(self):
            return self.process.poll() is None

    nannies = [Nanny(), Nanny()]
    for nanny in 2 * nannies:
        signals.pass_on_user_signals(True, nanny)
    signals.pass_on_user_signals(False, nannies[0])
    signal.raise_signal(signal.SIGUSR1)
    assert nannies[1].process.wait(60) == -signal.SIGUSR1
    signals.pass_on_user_signals(True, nannies[0])
    signal.raise_signal(signal.SIGUSR2)
    assert nannies[0].process.wait(60) == -signal.SIGUSR2
    for nanny in nannies:
        signals.pass_on_user_signals(False, nanny)
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
