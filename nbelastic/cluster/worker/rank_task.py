"""Run the user's function as one rank of a job.

Runs in a worker, in the thread of the rank's task.
"""

from __future__ import annotations

import bdb
import contextlib
import contextvars
import functools
import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from distributed import get_worker

from nbelastic.cluster.dask_compat import leave_thread_pool
from nbelastic.cluster.payload import take_settings, unpack_call, unpack_modules
from nbelastic.cluster.rank_error import pack_error, summary_of
from nbelastic.cluster.sendable import MOST_BYTES
from nbelastic.cluster.wire import PLUGIN
from nbelastic.elastic.context import activate
from nbelastic.elastic.session import Session
from nbelastic.errors import CollectiveError, RankExit, RanksDisagree, StateMismatch
from nbelastic.membership import RankLeft, RankRaised, RankReturned
from nbelastic.pickling import dumps

from .allocator import steady_memory
from .environment import ForksEnded, prepared
from .modules import installed
from .output import NO_CONSOLE, captured, drain_pipes
from .partitions import PartitionFetcher
from .torch_hooks import advise, hooked_torch, trainers_of

if TYPE_CHECKING:
    from distributed import Worker

    from nbelastic.cluster.rank_error import PackedError
    from nbelastic.cluster.wire import JobPayload
    from nbelastic.elastic.runtime import RankSpec
    from nbelastic.membership import Event

    from .agent import Agent

__all__ = ["run_rank"]

logger = logging.getLogger(__name__)

_CAUSE: Any = BaseException.__dict__["__cause__"]
_CONTEXT: Any = BaseException.__dict__["__context__"]


def run_rank(spec: RankSpec, slot: str, address: str) -> None:
    """Run a job's function as one of its ranks.

    Parameters
    ----------
    spec : RankSpec
        The rank, without the address of its interface.
    slot : str
        Id of the worker that it was meant for. A task that Dask sends again, to a worker that has
        taken over the address, finds another id there and does nothing.
    address : str
        The worker's address, as the scheduler has it.
    """
    worker = get_worker()
    agent = cast("Agent | None", worker.plugins.get(PLUGIN))
    if agent is None or worker.id != slot:
        return
    with leave_thread_pool():
        _Rank(agent, replace(spec, bind=agent.bind(address)), worker).run()


class _Rank:
    """One start of the function, from attaching to its agent to detaching."""

    def __init__(self, agent: Agent, spec: RankSpec, worker: Worker) -> None:
        self._agent = agent
        self._spec = spec
        self._worker = worker
        self._key = (spec.job, spec.start)
        self._memory = contextlib.ExitStack()
        self._over = False

    def report(self, event: Event) -> None:
        """Send an event to the driver."""
        self._agent.report(self._key, event)

    def _finish(
        self, event: Event, result: bytes | None = None, error: PackedError | None = None
    ) -> None:
        """Send the last event of this rank; one that comes after it is not sent."""
        drain_pipes(self._print)  # the job may be over, and its output read, with this event
        if not self._over:
            self._agent.report(self._key, event, result, error)
            self._over = True

    def run(self) -> None:
        """Run the function and report how it ended, or what kept it from running."""
        try:
            self._run()
        except BaseException as error:  # nothing of the function's: all of that is reported there
            with contextlib.suppress(BaseException):  # it shows the error before, of any class
                text = "start %d of job %r cannot be run"
                logger.exception(text, self._spec.start, self._spec.job)
            self._finish_with(error)

    def _finish_with(self, error: BaseException) -> None:
        """Report an error of nbelastic's own, or of the worker's process."""
        start = self._spec.start
        try:
            packed = pack_error(error)
            self._finish(RankRaised(start, packed.summary), error=packed)
        except BaseException as another:  # it may be the packing or the sending that fails
            self._finish(RankRaised(start, summary_of(another)))

    def _run(self) -> None:
        # Memory is not kept before: what setting up needs once is given back.
        on_set_up = functools.partial(self._memory.enter_context, steady_memory())
        runtime = replace(self._agent.runtime, on_set_up=on_set_up)
        session = Session(self._spec, self, runtime)
        session.fetch_partition = PartitionFetcher(self._worker)
        if not self._agent.attach(self._key, session):
            return
        try:
            with self._memory, contextlib.ExitStack() as stack:
                stack.enter_context(prepared(self._agent.threads, self._worker.local_directory))
                stack.enter_context(captured(self._print))
                stack.enter_context(hooked_torch())
                stack.enter_context(activate(session))
                stack.callback(session.close)
                self._call(session)
        finally:
            self._agent.detach(self._key)

    def _print(self, text: str) -> None:
        self._agent.output(self._key, text)

    def _call(self, session: Session) -> None:
        with contextlib.ExitStack() as modules:  # an error needs them to be packed, too
            self._call_with(session, modules)

    def _call_with(self, session: Session, modules: contextlib.ExitStack) -> None:
        start = self._spec.start
        try:
            payload = self._agent.payload(self._spec.job)
            session.secret = payload.secret
            modules.enter_context(installed(unpack_modules(payload)))
            modules.callback(take_settings(payload.torch))
            with session.user_code():
                result = self._function(payload)
        except RankExit:
            self._finish(RankLeft(start))
        except BaseException as error:  # the user's, whatever it is: it goes to the kernel
            self._report_error(session, error)
        else:
            if session.before_return is not None:
                session.before_return()
            self._finish(RankReturned(start, isolated=trainers_of(session)), result=result)

    def _function(self, payload: JobPayload) -> bytes:
        """Unpickle and call the user's function; return its pickled result."""
        function, args, kwargs = unpack_call(payload)
        with ForksEnded():
            value = contextvars.copy_context().run(function, *args, **kwargs)
        try:
            result = dumps(value)
        except Exception as error:  # pickling runs code of any class
            kind = type(value).__name__
            raise TypeError(
                f"what the function returned (a {kind}) cannot be sent: {summary_of(error)}"
            ) from error
        if len(result) > MOST_BYTES:
            raise ValueError(
                f"what the function returned (a {type(value).__name__}) cannot be sent: it takes "
                f"{len(result) / 1e9:,.1f} GB, and a message carries {MOST_BYTES / 1e9:,.1f} GB at "
                "most; write it to a file, and return the file's name"
            )
        return result

    def _report_error(self, session: Session, error: BaseException) -> None:
        kind = type(error)  # isinstance() would ask the error for its class, too
        if issubclass(kind, bdb.BdbQuit):
            error.args = (NO_CONSOLE,)
        advise(error)
        packed = pack_error(error)
        everywhere = issubclass(kind, RanksDisagree)
        event = RankRaised(
            start=self._spec.start,
            error=packed.summary,
            collective=issubclass(kind, CollectiveError) and not everywhere,
            version=session.version,
            on_all_ranks=everywhere,
            interpreter=_is_interpreters(error),
            state_mismatch=issubclass(kind, StateMismatch),
        )
        self._finish(event, error=packed)


def _is_interpreters(error: BaseException | None) -> bool:
    """Return whether an error is, or comes from, one inside of Python itself.

    Two threads of a worker that parse at the same time are enough for one in CPython 3.11
    (``AST constructor recursion depth mismatch``), and many modules parse when they are imported.
    """
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if issubclass(type(error), SystemError):
            return True
        seen.add(id(error))
        error = _CAUSE.__get__(error) or _CONTEXT.__get__(error)
    return False
