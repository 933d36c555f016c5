"""Operations under way: how they are awaited, completed and performed in order.

An operation is begun, ends, and is completed. Completing it is waiting for it: then its outcome is
delivered to the caller's tensors, and it counts. An operation that fails breaks the communicator,
after which no operation is completed any more, even if its data has arrived. Otherwise ranks would
disagree on what has happened, depending on the operation that each waited for first.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from nbelastic.collectives.abort_signal import AbortSignal, Wakeup
from nbelastic.collectives.communicator import Communicator
from nbelastic.errors import CollectiveError, RanksDisagree

if TYPE_CHECKING:
    from nbelastic.collectives.transport import Handle


class Operation(Protocol):
    """An operation under way."""

    def done(self) -> bool:
        """Return whether it has ended, successfully or not."""

    def wait(self, abort_signal: AbortSignal) -> bool:
        """Wait for its end or an abort; return whether it has succeeded.

        Raises ``CollectiveError`` if it has failed.
        """


class AsyncCommunicator(Communicator):
    """A communicator whose operations are begun, and completed later.

    The abort signal ends it, and is given by it when an operation fails.
    """

    def connect(self) -> Communicator:
        self.check()
        return self  # one that is negotiated is connected

    def begin_nothing(self) -> Handle:
        self.check()
        operation = QueuedOperation()
        operation.end(None)
        return OperationHandle(self, operation)

    def _complete(self, operation: Operation, deliver: Callable[[], object] | None) -> None:
        """Wait for an operation and deliver its outcome."""
        self._abort_signal.check()  # first: after an abort no operation is completed
        failure, kind = None, CollectiveError
        self._waiting = True
        try:
            succeeded = operation.wait(self._abort_signal)
        except CollectiveError as error:
            failure, kind = str(error), type(error)  # raised later, without this error as context
        finally:
            self._waiting = False
        if failure is not None:
            self._fail(failure, kind)
        if not succeeded:
            self._abort_signal.check()  # raises: only an abort ends it without success
        self._release(operation)
        if deliver is not None:
            deliver()
        self._completed += 1

    def _check_peers(self) -> None:
        """Check that each peer is a rank of this generation, as the last part of connecting.

        Gloo believes what a connection claims to be. It may come from another process, or be meant
        for an earlier group with the same port. So each rank sends a proof of its identity.
        """
        its = self._rendezvous
        for rank, token in enumerate(self.allgather_bytes(its.token(self.rank))):
            if token != its.token(rank):
                self._fail(f"the peer for rank {rank} belongs to another generation or another job")
        self.restart_count()

    def _release(self, _operation: Operation) -> None:
        """Let go of an operation that has succeeded."""

    def _fail(self, message: str, kind: type[CollectiveError] = CollectiveError) -> None:
        """Break the communicator because an operation failed, and raise."""
        if kind is not RanksDisagree:  # its message is the same on all ranks
            message = f"rank {self.rank} of generation {self.generation}: {message}"
        self._abort_signal.abort(message, kind=kind)
        self._abort_signal.check()


class OperationHandle:
    """A handle on an operation of a communicator. Refers to both until it is completed."""

    def __init__(
        self,
        communicator: AsyncCommunicator,
        operation: Operation,
        deliver: Callable[[], object] | None = None,
    ) -> None:
        self._its: tuple[Any, Any, Any] | None = communicator, operation, deliver

    def done(self) -> bool:
        """Return whether the operation has ended, or never will."""
        if self._its is None:
            return True
        communicator, operation, _ = self._its
        return communicator._abort_signal.reason is not None or bool(operation.done())

    def wait(self) -> None:
        """Complete the operation."""
        if self._its is None:
            return
        communicator, operation, deliver = self._its
        communicator._complete(operation, deliver)
        self._its = None  # frees what was lent


Task: TypeAlias = Callable[[timedelta], object]
"""Work for an :class:`OrderedExecutor`, within a limit; it raises ``RuntimeError`` on a failure."""


def abortable(abort_signal: AbortSignal, perform: Callable[[], object]) -> Task:
    """Return a task of a communicator, which a failure breaks."""

    def task(_limit: timedelta) -> None:
        try:
            abort_signal.check()  # it may have been queued before an abort
            perform()
        except Exception as error:  # any error: the other parts must not wait for this one
            kind = type(error) if isinstance(error, CollectiveError) else CollectiveError
            abort_signal.abort(str(error), kind=kind)  # before its end: one reason for all parts
            raise RuntimeError(str(error)) from None

    return task


class QueuedOperation(Operation):
    """An operation that an :class:`OrderedExecutor` performs."""

    def __init__(self) -> None:
        self._ended = False
        self._error: str | None = None
        self._wakeups: list[Wakeup[bool]] = []

    def end(self, error: str | None) -> None:
        """Set the outcome and wake the waiting thread."""
        self._error = error
        self._ended = True  # after the error: a waiting thread reads this first
        for wakeup in list(self._wakeups):
            wakeup.put(True)

    def done(self) -> bool:
        return self._ended

    def failure(self) -> str | None:
        """Return the error message if it has failed."""
        return self._error

    def wait(self, abort_signal: AbortSignal) -> bool:
        if not self._ended:
            with abort_signal.listen() as wakeup:
                # Added first, then looked again: :meth:`end` sets the outcome first, then wakes.
                self._wakeups.append(wakeup)
                if not self._ended and not wakeup.get():
                    return False
        if self._error is not None:
            raise CollectiveError(self._error)
        return True


class OrderedExecutor:
    """A thread for blocking tasks, performed in turn.

    For sends and receives Gloo has neither callbacks nor a query for completion, so a thread has to
    block in them. Messages of one direction between two ranks complete in order, hence one executor
    a direction serves them all.

    The thread starts with the first task, and ends once it is joined or the executor is dropped.
    When a group's connections are cut, the task under way fails, and so do all behind it: the
    group's owner joins the executors before it drops the group. The limit of a task counts from the
    end of the task before it.
    """

    def __init__(self, name: str, timeout_s: float) -> None:
        self._name = name
        self._timeout = timedelta(seconds=timeout_s)
        self._tasks: SimpleQueue[tuple[Task, QueuedOperation] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._last: QueuedOperation | None = None

    @property
    def idle(self) -> bool:
        """Whether no task is left."""
        return self._last is None or self._last.done()  # tasks end in their order

    def submit(self, task: Task) -> QueuedOperation:
        """Queue a task."""
        self._last = operation = QueuedOperation()
        self._tasks.put((task, operation))
        if self._thread is None:
            self._thread = threading.Thread(
                target=_perform, args=(self._tasks, self._timeout), name=self._name, daemon=True
            )
            self._thread.start()
        return operation

    def join(self, limit_s: float | None = None) -> bool:
        """End the thread after the last task, within the limit; return whether it has ended."""
        self._tasks.put(None)
        thread = self._thread
        # A task may drop the last reference, whose destructor then joins here.
        if thread is not None and thread is not threading.current_thread():
            thread.join(limit_s)
            return not thread.is_alive()
        return True

    def __del__(self) -> None:
        self._tasks.put(None)


def _perform(tasks: SimpleQueue[tuple[Task, QueuedOperation] | None], timeout: timedelta) -> None:
    while (queued := tasks.get()) is not None:
        task, operation = queued
        try:
            task(timeout)  # Gloo's own limit is the one for connecting
        except RuntimeError as error:
            operation.end(first_sentence(error))
        except Exception as error:  # a bug; the waiting rank must not hang because of it
            operation.end(repr(error))
        else:
            operation.end(None)
        del queued, task, operation  # what they lend must not wait for the next task


def first_sentence(error: BaseException) -> str:
    """Return Gloo's message without its position in the source and without advice."""
    text = str(error).strip()
    if text.startswith("["):
        text = text.partition("] ")[2] or text
    return text.partition(". ")[0].partition("\n")[0]
