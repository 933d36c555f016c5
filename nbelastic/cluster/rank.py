"""The task that is a rank: what Dask runs in a worker's thread."""

from __future__ import annotations

import contextlib
import functools
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from distributed import get_worker

from nbelastic.elastic.checkpoint import CheckpointSpec
from nbelastic.elastic.context import activate
from nbelastic.elastic.port import RankSpec
from nbelastic.elastic.session import Session
from nbelastic.errors import CollectiveError, RankExit
from nbelastic.membership import RankFailed, RankLeft, RankReturned, unpack_place
from nbelastic.pickling import dumps

from .allocator import fill_heaps, steady_memory
from .capture import captured
from .environment import prepared
from .preflight import unpack_function
from .protocol import PLUGIN
from .remote import pack_error

if TYPE_CHECKING:
    from nbelastic.membership import Event

    from .agent import Agent

__all__ = ["run_rank"]


def run_rank(
    job: str,
    start: int,
    slot: str,
    place: dict[str, int],
    operation_timeout_s: float,
    backend: str = "auto",
    checkpoint: dict[str, Any] | None = None,
    state_bytes: int | None = None,
) -> None:
    """Run a job's function as one of its ranks.

    Parameters
    ----------
    job : str
        Name of the job.
    start : int
        Which start of the function this is.
    slot : str
        Identity of the worker that it was meant for. A task that Dask sends again, to a worker
        that has taken over the address, finds another one there and does nothing.
    place : dict
        The rank and sizes foreseen.
    operation_timeout_s : float
        How long an operation between ranks may take if nobody aborts it.
    backend : str, default "auto"
        How tensors are to travel between the ranks.
    checkpoint : dict, optional
        The fields of a :class:`~nbelastic.elastic.checkpoint.CheckpointSpec`.
    state_bytes : int, optional
        How large a state will come from those who train, if others do.
    """
    worker = get_worker()
    agent = cast("Agent | None", worker.plugins.get(PLUGIN))
    if agent is None or worker.id != slot:
        return
    spec = RankSpec(
        job=job,
        start=start,
        place=unpack_place(place),
        bind=agent.bind,
        operation_timeout_s=operation_timeout_s,
        backend=backend,
        checkpoint=None if checkpoint is None else CheckpointSpec(**checkpoint),
        state_bytes=state_bytes,
    )
    _Rank(agent, spec).run()


class _Rank:
    """One start of the function, from attaching to its agent to detaching."""

    def __init__(self, agent: Agent, spec: RankSpec) -> None:
        self._agent = agent
        self._spec = spec
        self._key = (spec.job, spec.start)
        self._memory = contextlib.ExitStack()

    def report(self, event: Event, attachment: object = None) -> None:
        """Send an event to the driver."""
        self._agent.report(self._key, event, attachment)

    def run(self) -> None:
        """Run the function and report how it ended."""
        # Memory is not kept before: what setting up needs once is given back.
        settled = functools.partial(self._memory.enter_context, steady_memory())
        means = replace(self._agent.means, settled=settled, filled=fill_heaps)
        session = Session(self._spec, self, means)
        if not self._agent.attach(self._key, session):
            return
        try:
            with self._memory, contextlib.ExitStack() as stack:
                stack.enter_context(prepared(self._agent.threads))
                stack.enter_context(captured(self._print))
                stack.enter_context(activate(session))
                stack.callback(session.close)
                self._call(session)
        finally:
            self._agent.detach(self._key)

    def _print(self, text: str) -> None:
        self._agent.output(self._key, text)

    def _call(self, session: Session) -> None:
        start = self._spec.start
        try:
            with session.user_code():
                result = self._function(session)
        except RankExit:
            self.report(RankLeft(start))
        except BaseException as error:  # the user's, whatever it is: it goes to the kernel
            self._report_error(session, error)
        else:
            self.report(RankReturned(start), result)

    def _function(self, session: Session) -> bytes:
        """Unpickle and call the user's function; return its pickled result."""
        payload = self._agent.payload(self._spec.job)
        session.secret, function, args, kwargs = unpack_function(payload)
        value = function(*args, **kwargs)
        try:
            result = dumps(value)
        except Exception as error:  # pickling runs code of any class
            kind = type(value).__name__
            raise TypeError(
                f"what the function returned (a {kind}) cannot be sent: {error}"
            ) from error
        return result

    def _report_error(self, session: Session, error: BaseException) -> None:
        details: dict[str, Any] = pack_error(error)
        event = RankFailed(
            start=self._spec.start,
            error=details["summary"],
            collective=isinstance(error, CollectiveError),
            version=session.version,
        )
        self.report(event, details)
