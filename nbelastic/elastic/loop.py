"""Elastic loop, in which a training function survives changes of membership."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar, cast

from nbelastic.elastic.checkpoint.manager import CheckpointManager
from nbelastic.elastic.ranks.context import current
from nbelastic.elastic.ranks.session import Session
from nbelastic.elastic.ranks.timeline import timeline
from nbelastic.elastic.training_checks import TrainingChecks
from nbelastic.errors import CollectiveError, HostsUpdatedInterrupt, RanksDisagree
from nbelastic.messages import FRESH

if TYPE_CHECKING:
    from nbelastic.elastic.state import State

P = ParamSpec("P")
R = TypeVar("R")


def run(
    function: Callable[Concatenate[Any, P], R],
) -> Callable[Concatenate[Any, P], R]:
    """Decorate a training function to survive changes of membership.

    Horovod's ``hvd.elastic.run``. The function's first argument is a state
    (:class:`~nbelastic.elastic.State`). When a peer fails, the state is restored to its last
    commit. When ranks join or leave as planned, nothing is rolled back. In both cases the function
    is called again with the state of the new generation, on its members.

    Outside a job the function is called once, in a world of one rank.

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


UNASKED = (
    "the function raised HostsUpdatedInterrupt, but no rank is about to join or leave; commit() "
    "and check_host_updates() raise it when one is"
)


def _train(session: Session, state: State, call: Callable[[], object]) -> object:
    session.loops += 1
    checks = session.kept(TrainingChecks)
    with CheckpointManager(session, state, session.loops) as checkpoints:
        state._on_commit += (checks.committed,)
        checks.enter(state)
        try:
            return _train_on(session, state, call, checkpoints, checks)
        finally:
            checks.leave()
            state._on_commit = ()


def _train_on(
    session: Session,
    state: State,
    call: Callable[[], object],
    checkpoints: CheckpointManager,
    checks: TrainingChecks,
) -> object:
    import torch

    loop = session.loops
    foreseen: tuple[int, int] | None = (session.rank, session.size)
    failure: str | None = None  # no error, whose frames would keep the generation's buffers alive
    while True:
        with timeline.span("RESET"):
            plan = session.form(loop, state._step_bytes, failure)
        failure = None
        try:
            resized, behind = checkpoints.begin(plan)
            if resized or (session.rank, session.size) != foreseen:
                state.on_reset()
            foreseen = None  # later generations begin with a reset
            with timeline.span("STATE_TRANSFER"):
                state.align(behind)
            state.save()
            session.synchronized(plan, checkpoints.commits)
            checkpoints.begun = True
            checks.begun()
            # The function may fail in an evaluation, with gradients disabled.
            with torch.set_grad_enabled(torch.is_grad_enabled()):
                state._run_due()
                result = call()
            checks.ended()
            session.finish_loop()
            checkpoints.finish()
            return result
        except HostsUpdatedInterrupt:
            failure = None if session.leaves else UNASKED
        except RanksDisagree:
            raise  # on all ranks, because the program is at fault and would fail again
        except CollectiveError as error:
            failure = str(error)
        except Exception as error:
            if not state.make_room(error):
                raise
            failure = f"out of memory: {error}"
        session.timings.begin()
        session.timings.mark("aborted")
        if failure is None:
            failure = _leave(session, state)
            checkpoints.left = failure is None
        if failure is not None and session.version != FRESH:
            state.restore()
            session.restored()


def _leave(session: Session, state: State) -> str | None:
    """Leave a generation as planned, at a commit of all members that rolls nothing back."""
    try:
        state.leave()
    except CollectiveError as error:
        return str(error)
    state.save()
    session.committed()
    return None
