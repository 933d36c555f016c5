"""Handle signals in workers: interrupts meant for the kernel, and termination.

Runs in workers, in their main thread, and in the event loop that starts them. JupyterLab's
Interrupt, like Ctrl-C in a terminal, sends SIGINT to the kernel's whole process group. The workers
of a ``LocalCluster`` in the kernel belong to that group: each would close (dask/distributed#1925),
whichever cell was to be interrupted. Nannies live in the kernel itself, or in a ``dask worker``
process with a signal handler of its own; they still stop their workers, by messages. So a worker
under a nanny has no use for SIGINT, nor for SIGHUP of a terminal that goes.

A nanny that gets SIGTERM closes its worker in good order. A ``dask worker`` without one only ends
its event loop, and its ranks with it. So there, ranks leave before Dask's handler is called.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")

HANDLERS_OF_DASK = "distributed._signals"
"""Module of the signal handler of a ``dask worker`` without a nanny."""


def after_shielding(probe: Callable[[], T]) -> Callable[[], T]:
    """Return a function that has a nanny's worker ignore SIGINT and SIGHUP, and calls ``probe()``.

    In any other process nothing is changed: one that was not started by ``multiprocessing`` handles
    signals itself. It travels to a process without nbelastic: a worker has its agent only when it
    has imported it, which can take seconds. ``client.run`` runs it in the worker's main thread.
    """

    def run() -> T:
        import multiprocessing
        import signal
        import threading

        in_main_thread = threading.current_thread() is threading.main_thread()
        if multiprocessing.parent_process() is not None and in_main_thread:
            for number in (signal.SIGINT, signal.SIGHUP):
                signal.signal(number, signal.SIG_IGN)
        return probe()

    return run


def leave_on_termination(leave: Callable[[Callable[[], None]], None]) -> Callable[[], None]:
    """Make SIGTERM call ``leave(go_on)`` in a ``dask worker`` without a nanny; return the undoing.

    It is called in the signal handler, and calls ``go_on()`` when ranks have left, in the main
    thread: what Dask does on SIGTERM. A second signal does that at once.
    """
    before: Any = signal.getsignal(signal.SIGTERM)

    def handle(signum: int, frame: Any) -> None:
        signal.signal(signal.SIGTERM, before)
        leave(lambda: before(signum, frame))

    def undo() -> None:
        if signal.getsignal(signal.SIGTERM) is handle:  # else another came
            signal.signal(signal.SIGTERM, before)

    in_main_thread = threading.current_thread() is threading.main_thread()  # no other thread can
    if in_main_thread and getattr(before, "__module__", "") == HANDLERS_OF_DASK:
        signal.signal(signal.SIGTERM, handle)
    return undo
