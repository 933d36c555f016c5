"""Shield worker processes from interrupts that are meant for the kernel.

Runs in workers, in their main thread, and in the event loop that starts them. JupyterLab's
Interrupt, like Ctrl-C in a terminal, sends SIGINT to the kernel's whole process group. The workers
of a ``LocalCluster`` in the kernel belong to that group: each would close (dask/distributed#1925),
whichever cell was to be interrupted. Nannies live in the kernel itself, or in a ``dask worker``
process with a signal handler of its own; they still stop their workers, by messages. So a worker
under a nanny has no use for SIGINT.
"""

from __future__ import annotations

import multiprocessing
import signal
import threading
from multiprocessing import resource_tracker
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["ignore_interrupts", "start_processes_shielded"]


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
