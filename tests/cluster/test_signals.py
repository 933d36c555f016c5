"""SIGINT in the processes of workers: ignored while there is an agent, and as before without it."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from types import SimpleNamespace

from nbelastic.cluster.worker import signals
from nbelastic.cluster.worker.signals import ignore_interrupts, start_processes_shielded

SHOW = "import signal; print(signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, []))"


def show() -> str:
    command = [sys.executable, "-c", SHOW]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_a_worker_ignores_interrupts_until_its_agent_is_gone(monkeypatch):
    monkeypatch.setattr(signals, "multiprocessing", SimpleNamespace(parent_process=object))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        undo = ignore_interrupts()
        signal.raise_signal(signal.SIGINT)
        undo()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_process_of_its_own_takes_interrupts_as_before():
    before = signal.getsignal(signal.SIGINT)
    ignore_interrupts()()
    assert signal.getsignal(signal.SIGINT) is before


def test_what_an_event_loops_thread_starts_is_shielded_and_the_main_thread_is_not():
    start_processes_shielded()
    seen = [show()]

    def start():
        start_processes_shielded()
        seen.append(show())

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    assert seen == ["False\n", "True\n"]
