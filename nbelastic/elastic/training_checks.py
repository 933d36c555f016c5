"""Checks of a training: its loop commits, and its ranks train the same parameters.

Both cost next to nothing and change nothing. Each rank sends samples of its parameters to the
driver, which compares the samples of one moment of one generation.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from nbelastic.elastic.ranks.session import Session
from nbelastic.messages import WeightsSampled

if TYPE_CHECKING:
    import torch

    from nbelastic.elastic.ranks.context import Context
    from nbelastic.elastic.state import State

# Commits of a generation after which parameters are sampled, in addition to the loop's end. Without
# a loop, operations since the parameters were broadcast.
MOMENTS = (1, 10, 100)
# Without a commit: most operations between ranks, of which each step has at least one, and seconds.
MOST_STEPS, MOST_SECONDS = 100, 60.0
MOST_OPTIMIZERS = 3  # of a rank that are kept to compare what they train
COUNT = 64  # number of values of a sample, about
NOT_FINITE = 1e300  # in the place of numbers that are not finite, which messages cannot carry

NO_COMMIT = (
    "no commit yet\n"
    f"The elastic loop of one rank at least has run for {MOST_STEPS} steps, a minute or to its end "
    "without state.commit(). A failure of any rank would throw all ranks back to where the loop "
    "began.\n"
    "Call state.commit() on all ranks after each step, which costs next to nothing, or every few "
    "steps."
)

_OF_BATCHES = re.compile(r"running_(mean|var)$")


class TrainingChecks:
    """Checks of a rank, within its elastic loop and without one.

    What is compared are the parameters of the loop's state, or those that were broadcast in a job
    without a loop. If there are none, it is what the latest optimizers train. They are kept until
    the rank ends, because a function may have dropped its own when it returns.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._state: State | None = None  # of the loop under way
        self._broadcast: list[torch.Tensor] = []
        self._optimizers: dict[int, torch.optim.Optimizer] = {}  # in the order of their last steps
        self._commits = 0  # of the present generation
        self._version = 0  # at the start of the loop
        # Where the loop was entered, or the parameters were broadcast.
        self._operation, self._time = 0, 0.0

    # -- in an elastic loop ------------------------------------------------------------------------

    def enter(self, state: State) -> None:
        """Enter a loop, and wait for its first commit."""
        self._state, self._broadcast = state, []
        self._version = max(self._session.version, 0)
        self._count_from_here()

    def begun(self) -> None:
        """Begin a generation, in which newcomers know no earlier optimizers."""
        self._commits = 0
        self._optimizers.clear()
        if self._session.version > self._version:
            self._count_no_more()  # others have committed, or the job whose checkpoint was loaded

    def committed(self) -> None:
        """Record a commit; sample the parameters at :data:`MOMENTS`."""
        if not self._commits:
            self._count_no_more()
        self._commits += 1
        if self._commits in MOMENTS:
            self._send(self._commits)

    def ended(self) -> None:
        """Record that the loop has ended on this rank."""
        self._send(0)
        if self._count in self._session.before_exchange:
            self._warn()

    def leave(self) -> None:
        """Leave the loop."""
        self._state = None
        self._count_no_more()

    def _warn(self) -> None:
        self._count_no_more()
        self._session.warn(NO_COMMIT)

    # -- without one -------------------------------------------------------------------------------

    def watch(self, tensors: list[torch.Tensor]) -> None:
        """Compare tensors that were broadcast, in the place of earlier ones."""
        if not self._session.loops:
            self._broadcast = tensors
            self._count_from_here()

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """Keep an optimizer that has stepped.

        Those in its attributes step for it, perhaps only on this rank's share of the parameters, as
        that of a ``ZeroRedundancyOptimizer`` does.
        """
        for each in (optimizer, *vars(optimizer).values()):
            self._optimizers.pop(id(each), None)
        self._optimizers[id(optimizer)] = optimizer
        if len(self._optimizers) > MOST_OPTIMIZERS:
            del self._optimizers[next(iter(self._optimizers))]

    def returned(self) -> None:
        """Record that the function has returned."""
        if not self._session.loops:
            self._send(0)

    # -- for both ----------------------------------------------------------------------------------

    def _count_from_here(self) -> None:
        self._count_no_more()
        self._operation, self._time = self._session.exchanges, time.monotonic()
        self._session.before_exchange += (self._count,)

    def _count_no_more(self) -> None:
        session = self._session
        session.before_exchange = tuple(e for e in session.before_exchange if e != self._count)

    def _count(self) -> None:
        """Count an operation between ranks."""
        operations = self._session.exchanges - self._operation
        if self._state is None:
            if operations in MOMENTS:
                self._send(-self._session.exchanges)
        elif operations > MOST_STEPS or time.monotonic() - self._time > MOST_SECONDS:
            self._warn()

    def _send(self, moment: int) -> None:
        """Send a sample to the driver, unless this rank is alone."""
        session = self._session
        if session.size == 1 or session.generation == 0:
            return
        try:
            values = () if self._state is None else self._state._sample()
            values = values or sample(self._broadcast or self._optimizers.values())
        except Exception:  # parameters of users' classes raise what they like
            return
        if values:
            finite = tuple(each if math.isfinite(each) else NOT_FINITE for each in values)
            place = (session.spec.start, session.generation, moment)
            session.report(WeightsSampled(*place, finite))


def watch(context: Context, named: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Compare tensors given to all ranks, in a job without an elastic loop.

    Statistics of batches are left out, since each rank has its own.
    """
    if isinstance(context, Session):
        tensors = [tensor for name, tensor in named if not _OF_BATCHES.search(name)]
        context.kept(TrainingChecks).watch(tensors)


def note_step(context: Context, optimizer: torch.optim.Optimizer) -> None:
    """Record a step of an optimizer, whose parameters are to be compared at the end.

    Outside a job, and on a rank alone, nothing is done.
    """
    if context.size > 1 and isinstance(context, Session):
        context.kept(TrainingChecks).stepped(optimizer)


def sample(things: Iterable[object]) -> tuple[float, ...]:
    """Return values from all over tensors, and the parameters that models and optimizers train.

    It takes time that does not depend on how many there are, and changes nothing.
    """
    import torch

    found: dict[int, torch.Tensor] = {}
    for thing in things:
        tensors: Iterable[torch.Tensor] = ()
        if isinstance(thing, torch.Tensor):
            tensors = [thing]
        elif isinstance(thing, torch.nn.Module):
            tensors = (each for each in thing.parameters() if each.requires_grad)
        elif isinstance(thing, torch.optim.Optimizer):
            parameters = (each for group in thing.param_groups for each in group["params"])
            tensors = (each for each in parameters if each.requires_grad)
        found.update((id(each), each) for each in tensors if _has_numbers(each))
    chosen = list(found.values())[:: max(1, len(found) // COUNT)]
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in chosen:
        count = min(tensor.numel(), max(1, COUNT // len(chosen)))
        places = torch.linspace(0, tensor.numel() - 1, count, dtype=torch.float64).long()
        values = tensor.detach().take(places.to(tensor.device)).float()
        by_device.setdefault(tensor.device, []).append(values)
    return tuple(value for each in by_device.values() for value in torch.cat(each).tolist())


def _has_numbers(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has numbers that can be picked out of its memory."""
    import torch

    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)  # others may be lazy
        and tensor.is_floating_point()
        and tensor.layout is torch.strided
        and tensor.device.type != "meta"
        and tensor.numel() > 0
    )
