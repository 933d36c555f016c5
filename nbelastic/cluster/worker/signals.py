"""Handle signals in workers: interrupts meant for the kernel, and termination.

Runs in workers, in their main thread, and in the event loop that starts them. JupyterLab's
Interrupt, like Ctrl-C in a terminal, sends SIGINT to the kernel's whole process group. The workers
of a ``LocalCluster`` in the kernel belong to that group: each would close (dask/distributed#1925),
whichever cell was to be interrupted. Nannies live in the kernel itself, or in a ``dask worker``
process with a signal handler of its own; they still stop their workers, by messages. So a worker
under a nanny has no use for SIGINT, nor for SIGHUP of a terminal that goes.

A nanny that gets SIGTERM closes its worker in good order. A ``dask worker`` without one only ends
its event loop, and its ranks with it. So there, ranks leave before Dask's handler is called.

Batch systems send SIGUSR1 or SIGUSR2 some time before they end a job, to all processes of a step or
to one. Both would end a worker and its nanny at once. So while notices are watched for, a worker
takes them as one, and a nanny passes them on to its workers; each only where the process has no
handler of its own.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
import weakref
from collections.abc import Callable, Iterable
from multiprocessing import resource_tracker
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from distributed import Nanny

T = TypeVar("T")
Undo = Callable[[], None]

_USER_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)

HANDLERS_OF_DASK = "distributed._signals"
"""Module of the signal handler of a ``dask worker`` without a nanny."""


def ignore_interrupts() -> None:
    """Make a nanny's worker ignore SIGINT and SIGHUP from now on; called in its main thread.

    In any other process nothing is changed: one that was not started by ``multiprocessing`` handles
    signals itself.
    """
    if multiprocessing.parent_process() is not None and _in_main_thread():
        for number in (signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # it may be shielded


def after_shielding(probe: Callable[[], T]) -> Callable[[], T]:
    """Return a function that has a nanny's worker ignore both and then returns ``probe()``.

    It travels to a process without nbelastic. A worker has its agent only when it has imported it,
    which can take seconds. ``client.run`` runs it in the worker's main thread.
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

    return _handle(filter(_ends_process, _USER_SIGNALS), handle)


_nannies: weakref.WeakSet[Nanny] = weakref.WeakSet()
"""The nannies of this process that pass on signals."""

_stop_passing: list[Undo] = []  # what undoes that, if anything does


def pass_on_user_signals(on: bool, dask_worker: Nanny) -> None:
    """Make a nanny's process pass SIGUSR1 and SIGUSR2 on to its workers, or stop that.

    Run in the nanny (`dask_worker`, as Dask calls the argument). Several nannies may share a
    process. A process that runs them in another thread than the main one, as that of a
    ``LocalCluster`` does, is left alone.
    """
    if not _in_main_thread():
        return
    if on:
        _nannies.add(dask_worker)
        if not _stop_passing:
            _stop_passing.append(_handle(filter(_ends_process, _USER_SIGNALS), _pass_on))
    else:
        _nannies.discard(dask_worker)
        if not _nannies and _stop_passing:
            _stop_passing.pop()()


def _pass_on(signum: int, _: Any) -> None:
    for nanny in list(_nannies):
        if nanny.is_alive():  # else its number may be another process's by now
            with contextlib.suppress(OSError):
                os.kill(nanny.process.pid, signum)  # type: ignore[union-attr]


def _handle(numbers: Iterable[int], handler: Any) -> Undo:
    """Set the handler of signals; return a function to undo this, except where another came."""
    ours = numbers if _in_main_thread() else ()  # no other thread can
    before = {number: signal.signal(number, handler) for number in ours}

    def undo() -> None:
        for number, former in before.items():
            if signal.getsignal(number) is handler and former is not None:  # None: one in C
                signal.signal(number, former)

    return undo


def _ends_process(signum: int) -> bool:
    return signal.getsignal(signum) is signal.SIG_DFL


def start_processes_shielded() -> None:
    """Block SIGINT in processes that this thread starts from now on.

    The event loop of a ``LocalCluster`` calls it: until a new worker has its agent, an interrupt
    would end it while it starts, and its nanny would not start it again. The kernel's own
    interrupts go to its main thread as before; in a main thread nothing is changed.
    """
    if not _in_main_thread():
        resource_tracker.ensure_running()  # its start, with the first process, would unblock SIGINT
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
