"""Handle signals in workers: interrupts meant for the kernel, and termination.

Runs in workers, in their main thread, and in the event loop that starts them. JupyterLab's
Interrupt, like Ctrl-C in a terminal, sends SIGINT to the kernel's whole process group. The workers
of a ``LocalCluster`` in the kernel belong to that group: each would close (dask/distributed#1925),
whichever cell was to be interrupted. Nannies live in the kernel itself, or in a ``dask worker``
process with a signal handler of its own; they still stop their workers, by messages. So a worker
under a nanny has no use for SIGINT, nor for SIGHUP of a terminal that goes.

A nanny that gets SIGTERM closes its worker in good order. A ``dask worker`` without one only ends
its event loop, and its ranks with it. So there, ranks leave before Dask's handler is called.

Batch systems send SIGUSR1 or SIGUSR2 some time before they end a job, which would end a worker at
once. So while notices are watched for, a worker takes them as one, if it has no handler of its own.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

T = TypeVar("T")
Undo = Callable[[], None]

_USER_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)

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


def leave_on_termination(leave: Callable[[Callable[[], None]], None]) -> Undo:
    """Make SIGTERM call ``leave(go_on)`` in a ``dask worker`` without a nanny; return the undoing.

    It is called in the signal handler, and calls ``go_on()`` when ranks have left, in the main
    thread: what Dask does on SIGTERM. A second signal does that at once.
    """
    before: Any = signal.getsignal(signal.SIGTERM)

    def handle(signum: int, frame: Any) -> None:
        signal.signal(signal.SIGTERM, before)
        leave(lambda: before(signum, frame))

    is_dasks = getattr(before, "__module__", "") == HANDLERS_OF_DASK
    return _handle([signal.SIGTERM] if is_dasks else [], handle)


def leave_on_user_signals(leave: Callable[[str], None]) -> Undo:
    """Make SIGUSR1 and SIGUSR2 call ``leave(name)`` in their handler; return the undoing."""
    process = os.getpid()

    def handle(signum: int, _: Any) -> None:
        if os.getpid() == process:  # a fork inherits the handler, and is no worker
            leave(signal.Signals(signum).name)

    ours = [each for each in _USER_SIGNALS if signal.getsignal(each) is signal.SIG_DFL]
    return _handle(ours, handle)


def _handle(numbers: Iterable[int], handler: Any) -> Undo:
    """Set the handler of signals; return a function to undo this, except where another came."""
    in_main_thread = threading.current_thread() is threading.main_thread()
    ours = numbers if in_main_thread else ()  # no other thread can
    before = {number: signal.signal(number, handler) for number in ours}

    def undo() -> None:
        for number, former in before.items():
            if signal.getsignal(number) is handler and former is not None:  # None: one in C
                signal.signal(number, former)

    return undo
