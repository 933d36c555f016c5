"""Signals in workers' processes: interrupts, and those of batch systems."""

from __future__ import annotations

import os
import signal
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
    shielded = signals.after_shielding(lambda: "asked")
    assert shielded() == "asked"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    monkeypatch.setitem(sys.modules, "multiprocessing", SimpleNamespace(parent_process=object))
    assert shielded() == "asked"
    signal.raise_signal(signal.SIGINT)
    signal.raise_signal(signal.SIGHUP)


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
