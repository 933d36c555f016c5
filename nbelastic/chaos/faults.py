"""Define faults, by hand or at random: kind, rank and moment."""

from __future__ import annotations

import random as dice
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypedDict

from nbelastic.errors import OptionError
from nbelastic.messages import FaultOrder

if TYPE_CHECKING:
    from typing import Unpack


class Fault(FaultOrder, frozen=True, kw_only=True):
    """A fault; made by :func:`kill` and the other functions.

    Attributes
    ----------
    kind : str
        The name of the function that makes it.
    rank : int or None
        The rank that is hit; None for ``pause``, which hits the kernel.
    step : int or None
        When that rank has processed as many batches since its start (as ``job.status`` shows):
        exactly then, before its next one.
    generation : int or None
        When the first batch of this generation, or of a later one, has been processed.
    forming : bool
        In the middle of forming: when the next plan has reached the rank, which it is before that.
    after : float or None
        So many seconds after :func:`~nbelastic.chaos.inject`.
    seconds : float
        How long it lasts, or how much longer a step takes.
    steps : int
        How many steps it lasts.
    """

    def __post_init__(self) -> None:
        for name in ("rank", "step", "generation", "after", "seconds", "steps"):
            if (value := getattr(self, name)) is not None:
                if name not in ("after", "seconds") and type(value) is not int:
                    raise OptionError(f"{name}={value!r}: must be a whole number")
                if value < 0:
                    raise OptionError(f"{name}={value!r}: must not be negative")
        by_number = self.step is not None or self.generation is not None
        if by_number + self.forming + (self.after is not None) > 1:
            raise OptionError("step= (with generation=), forming= and after= exclude each other")
        if self.forming and self.kind in ("fail", "hang", "slow"):
            raise OptionError(f"forming=True: {self.kind} happens in the training function")


class When(TypedDict, total=False):
    """When a fault happens; see :class:`Fault`. Nothing of it: at once."""

    step: int
    generation: int
    forming: bool
    after: float


def kill(rank: int, **when: Unpack[When]) -> Fault:
    """Kill the process of a rank's worker (SIGKILL). A nanny starts a new one."""
    return Fault(kind="kill", rank=rank, **when)


def crash(rank: int, **when: Unpack[When]) -> Fault:
    """Kill a rank's own process (SIGKILL). Its worker starts it anew."""
    return Fault(kind="crash", rank=rank, **when)


def stop(rank: int, seconds: float = 0.0, **when: Unpack[When]) -> Fault:
    """Stop a rank's process and its worker's (SIGSTOP).

    Parameters
    ----------
    rank : int
        The rank that is hit.
    seconds : float, default 0
        After which it is continued (SIGCONT); 0 for never.
    **when
        ``step``, ``generation``, ``forming`` or ``after``; see :class:`Fault`.
    """
    return Fault(kind="stop", rank=rank, seconds=seconds, **when)


def close(rank: int, **when: Unpack[When]) -> Fault:
    """Close a rank's worker as Dask does, without notice; a nanny restarts it."""
    return Fault(kind="close", rank=rank, **when)


def leave(rank: int, **when: Unpack[When]) -> Fault:
    """Retire a rank's worker: the cluster is smaller by one from then on."""
    return Fault(kind="leave", rank=rank, **when)


def notice(rank: int, seconds: float = 120.0, **when: Unpack[When]) -> Fault:
    """Make a rank's worker say that its machine goes in `seconds`, as a spot machine does.

    The machine's other workers stay. After `seconds` the process is killed, should it still be
    there.
    """
    return Fault(kind="notice", rank=rank, seconds=seconds, **when)


def restart(rank: int, **when: Unpack[When]) -> Fault:
    """Restart a rank's worker by its nanny."""
    return Fault(kind="restart", rank=rank, **when)


def fail(rank: int, **when: Unpack[When]) -> Fault:
    """Raise :class:`InjectedFault` in the training function of a rank."""
    return Fault(kind="fail", rank=rank, **when)


def hang(rank: int, **when: Unpack[When]) -> Fault:
    """Let a rank hang in its training function, for ever, outside any collective."""
    return Fault(kind="hang", rank=rank, **when)


def slow(rank: int, seconds: float = 0.5, steps: int = 10, **when: Unpack[When]) -> Fault:
    """Let each of a rank's next `steps` batches take `seconds` longer."""
    return Fault(kind="slow", rank=rank, seconds=seconds, steps=steps, **when)


def partition(rank: int, **when: Unpack[When]) -> Fault:
    """Cut a rank's connections to the other ranks; its worker's to the scheduler stay.

    New connections can be made at once. A network that stays cut needs privileges that a worker
    does not have. Memory that it shares with others is broken for them all.
    """
    return Fault(kind="partition", rank=rank, **when)


def pause(seconds: float = 5.0, *, after: float | None = None) -> Fault:
    """Let the driver's thread, here in the kernel, stand still."""
    return Fault(kind="pause", seconds=seconds, after=after)


# -- at random ------------------------------------------------------------------------------------

KINDS = (
    *("kill", "crash", "stop", "close", "restart", "fail", "hang", "slow", "partition", "pause"),
)
"""What :func:`random` chooses from. ``leave`` is not among it: it makes the cluster smaller."""

SEVERAL = 0.15  # how often several are hit at once


@dataclass(frozen=True)
class RandomPlan:
    """Random faults; made by :func:`random`."""

    seed: int
    every: float
    kinds: tuple[str, ...] = KINDS

    def draws(self) -> Iterator[tuple[float, float, Fault]]:
        """Yield faults in order: the wait before each, and where in the ranks it hits (0 to 1)."""
        source = dice.Random(self.seed)
        together = False
        while True:
            wait = 0.0 if together else self.every * source.uniform(0.5, 1.5)
            kind = source.choice(self.kinds)
            where, length = source.random(), source.random()
            together = not together and source.random() < SEVERAL
            seconds = {
                "pause": 1.0 + 3.0 * length,
                "stop": max(4.0 * length - 2.0, 0.0),  # half are continued, soon or late
                "slow": 0.5 * length,
            }.get(kind, 0.0)
            forming = kind in ("kill", "crash", "close") and length < 0.25
            fault = Fault(kind=kind, forming=forming, seconds=seconds, steps=5 * (kind == "slow"))
            yield wait, where, fault


def random(seed: int, every: float, kinds: tuple[str, ...] = KINDS) -> RandomPlan:
    """Inject faults at random, for as long as the job runs.

    A rank is hit only while another one that holds the state is well: what this is for is to see a
    job get through, not to see it start over.

    Parameters
    ----------
    seed : int
        The same seed gives the same faults in the same order.
    every : float
        Seconds between two of them, in the mean.
    kinds : tuple of str, default KINDS
        What to choose from.
    """
    if not every > 0:
        raise OptionError(f"every={every!r}: must be above 0")
    unknown = set(kinds) - {*KINDS, "leave"}
    if unknown or not kinds:
        raise OptionError(f"kinds={kinds!r}: must be some of {(*KINDS, 'leave')}")
    return RandomPlan(seed, every, tuple(kinds))
