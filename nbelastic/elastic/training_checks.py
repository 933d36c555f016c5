"""Checks of a running elastic loop: that it commits, and that ranks agree.

Both cost next to nothing and change nothing. Each rank sends samples of its parameters to the
driver, which compares the samples of one moment of one generation.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

from nbelastic.elastic.ranks.session import Session, warn
from nbelastic.elastic.state import hooks_of
from nbelastic.messages import FRESH, WeightsSampled

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from nbelastic.elastic.ranks.context import Context
    from nbelastic.elastic.state import State
    from nbelastic.elastic.state.commit_store import Sample

MOMENTS = (1, 10, 100)
"""Commits of a generation after which parameters are sampled, in addition to the loop's end.

Without a loop, operations since the parameters were broadcast.
"""

MOST_STEPS = 100
"""Most operations between ranks without a commit; each step has at least one."""

MOST_SECONDS = 60.0
"""Most seconds of a loop without a commit."""

REGULAR = 10
"""Fewest steps of an optimizer whose parameters are compared although the state has none of them.

There is one for each commit at least. A rank may train something else by itself: a copy of the
model for a few steps, as in meta-learning.
"""

MOST_OPTIMIZERS = 3
"""Most optimizers of a rank that are kept to compare what they train."""

NOT_FINITE = 1e300
"""Replacement of numbers that are not finite, which messages cannot carry."""

NO_COMMIT = (
    "no commit yet\n"
    f"The elastic loop of one rank at least has run for {MOST_STEPS} steps or a minute without "
    "state.commit(). A failure of any rank would throw all ranks back to where the loop began.\n"
    "Call state.commit() on all ranks after each step, which costs next to nothing, or every few "
    "steps."
)

NEVER_COMMITTED = (
    "no commit was made\n"
    "The elastic loop of one rank at least ended without state.commit(): a failure of any rank "
    "would have thrown all ranks back to its beginning.\n"
    "Call state.commit() on all ranks after each step, which costs next to nothing, or every few "
    "steps."
)


MOVING = (
    "values in modules change that are part of no state: {names}\n"
    "They are in no state_dict. After a failure they are not rolled back, and ranks that join "
    "start with other values. It does not matter for what each forward() computes anew.\n"
    "Make them buffers (register_buffer), return them from get_extra_state() and "
    "set_extra_state(), or make them values of the state."
)

EPOCH_WENT_BACK = (
    "state.epoch went back from {before} to {now}\n"
    "The elastic loop is called again after each change of membership, and has to go on from the "
    "state; epochs that are done are trained again.\n"
    "Write `for state.epoch in range(state.epoch, epochs):` instead of range(0, epochs)."
)

MOST_NAMES = 5
"""Most names in that warning."""


class TrainingChecks:
    """Checks of one elastic loop on one rank."""

    def __init__(self, session: Session, state: State) -> None:
        self._session = session
        self._state = state
        self._hooks = hooks_of(state)
        self._began = time.monotonic()
        self._exchanges = 0
        self._commits = 0  # of the present generation
        self._is_new = session.version == FRESH
        self._waits = True  # until the first commit or the warning
        self._resumed = False
        self._epoch: int | None = None  # of the state, when the generation began
        self._moving: dict[str, object] | None = {}  # None after the warning
        session.before_exchange += (self._count,)

    def begun(self, *, resumed: bool = False) -> None:
        """Record that a generation trains, and whether it may have a checkpoint's state.

        If it has, the function commits, and the loop may have ended before.
        """
        self._commits = 0
        self._resumed = resumed
        epoch = getattr(self._state, "epoch", None)
        self._epoch = epoch if isinstance(epoch, int) else None
        if self._session.stepped is not None:
            self._session.stepped.begin()
        if self._is_new and self._session.version > 0:
            self.close()  # other ranks have committed before this rank joined
        self._is_new = False

    def committed(self) -> None:
        """Record a commit; sample the parameters if it is one of :data:`MOMENTS`."""
        self._commits += 1
        if self._commits == 1:
            self._check_epoch()
        if self._waits:
            self.close()
        if self._commits in MOMENTS:
            self._sample(self._commits)
            self._sample_besides(self._commits)
            self._look_for_moving()

    def _check_epoch(self) -> None:
        """Warn of a loop that begins at the first epoch again, although some are done."""
        before, now = self._epoch, getattr(self._state, "epoch", None)
        if before is not None and isinstance(now, int) and now < before:
            warn(self._session, EPOCH_WENT_BACK.format(before=before, now=now))

    def _look_for_moving(self) -> None:
        """Warn of values in modules that are different from those at the sample before."""
        session, before = self._session, self._moving
        if before is None or session.size == 1 or session.rank != 0:
            return
        try:
            self._moving = now = self._hooks.moving_values()
        except Exception:  # attributes of users' classes raise what they like
            return
        names = [name for name, token in now.items() if before.get(name, token) != token]
        if names and self._commits > MOMENTS[0]:
            self._moving = None
            more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
            warn(session, MOVING.format(names=", ".join(names[:MOST_NAMES]) + more))

    def ended(self) -> None:
        """Record that the loop has ended on this rank."""
        self._sample(0)
        self._sample_besides(0)
        if self._waits and not self._resumed:
            warn(self._session, NEVER_COMMITTED)

    def close(self) -> None:
        """Stop waiting for a commit."""
        self._waits = False
        session = self._session
        session.before_exchange = tuple(e for e in session.before_exchange if e != self._count)

    def _count(self) -> None:
        self._exchanges += 1
        late = time.monotonic() - self._began > MOST_SECONDS
        if late or self._exchanges > MOST_STEPS:
            self.close()
            warn(self._session, NO_COMMIT)

    def _sample(self, moment: int) -> None:
        _send(self._session, moment, self._sample_of_state)

    def _sample_besides(self, moment: int) -> None:
        _send_besides(self._session, moment, max(self._commits, REGULAR))

    def _sample_of_state(self) -> tuple[Sample, tuple[str, ...]]:
        """Return what the state trains; if it has no parameters, what optimizers have stepped."""
        values, plain = self._hooks.sample()
        stepped = self._session.stepped
        if stepped is None:
            return values, plain
        return (values, plain or stepped.plain()) if values else stepped.sample()


def watch(context: Context, sample: Callable[[], Sample]) -> None:
    """Compare parameters that were broadcast to all ranks, in a job without an elastic loop.

    `sample` returns values of the parameters. It replaces an earlier one.
    """
    if isinstance(context, Session):
        if isinstance(context.before_return, _Watch):
            context.before_return.close()
        context.before_return = _Watch(context, sample)


class SteppedOptimizers:
    """Optimizers that have stepped on a rank, the latest few, in the order of their first steps.

    That is their order in the present generation, which is the same on all its ranks. They are kept
    until the rank ends, because a function may have dropped its own when it returns.
    """

    def __init__(self) -> None:
        self._optimizers: dict[int, torch.optim.Optimizer] = {}
        self._steps: dict[int, int] = {}  # in the present generation

    def begin(self) -> None:
        """Begin a generation."""
        self._steps.clear()

    def add(self, optimizer: torch.optim.Optimizer) -> None:
        """Add a step of an optimizer."""
        key = id(optimizer)
        steps = self._steps.get(key, 0)
        self._steps[key] = steps + 1
        if steps == 0:
            self._optimizers.pop(key, None)
            self._optimizers[key] = optimizer
            if len(self._optimizers) > MOST_OPTIMIZERS:
                oldest = next(iter(self._optimizers))
                del self._optimizers[oldest]
                self._steps.pop(oldest, None)

    def sample(self) -> tuple[Sample, tuple[str, ...]]:
        """Return values of their parameters, and the kinds of those that are not distributed."""
        from nbelastic.elastic.parameter_samples import sample

        return sample(self._optimizers.values()), self.plain()

    def plain(self) -> tuple[str, ...]:
        """Return the kinds of those that are not distributed."""
        found = self._optimizers.values()
        names = [type(each).__name__ for each in found if not hasattr(each, "_reducer")]
        return tuple(dict.fromkeys(names))

    def sample_regular(self, steps: int) -> tuple[Sample, tuple[str, ...]]:
        """Return the same of those that are not distributed and train parameters of models.

        They must have made so many steps in the present generation.
        """
        from nbelastic.elastic.parameter_samples import sample_of_parameters

        found = [
            each
            for key, each in self._optimizers.items()
            if self._steps.get(key, 0) >= steps and not hasattr(each, "_reducer")
        ]
        names = tuple(dict.fromkeys(type(each).__name__ for each in found))
        return sample_of_parameters(found), names


def note_step(context: Context, optimizer: torch.optim.Optimizer) -> None:
    """Record that an optimizer has stepped, so that its parameters are compared at the end.

    Outside a job, and on a rank alone, nothing is done. Parameters that were broadcast are compared
    earlier.
    """
    if context.size == 1 or not isinstance(context, Session):
        return
    if context.stepped is None:
        context.stepped = stepped = SteppedOptimizers()
        if context.before_return is None:
            context.before_return = lambda: _sample_at_end(context, stepped)
    context.stepped.add(optimizer)


def _sample_at_end(session: Session, stepped: SteppedOptimizers) -> None:
    if not session.loops:
        _send(session, 0, stepped.sample)


class _Watch:
    """Samples of parameters after certain operations, the same on all ranks, and at the end."""

    def __init__(self, session: Session, sample: Callable[[], Sample]) -> None:
        self._session = session
        self._sample = sample
        self._first = session.exchanges
        session.before_exchange += (self._count,)

    def __call__(self) -> None:
        if not self._session.loops:
            _send(self._session, 0, self._sample_with_names)
            _send_besides(self._session, 0, REGULAR)

    def close(self) -> None:
        session = self._session
        session.before_exchange = tuple(e for e in session.before_exchange if e != self._count)

    def _count(self) -> None:
        session = self._session
        if session.loops:
            self.close()
        elif session.exchanges - self._first in MOMENTS:
            _send(session, -session.exchanges, self._sample_with_names)

    def _sample_with_names(self) -> tuple[Sample, tuple[str, ...]]:
        stepped = self._session.stepped
        return self._sample(), () if stepped is None else stepped.plain()


def _send_besides(session: Session, moment: int, steps: int) -> None:
    """Send a sample of what optimizers train regularly that are not distributed."""
    stepped = session.stepped
    if stepped is not None:
        _send(session, moment, lambda: stepped.sample_regular(steps), besides=True)


def _send(
    session: Session,
    moment: int,
    sample: Callable[[], tuple[Sample, tuple[str, ...]]],
    *,
    besides: bool = False,
) -> None:
    """Send a sample of a rank's parameters, if it has any and there are other ranks."""
    if session.size == 1 or session.generation == 0:
        return
    try:
        values, plain = sample()
    except Exception:  # parameters of users' classes raise what they like
        return
    if values:
        values = tuple(each if math.isfinite(each) else NOT_FINITE for each in values)
        place = (session.spec.start, session.generation, moment)
        session.port.report(WeightsSampled(*place, values, plain, besides))
