"""Operations under way: how they are awaited, completed and performed in order.

An operation is begun, ends, and is completed. Completing it is waiting for it: then its outcome is
delivered to the caller's tensors, and it counts. An operation that fails breaks the communicator,
after which no operation is completed any more, even if its data has arrived. Otherwise ranks would
disagree on what has happened, depending on the operation that each waited for first.
"""

from __future__ import annotations

import dataclasses
import threading
import weakref
from collections import deque
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol

from nbelastic.collectives.abort_signal import Wakeup
from nbelastic.collectives.communicator import Communicator, connectors
from nbelastic.errors import CollectiveError, RanksDisagree

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from nbelastic.collectives.abort_signal import AbortSignal
    from nbelastic.collectives.communicator import Rendezvous
    from nbelastic.collectives.rendezvous.matching import MatchingClient
    from nbelastic.collectives.transport import Handle


class OperationFailed(Exception):
    """The transport's message for an operation that failed; `kind` is the error to raise."""

    kind: type[CollectiveError] = CollectiveError


class Operation(Protocol):
    """An operation under way."""

    def done(self) -> bool:
        """Return whether it has ended, successfully or not."""

    def wait(self, abort_signal: AbortSignal) -> bool:
        """Wait for its end or an abort; return whether it has succeeded.

        Raises :class:`OperationFailed` if it has failed.
        """


class AsyncCommunicator(Communicator):
    """A communicator whose operations are begun, and completed later.

    The abort signal ends it, and is given by it when an operation fails.
    """

    def __init__(self, rendezvous: Rendezvous, abort_signal: AbortSignal) -> None:
        self.rank = rendezvous.rank
        self.size = rendezvous.size
        self.generation = rendezvous.generation
        self._rendezvous = rendezvous
        self._abort_signal: AbortSignal = abort_signal
        self._waiting = False
        self._completed = 0
        self._subgroups: dict[str, Communicator] = {}

    @property
    def waiting(self) -> bool:
        return (
            self._waiting
            or self.waits_apart
            or any(each.waiting for each in list(self._subgroups.values()))
        )

    @property
    def completed(self) -> int:
        return self._completed + sum(each.completed for each in list(self._subgroups.values()))

    def restart_count(self) -> None:
        """Count operations from here on: those of a negotiation are no progress of the rank."""
        self._completed = 0

    def subgroup(self, ranks: Sequence[int], name: str) -> Communicator:
        known = self._subgroups.get(name)
        if known is not None:
            return known
        self.check()
        its = self._rendezvous
        made = connectors[0](
            dataclasses.replace(
                its, job=f"{its.job}/{name}", rank=ranks.index(self.rank), size=len(ranks)
            )
        )
        self._subgroups[name] = made
        try:
            connected = connect_part(self, made)
        except BaseException:
            del self._subgroups[name]
            raise
        connected.part_of = weakref.ref(self), name, list(ranks)
        self._subgroups[name] = connected
        return connected

    def close_subgroup(self, name: str) -> None:
        closed = self._subgroups.pop(name, None)
        if closed is not None:
            self._completed += closed.completed  # the sum of all must never become less
            closed.close()

    def close_subgroups(self) -> None:
        """Close all of them, in an orderly way, as the first part of closing this communicator."""
        subgroups, self._subgroups = self._subgroups, {}
        for each in subgroups.values():
            each.close()

    def matching_client(self) -> MatchingClient | None:
        from nbelastic.collectives.rendezvous.matching import MatchingClient

        return MatchingClient(self._rendezvous)

    def check(self) -> None:
        self._abort_signal.check()

    def abort(self, reason: str, kind: type[CollectiveError] = CollectiveError) -> None:
        self._abort_signal.abort(reason, kind=kind)

    def begin_nothing(self) -> Handle:
        self.check()
        return OperationHandle(self, _NoOperation())

    def _complete(self, operation: Operation, deliver: Callable[[], object] | None) -> None:
        """Wait for an operation and deliver its outcome."""
        self._abort_signal.check()
        failure, kind = None, CollectiveError
        self._waiting = True
        try:
            succeeded = operation.wait(self._abort_signal)
        except OperationFailed as error:
            failure, kind = str(error), error.kind
        finally:
            self._waiting = False
        if failure is not None:
            self._fail(failure, kind)
        if not succeeded:
            self._abort_signal.check()
        self._release(operation)
        if deliver is not None:
            deliver()
        self._completed += 1

    def _release(self, _operation: Operation) -> None:
        """Let go of an operation that has succeeded."""

    def _fail(self, message: str, kind: type[CollectiveError] = CollectiveError) -> None:
        """Break the communicator because an operation failed, and raise."""
        if kind is not RanksDisagree:  # its message is the same on all ranks
            message = f"rank {self.rank} of generation {self.generation}: {message}"
        self._abort_signal.abort(message, kind=kind)
        self._abort_signal.check()


def connect_part(whole: Communicator, made: Communicator) -> Communicator:
    """Connect a communicator of a part of `whole`; an end or a failure of either ends both.

    Closed in an orderly way, it leaves `whole` as it is.
    """
    # Weak references, because each signal keeps its callbacks as long as it lives.
    parent, child = weakref.ref(whole), weakref.ref(made)

    def end_child(reason: str, _orderly: bool) -> None:
        if (alive := child()) is not None:
            alive.abort(reason)

    def end_parent(reason: str, orderly: bool) -> None:
        if not orderly and (alive := parent()) is not None:
            alive.abort(reason)

    whole.on_abort(end_child)
    try:
        connected = made.connect()
    except BaseException:
        made.close()
        raise
    if connected is not made:
        child = weakref.ref(connected)
    connected.on_abort(end_parent)
    return connected


class OperationHandle:
    """A handle on an operation of a communicator. Refers to both until it is completed."""

    def __init__(
        self,
        communicator: AsyncCommunicator,
        operation: Operation,
        deliver: Callable[[], object] | None = None,
    ) -> None:
        self._communicator: AsyncCommunicator | None = communicator
        self._operation: Operation | None = operation
        self._deliver = deliver

    def done(self) -> bool:
        """Return whether the operation has ended, or never will."""
        communicator, operation = self._communicator, self._operation
        if communicator is None or operation is None:
            return True
        return communicator._abort_signal.reason is not None or operation.done()

    def wait(self) -> None:
        """Complete the operation."""
        communicator, operation = self._communicator, self._operation
        if communicator is None or operation is None:
            return
        communicator._complete(operation, self._deliver)
        self._communicator = self._operation = self._deliver = None


class _NoOperation:
    """An operation that moves no data."""

    def done(self) -> bool:
        return True

    def wait(self, _abort_signal: AbortSignal) -> bool:
        return True


class BlockingTask(Protocol):
    """Work for an :class:`OrderedExecutor`."""

    def wait(self, timeout: timedelta, /) -> object:
        """Perform the task, or wait for its end; raise ``RuntimeError`` on a failure."""


class AbortableTask:
    """Work of a communicator in an executor. A failure there breaks the communicator.

    `kind_of` leads from an error of the work to the type of the one to raise.
    """

    def __init__(
        self,
        abort_signal: AbortSignal,
        perform: Callable[[], object],
        kind_of: Callable[[Exception], type[CollectiveError]] = lambda _: CollectiveError,
    ) -> None:
        self._abort_signal = abort_signal
        self._perform = perform
        self._kind_of = kind_of

    def wait(self, _timeout: object) -> None:
        """Perform the task, unless there has been an abort."""
        try:
            self._abort_signal.check()
            self._perform()
        except CollectiveError:
            raise  # the abort signal has been given
        except Exception as error:  # any error: the other parts must not wait for this one
            self._abort_signal.abort(str(error), kind=self._kind_of(error))
            raise RuntimeError(str(error)) from None


class QueuedOperation:
    """An operation that an :class:`OrderedExecutor` performs."""

    def __init__(self) -> None:
        self._ended = False
        self._error: str | None = None
        self._wakeups: list[Wakeup[bool]] = []

    def end(self, error: str | None) -> None:
        """Set the outcome and wake the waiting thread."""
        self._error = error
        self._ended = True
        for wakeup in list(self._wakeups):
            wakeup.put(True)

    def done(self) -> bool:
        """Return whether it has ended, successfully or not."""
        return self._ended

    def failure(self) -> str | None:
        """Return the error message if it has failed."""
        return self._error

    def wait(self, abort_signal: AbortSignal) -> bool:
        """Wait for its end or an abort; return whether it has succeeded."""
        if not self._ended:
            with abort_signal.listen() as wakeup:
                self._wakeups.append(wakeup)
                if not self._ended and not wakeup.get():
                    return False
        if self._error is not None:
            raise OperationFailed(self._error)
        return True


class OrderedExecutor:
    """A thread for blocking tasks, performed in turn.

    For sends and receives Gloo has neither callbacks nor a query for completion, so a thread has to
    block in them. Messages of one direction between two ranks complete in order, hence one executor
    a direction serves them all. The same holds for messages through shared memory, and for the
    stages of a hierarchical allreduce.

    It treats subnormal numbers as the thread that submits the task, which is the one whose sums it
    adds: ``torch.set_flush_denormal`` holds for a thread and those that it starts.

    The thread ends when no task is left, and a new one starts with the next task. The lock guards
    that decision; it is held for a few instructions only. When a group's connections are cut, the
    task under way fails, and so do all behind it: the group's owner joins the executors before it
    drops the group. The limit of a task counts from the end of the task before it.
    """

    def __init__(self, name: str, timeout_s: float) -> None:
        self._name = name
        self._timeout = timedelta(seconds=timeout_s)
        self._lock = threading.Lock()
        self._queue: deque[tuple[BlockingTask, QueuedOperation, bool]] = deque()
        self._thread: threading.Thread | None = None
        self._last: QueuedOperation | None = None

    @property
    def idle(self) -> bool:
        """Whether no task is left."""
        return self._last is None or self._last.done()

    def submit(self, task: BlockingTask) -> QueuedOperation:
        """Queue a task."""
        self._last = operation = QueuedOperation()
        with self._lock:
            self._queue.append((task, operation, _flushes_subnormals()))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
        return operation

    def join(self, limit_s: float | None = None) -> bool:
        """Wait until no task is left, but no longer than the limit; return whether none is."""
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(limit_s)
            return not thread.is_alive()
        return True

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._queue:
                    self._thread = None
                    return
                task, operation, flushes = self._queue.popleft()
            if flushes != _flushes_subnormals():
                import torch

                torch.set_flush_denormal(flushes)
            try:
                task.wait(self._timeout)  # Gloo's own limit is the one for connecting
            except RuntimeError as error:
                operation.end(first_sentence(error))
            except Exception as error:  # a bug; the waiting rank must not hang because of it
                operation.end(repr(error))
            else:
                operation.end(None)
            del task, operation


_SUBNORMAL = 5e-324


def _flushes_subnormals() -> bool:
    """Return whether the calling thread takes subnormal numbers for zero."""
    return _SUBNORMAL == 0.0


def first_sentence(error: BaseException) -> str:
    """Return Gloo's message without its position in the source and without advice."""
    text = str(error).strip()
    if text.startswith("["):
        text = text.partition("] ")[2] or text
    return text.partition(". ")[0].partition("\n")[0]
