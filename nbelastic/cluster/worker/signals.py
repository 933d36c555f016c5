"""Handle signals in workers: interrupts meant for the kernel, and termination.

Runs in workers, in their main thread, and in the event loop that starts them. JupyterLab's
Interrupt, like Ctrl-C in a terminal, sends SIGINT to the kernel's whole process group. The workers
of a ``LocalCluster`` in the kernel belong to that group: each would close (dask/distributed#1925),
whichever cell was to be interrupted. Nannies live in the kernel itself, or in a ``dask worker``
process with a signal handler of its own; they still stop their workers, by messages. So a worker
under a nanny has no use for SIGINT.

A nanny that gets SIGTERM closes its worker in good order. A ``dask worker`` without one only ends
its event loop, and its ranks with it. So there, ranks leave before Dask's handler is called.
"""

from __future__ import annotations

import multiprocessing
import signal
import threading
from multiprocessing import resource_tracker
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["ignore_interrupts", "leave_on_termination", "start_processes_shielded"]

HANDLERS_OF_DASK = "distributed._signals"
"""Module of the signal handler of a ``dask worker`` without a nanny."""


def ignore_interrupts() -> Callable[[], None]:
    """Have the process of a nanny's worker ignore SIGINT; return what undoes that.

    To be called in the process's main thread. In any other process nothing is changed: one that
    was not started by ``multiprocessing`` handles signals itself.
    """
    if multiprocessing.parent_process() is None or not _in_main_thread():
        return _nothing
    before: Any = signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "pthread_sigmask"):  # it may have been started shielded
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})

    def undo() -> None:
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN and before is not None:
            signal.signal(signal.SIGINT, before)

    return undo


def leave_on_termination(leave: Callable[[Callable[[], None]], None]) -> Callable[[], None]:
    """Have SIGTERM call ``leave(go_on)`` in a ``dask worker`` without a nanny; return the undoing.

    Parameters
    ----------
    leave : callable
        It is called in the signal handler, and has ``go_on()`` called when ranks have left, in the
        main thread: what Dask does on SIGTERM. A second signal does that at once.
    """
    before: Any = signal.getsignal(signal.SIGTERM)
    if getattr(before, "__module__", "") != HANDLERS_OF_DASK or not _in_main_thread():
        return _nothing

    def handle(signum: int, frame: Any) -> None:
        signal.signal(signal.SIGTERM, before)
        leave(lambda: before(signum, frame))

    def undo() -> None:
        if signal.getsignal(signal.SIGTERM) is handle:
            signal.signal(signal.SIGTERM, before)

    signal.signal(signal.SIGTERM, handle)
    return undo


def start_processes_shielded() -> None:
    """Have processes that this thread starts from now on begin with SIGINT blocked.

    The event loop of a ``LocalCluster`` calls it: until a new worker has its agent, an interrupt
    would end it while it starts, and its nanny would not start it again. The kernel's own
    interrupts go to its main thread as before; in a main thread nothing is changed.
    """
    if _in_main_thread() or not hasattr(signal, "pthread_sigmask"):
        return
    resource_tracker.ensure_running()  # its start, with the first process, would unblock SIGINT
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _nothing() -> None:
    """Undo nothing."""
