"""Work and futures of the process group, completed in the rank's thread.

A communicator's operations are completed by the thread that began them, so no other thread may
complete a future. C++ waits for futures in one place only: DistributedDataParallel's reducer, in a
callback at the end of backward. The queue adds a callback of its own before that one. It completes
all operations under way, and so their futures. An error leaves backward there with its type, and
the reducer never sees a future without a value, which would end the process.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed as dist

from nbelastic.errors import CollectiveError
from nbelastic.torch.ops.coordination.comparison import gather_numbers
from nbelastic.torch.ops.operation.tensor_operations import TensorOperation, Waitable

if TYPE_CHECKING:
    from nbelastic.collectives import Communicator
    from nbelastic.torch.ops.coordination.coordination import Coordination

_POLL_S = 0.0005
_NOTHING: TensorOperation[Any] = TensorOperation()


class OperationQueue:
    """Operations of a process group, in the order of their calls."""

    def __init__(self, timeout_s: float = 0.0) -> None:
        self.timeout_s = timeout_s  # of each operation, if shorter than the job's; 0 for none
        self.failures = 0  # backward passes that have failed
        self._awaited: list[OperationWork] = []  # their futures are out
        self._task = -1  # the backward pass that has the callback
        self._finishing = False
        self.error: BaseException | None = None  # the first of a future's callback, in backward
        self.coordination: Coordination | None = None  # of the last operation

    def launch_deferred(self, until: Callable[[], bool], timeout_s: float = 0.0) -> None:
        """Launch deferred operations as their comparisons end, until `until` holds."""
        its = self.coordination
        if its is None or not its.deferred:
            return
        end = time.monotonic() + (timeout_s or its.timeout_s)
        while its.deferred and not until() and time.monotonic() < end:
            its.launch_deferred()
            time.sleep(_POLL_S)

    @property
    def in_backward(self) -> bool:
        """Whether a backward pass is under way that completes futures at its end."""
        # Its end is not: a callback there, as of a static graph's reducer, waits at once.
        return (
            not self._finishing
            and torch._C._current_graph_task_id() != -1
            and torch._C._current_autograd_node() is not None
        )

    def complete_later(self, work: OperationWork) -> None:
        """Complete an operation at the end of the backward pass."""
        self._awaited.append(work)
        task = torch._C._current_graph_task_id()
        if task != self._task:
            self._task = task
            engine = torch.autograd.Variable._execution_engine
            engine.queue_callback(self._end_backward)

    def fail(self) -> None:
        """Count a backward pass that has failed, and forget its operations."""
        self.failures += 1
        self.drop()

    def drop(self) -> None:
        """Forget operations of a generation that is over."""
        self._awaited, self.error, self.coordination = [], None, None

    def _end_backward(self) -> None:
        self._task = -1
        self._finishing = True  # a future's callback that begins operations waits for them
        try:
            while self._awaited:
                self._awaited.pop(0).complete()
            if self.error is not None:
                raise self.error
        except BaseException:
            self.fail()
            raise
        finally:
            self._finishing = False


class OperationWork(dist.Work):
    """An operation, from the call to the values of its outputs and its future."""

    def __init__(
        self, queue: OperationQueue, operation: TensorOperation[Any], outputs: Sequence[Any] = ()
    ) -> None:
        super().__init__()
        self.operation = operation
        self.communicator: Communicator  # from the comparison on
        self._queue = queue
        self._handles: Sequence[Waitable] | None = None  # from the launch on
        self._outputs = list(outputs)
        self._future: _Future | None = None
        self.callback_error: BaseException | None = None  # the first of a future's callback
        self._error: BaseException | None = None
        self._completed = False
        self._source = -1

    @classmethod
    def of_several(cls, queue: OperationQueue, works: Sequence[OperationWork]) -> OperationWork:
        """Return the work of several operations, awaited as one."""
        work = cls(queue, _NOTHING)
        work._handles = works
        if works:
            work.communicator = works[-1].communicator  # which `complete` aborts, if late
        return work

    def launch(self) -> None:
        """Begin to move data; an error is kept for who waits."""
        communicator, operation = self.communicator, self.operation
        try:
            communicator.check()
            operation.load_on(communicator.rank, communicator.size)
            mine = operation.numbers
            numbers = gather_numbers(communicator, mine) if mine else ()
            self._handles = operation.launch(communicator, numbers)
        except BaseException as error:  # another operation's wait may be its caller
            self._error = error

    def check(self) -> None:
        """Raise the error of the operation, if it has failed."""
        if self._error is not None:
            raise self._error

    def complete(self, timeout_s: float = 0.0) -> None:
        """Wait for the operation, within a time if it is not 0, and store its result."""
        if self._completed:
            return
        self.check()
        timeout_s = timeout_s or self._queue.timeout_s
        try:
            self._queue.launch_deferred(self._has_ended, timeout_s)
            self.check()  # a launch that was deferred
            if self._handles is None:
                raise CollectiveError("the operation was not begun by all ranks in time")
            end = time.monotonic() + timeout_s
            # Polled, because a communicator's own wait knows the job's limit only.
            while timeout_s > 0.0 and not self._has_ended():
                if time.monotonic() > end:
                    limit = f"its timeout of {timeout_s:g} s"
                    raise CollectiveError(f"the operation did not end within {limit}")
                time.sleep(_POLL_S)
            for handle in self._handles:
                handle.wait()
                self._source = getattr(handle, "source", -1)  # only receives have it
            self.operation.store()
        except BaseException as error:
            late = isinstance(error, CollectiveError) and not self._has_ended()
            if late:  # others may have what this one has not
                self.communicator.abort(str(error))
            self._error = error
            raise
        self.operation = _NOTHING  # which holds no memory
        self._completed, self._handles = True, ()
        if self._future is not None:
            self._future.set_result(self._outputs)

    def _has_ended(self) -> bool:
        """Return whether waiting would return, or raise, at once."""
        if self._handles is None:
            return self._error is not None
        return all(handle.done() for handle in self._handles)

    # -- what torch calls --------------------------------------------------------------------------

    def wait(self, timeout: timedelta | None = None) -> bool:
        self.complete(0.0 if timeout is None else timeout.total_seconds())
        return True

    def is_completed(self) -> bool:
        if self._completed or self._error is not None:
            return True
        if not self._has_ended():
            return False
        try:
            self.complete()
        except Exception:  # `exception()` has it
            pass
        return True

    done = is_completed

    def is_success(self) -> bool:
        return self.is_completed() and self._error is None

    def exception(self) -> BaseException | None:
        return self._error

    def result(self) -> list[Any]:
        self.complete()
        return list(self._outputs)

    def synchronize(self) -> None:
        self.complete()

    block_current_stream = synchronize

    def source_rank(self) -> int:
        self.complete()
        return self._source

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future[Any]:
        # Outside of backward it is complete, because no callback would complete it later.
        if self._future is None:
            self._future = _Future(self)
            if self._completed:
                self._future.set_result(self._outputs)
            elif self._queue.in_backward:
                self._queue.complete_later(self)
            else:
                self.complete()
        return self._future


class _Future(torch.futures.Future[Any]):
    """A future, completed by waiting for it."""

    def __init__(self, work: OperationWork) -> None:
        tensors = [each for each in work._outputs if isinstance(each, torch.Tensor)]
        devices = {each.device for each in tensors if each.device.type != "cpu"}
        super().__init__(devices=list(devices) or None)  # torch refuses other devices' values
        self._work = work

    def wait(self) -> Any:
        if not self.done():
            self._work.complete()
            if not self.done() and self._work.callback_error is not None:  # none sets it any more
                raise self._work.callback_error
        return super().wait()

    def value(self) -> Any:
        return self.wait()

    def then(self, callback: Callable[[torch.futures.Future[Any]], Any]) -> Any:
        if self.done():
            return super().then(callback)
        work = self._work
        after = _Future(work)  # not torch's: an error would lose its type there

        def call(_: object) -> None:
            try:
                outcome = callback(self)
            except BaseException as error:  # raised at the end of backward, with its type
                work.callback_error = work.callback_error or error
                work._queue.error = work._queue.error or error
            else:
                after.set_result(outcome)

        self.add_done_callback(call)
        return after
