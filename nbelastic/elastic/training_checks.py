"""Checks of a running elastic loop, for commits and for agreement of the ranks.

Both cost next to nothing and change nothing. Each rank sends samples of its parameters to the
driver, which compares the samples of one moment of one generation.
"""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from nbelastic.elastic.ranks.session import Session, warn
from nbelastic.messages import FRESH, WeightsSampled

if TYPE_CHECKING:
    import torch

    from nbelastic.elastic.ranks.context import Context
    from nbelastic.elastic.state import State
    from nbelastic.elastic.state.state import Sample

# Commits of a generation after which parameters are sampled, in addition to the loop's end. Without
# a loop, operations since the parameters were broadcast.
MOMENTS = (1, 10, 100)
# Without a commit: most operations between ranks, of which each step has at least one, and seconds.
MOST_STEPS, MOST_SECONDS = 100, 60.0
# Fewest steps of an optimizer whose parameters are compared although the state has none of them.
# There is one for each commit at least. A rank may train something else by itself: a copy of the
# model for a few steps, as in meta-learning.
REGULAR = 10
MOST_OPTIMIZERS = 3  # of a rank that are kept to compare what they train
NOT_FINITE = 1e300  # in the place of numbers that are not finite, which messages cannot carry

NO_COMMIT = (
    "no commit yet\n"
    f"The elastic loop of one rank at least has run for {MOST_STEPS} steps, a minute or to its end "
    "without state.commit(). A failure of any rank would throw all ranks back to where the loop "
    "began.\n"
    "Call state.commit() on all ranks after each step, which costs next to nothing, or every few "
    "steps."
)
EPOCH_WENT_BACK = (
    "state.epoch went back from {before} to {now}\n"
    "The elastic loop is called again after each change of membership, and has to go on from the "
    "state; epochs that are done are trained again.\n"
    "Write `for state.epoch in range(state.epoch, epochs):` instead of range(0, epochs)."
)


class TrainingChecks:
    """Checks of an elastic loop on a rank."""

    def __init__(self, session: Session, state: State) -> None:
        self._session, self._state, self._parameters = session, state, _check_of(session)
        self._began = time.monotonic()
        self._exchanges = 0
        self._commits = 0  # of the present generation
        self._is_new = session.version == FRESH
        self._waits = True  # until the first commit or the warning
        self._resumed = False
        self._epoch: int | None = None  # of the state, when the generation began
        session.before_exchange += (self._count,)

    def begun(self, *, resumed: bool = False) -> None:
        """Record the start of a generation's training, perhaps with a checkpoint's state.

        If it has, the function commits, and the loop may have ended before.
        """
        self._commits = 0
        self._resumed = resumed
        epoch = getattr(self._state, "epoch", None)
        self._epoch = epoch if isinstance(epoch, int) else None
        self._parameters.begin()
        if self._is_new and self._session.version > 0:
            self.close()  # other ranks have committed before this rank joined
        self._is_new = False

    def committed(self) -> None:
        """Record a commit; sample the parameters at :data:`MOMENTS`."""
        self._commits += 1
        if self._commits == 1:
            before, now = self._epoch, getattr(self._state, "epoch", None)
            if before is not None and isinstance(now, int) and now < before:
                warn(self._session, EPOCH_WENT_BACK.format(before=before, now=now))
        if self._waits:
            self.close()
        if self._commits in MOMENTS:
            self._sample(self._commits)

    def ended(self) -> None:
        """Record that the loop has ended on this rank."""
        self._sample(0)
        if self._waits and not self._resumed:
            warn(self._session, NO_COMMIT)

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
        steps = max(self._commits, REGULAR)
        self._parameters.send(moment, self._state._sample, besides=steps)


class ParameterCheck:
    """Samples of a rank's parameters, which the driver compares with other ranks' samples.

    It has the parameters that were broadcast in a job without an elastic loop, and the optimizers
    that have stepped: the latest few, in the order of their first steps. That is their order in the
    present generation, which is the same on all its ranks. They are kept until the rank ends,
    because a function may have dropped its own when it returns.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._broadcast: Callable[[], Sample] | None = None
        self._first = 0  # operation after the broadcast
        self._optimizers: dict[int, torch.optim.Optimizer] = {}
        self._steps: dict[int, int] = {}  # in the present generation
        self._within: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()

    def begin(self) -> None:
        """Begin a generation."""
        self._steps.clear()

    def watch(self, sample: Callable[[], Sample]) -> None:
        """Sample parameters that were broadcast, also after a few operations from here on."""
        self.close()
        self._broadcast, self._first = sample, self._session.exchanges
        self._session.before_exchange += (self._count,)

    def add(self, optimizer: torch.optim.Optimizer) -> None:
        """Add a step of an optimizer.

        Those in its attributes step for it, perhaps only on this rank's share of the parameters, as
        that of a ``ZeroRedundancyOptimizer`` does.
        """
        for each in vars(optimizer).values():
            if hasattr(each, "param_groups"):
                self._within.add(each)
                self._drop(id(each))
        if optimizer in self._within:
            return
        key = id(optimizer)
        steps = self._steps.get(key, 0)
        self._steps[key] = steps + 1
        if steps == 0:
            self._optimizers.pop(key, None)
            self._optimizers[key] = optimizer
            if len(self._optimizers) > MOST_OPTIMIZERS:
                self._drop(next(iter(self._optimizers)))

    def send(
        self, moment: int, own: Callable[[], tuple[Sample, tuple[str, ...]]], *, besides: int = 0
    ) -> None:
        """Send a sample, unless alone: `own` values, else the parameters of all optimizers.

        Send another one of what optimizers train in `besides` steps or more of this generation that
        do not average gradients, as far as it was made to be a model's.
        """
        from nbelastic.elastic.parameter_samples import sample

        session, found = self._session, self._optimizers
        if session.size == 1 or session.generation == 0:
            return
        plain = {key: each for key, each in found.items() if not hasattr(each, "_reducer")}
        regular = [each for key, each in plain.items() if 0 < besides <= self._steps.get(key, 0)]
        try:
            values, names = own()
            values, names = values or sample(found.values()), names or _kinds_of(plain.values())
            others = sample(regular, models_only=True)
        except Exception:  # parameters of users' classes raise what they like
            return
        place = (session.spec.start, session.generation, moment)
        for sent, kinds, also in ((values, names, False), (others, _kinds_of(regular), True)):
            if sent:
                finite = tuple(each if math.isfinite(each) else NOT_FINITE for each in sent)
                session.port.report(WeightsSampled(*place, finite, kinds, besides=also))

    def returned(self) -> None:
        """Record that the function has returned."""
        if not self._session.loops:
            self.send(0, self._own, besides=REGULAR if self._broadcast else 0)

    def close(self) -> None:
        """Count no more operations."""
        session = self._session
        session.before_exchange = tuple(e for e in session.before_exchange if e != self._count)

    def _own(self) -> tuple[Sample, tuple[str, ...]]:
        return () if self._broadcast is None else self._broadcast(), ()

    def _count(self) -> None:
        session = self._session
        if session.loops:
            self.close()
        elif session.exchanges - self._first in MOMENTS:
            self.send(-session.exchanges, self._own)

    def _drop(self, key: int) -> None:
        self._optimizers.pop(key, None)
        self._steps.pop(key, None)


def watch(context: Context, sample: Callable[[], Sample]) -> None:
    """Compare parameters that were broadcast to all ranks, in a job without an elastic loop.

    `sample` returns values of the parameters. It replaces an earlier one.
    """
    if isinstance(context, Session):
        _check_of(context).watch(sample)


def note_step(context: Context, optimizer: torch.optim.Optimizer) -> None:
    """Record a step of an optimizer, whose parameters are to be compared at the end.

    Outside a job, and on a rank alone, nothing is done. Parameters that were broadcast are compared
    earlier.
    """
    if context.size > 1 and isinstance(context, Session):
        _check_of(context).add(optimizer)


def _check_of(session: Session) -> ParameterCheck:
    if session.parameters is None:
        session.parameters = ParameterCheck(session)
    return session.parameters


def _kinds_of(optimizers: Iterable[object]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(type(each).__name__ for each in optimizers))
