"""The elastic loop: what makes a training function survive changes of membership."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar, cast

from nbelastic.elastic.checkpoint import keeping
from nbelastic.elastic.context import current
from nbelastic.elastic.session import Session
from nbelastic.errors import CollectiveError, HostsUpdatedInterrupt
from nbelastic.membership import FRESH

if TYPE_CHECKING:
    from collections.abc import Callable

    from nbelastic.elastic.checkpoint import Checkpoints
    from nbelastic.elastic.state import State

__all__ = ["run"]

P = ParamSpec("P")
R = TypeVar("R")


def run(
    function: Callable[Concatenate[Any, P], R],
) -> Callable[Concatenate[Any, P], R]:
    """Decorate a training function so that it goes on through changes of membership.

    Horovod's ``hvd.elastic.run``. The function's first argument is a state
    (:class:`~nbelastic.elastic.State`). When a peer fails, the state is restored to its last
    commit; when ranks join or leave as planned, nothing is rolled back; either way the function is
    called again with the state of the new generation, on the ranks that are members of it.

    Outside a job the function is called once, in a world of one.

    Examples
    --------
    >>> @run  # doctest: +SKIP
    ... def train(state):
    ...     for state.epoch in range(state.epoch, 10):
    ...         ...
    ...         state.commit()
    """

    @functools.wraps(function)
    def wrapper(state: State, /, *args: P.args, **kwargs: P.kwargs) -> R:
        def call() -> R:
            return function(state, *args, **kwargs)

        context = current()
        if isinstance(context, Session):
            return cast(R, _train(context, state, call))
        state.save()
        return call()

    return wrapper


def _train(session: Session, state: State, call: Callable[[], object]) -> object:
    loop = session.next_loop()
    with keeping(session, state, loop) as checkpoints:
        return _train_on(session, state, call, loop, checkpoints)


def _train_on(
    session: Session,
    state: State,
    call: Callable[[], object],
    loop: int,
    checkpoints: Checkpoints,
) -> object:
    session.warm_up = state.prepare_to_join
    foreseen = (session.rank, session.size)
    failure: CollectiveError | None = None
    first = True
    while True:
        detail = "" if failure is None else str(failure)
        plan = session.form(loop, failed=failure is not None, detail=detail)
        failure = None
        try:
            resized = checkpoints.load(plan)
            if not first or resized or (session.rank, session.size) != foreseen:
                state.on_reset()
            first = False
            state.align(checkpoints.behind(plan))
            state.save()
            session.synchronized(plan)
            checkpoints.begun()
            result = call()
            session.finish_loop()
            checkpoints.finish()
            return result
        except HostsUpdatedInterrupt:
            session.phases.begin()
            session.phases.note("aborted")
            failure = _leave(session, state)
            if failure is None:
                checkpoints.left()
        except CollectiveError as error:
            failure = error
            session.phases.begin()
            session.phases.note("aborted")
        if failure is not None:
            # Without its traceback, whose frames would keep the generation's buffers alive.
            failure = failure.with_traceback(None)
            if session.version != FRESH:
                state.restore()
                session.phases.note("restored")


def _leave(session: Session, state: State) -> CollectiveError | None:
    """Leave a generation as planned: one consistent cut on all members, nothing rolled back."""
    try:
        state.leave()
    except CollectiveError as error:
        return error
    state.save()
    session.committed()
    return None
