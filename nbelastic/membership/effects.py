"""What the machine asks for. Carrying an effect out is the driver's affair."""

from __future__ import annotations

from dataclasses import dataclass

from .model import Outcome, Place, Plan, Slot

__all__ = ["Abort", "Effect", "End", "EndRank", "Notify", "Publish", "Record", "Release"]
__all__ += ["RestartWorker", "StartRank"]


@dataclass(frozen=True)
class Effect:
    """Base of all effects."""


@dataclass(frozen=True)
class StartRank(Effect):
    """Start the function on a slot, and tell it the place foreseen for it."""

    start: int
    slot: Slot
    place: Place


@dataclass(frozen=True)
class Publish(Effect):
    """Send a plan to its members."""

    plan: Plan


@dataclass(frozen=True)
class Abort(Effect):
    """Tell members that their generation is over: free them wherever they wait."""

    generation: int
    starts: tuple[int, ...]
    reason: str


@dataclass(frozen=True)
class Notify(Effect):
    """Tell members that a change is coming; they agree on the step at which they leave."""

    generation: int
    starts: tuple[int, ...]


@dataclass(frozen=True)
class Release(Effect):
    """Tell members that all of them have left their elastic loop."""

    generation: int
    starts: tuple[int, ...]


@dataclass(frozen=True)
class EndRank(Effect):
    """End a rank's function.

    Attributes
    ----------
    start : int
        Which start of the function.
    slot : Slot
        Where it runs.
    how : str
        ``leave`` (at the agreed step), ``stop`` (now, where it waits; else when it next looks),
        ``cancel`` (now, wherever it is), ``evict`` (the job has gone on without it).
    reason : str
        For people.
    """

    start: int
    slot: Slot
    how: str
    reason: str


@dataclass(frozen=True)
class RestartWorker(Effect):
    """Restart a worker's process where a nanny allows it: what runs in it cannot be ended."""

    slot: Slot
    reason: str


@dataclass(frozen=True)
class Record(Effect):
    """Something that belongs in the job's history.

    Attributes
    ----------
    kind : str
        ``joined``, ``lost``, ``left``, ``formed``, ``reset``, ``cooldown``, ``restarted``,
        ``backend``, ``checkpoint``, ``waiting``, ``finished``, ``failed``, ``stopped``.
    worker : str or None
        Address of the worker concerned.
    rank, start : int or None
        The rank concerned, and which start of the function it is.
    generation : int
        The generation at that time.
    detail : str
        For people.
    """

    kind: str
    generation: int
    worker: str | None = None
    rank: int | None = None
    start: int | None = None
    detail: str = ""


@dataclass(frozen=True)
class End(Effect):
    """The job is over and nothing of it runs any more."""

    outcome: Outcome
