"""Effects: orders of the machine, which the job's controller carries out."""

from __future__ import annotations

from dataclasses import dataclass, field

from .model import Outcome, Place, Plan, Slot
from .reasons import Reason


@dataclass(frozen=True)
class Effect:
    """Base of all effects."""


@dataclass(frozen=True)
class StartRank(Effect):
    """Start the function on a slot, with the place foreseen for it."""

    start: int
    slot: Slot
    place: Place


@dataclass(frozen=True)
class Publish(Effect):
    """Send a plan to its members."""

    plan: Plan


@dataclass(frozen=True)
class Abort(Effect):
    """End the generation of members: free them wherever they wait."""

    generation: int
    starts: tuple[int, ...]
    reason: Reason


@dataclass(frozen=True)
class Notify(Effect):
    """Announce a change to members. They agree on the step at which they leave."""

    generation: int
    starts: tuple[int, ...]


@dataclass(frozen=True)
class Release(Effect):
    """Release members from their elastic loop, because all of them have left it."""

    generation: int
    starts: tuple[int, ...]


@dataclass(frozen=True)
class SaveCommit(Effect):
    """Write the last commit of a rank that waits to its checkpoint, while it waits."""

    start: int


@dataclass(frozen=True)
class EndRank(Effect):
    """End a rank's function.

    Attributes
    ----------
    start : int
        Start of the function.
    slot : Slot
        Its slot.
    how : str
        ``leave`` (at the agreed step), ``stop`` (where it waits, or at its next commit or
        operation), ``cancel`` (now, wherever it is), ``evict`` (the job has gone on without it).
    reason : Reason
        The reason.
    save : float
        Seconds that it may take to write a checkpoint before, because no other rank has the state.
    """

    start: int
    slot: Slot
    how: str
    reason: Reason
    save: float = 0.0


@dataclass(frozen=True)
class RestartWorker(Effect):
    """Restart a worker's process if it has a nanny, because its rank cannot be ended."""

    slot: Slot
    reason: Reason


@dataclass(frozen=True)
class Record(Effect):
    """Entry of the job's history.

    Attributes
    ----------
    kind : str
        ``joined``, ``lost``, ``left``, ``formed``, ``reset``, ``cooldown``, ``restarted``,
        ``backend``, ``checkpoint``, ``warning``, ``waiting``, ``share``, ``notice``, ``finished``,
        ``failed``, ``stopped``.
    worker : str or None
        Address of the worker concerned.
    rank, start : int or None
        The rank concerned, and its start of the function.
    generation : int
        The generation at that time.
    reason : Reason or None
        More about it.
    name : str
        Dask's name of that worker.
    figures : dict of str to float
        Numbers that belong to it.
    """

    kind: str
    generation: int
    worker: str | None = None
    rank: int | None = None
    start: int | None = None
    reason: Reason | None = None
    name: str = ""
    figures: dict[str, float] = field(default_factory=dict, hash=False)


@dataclass(frozen=True)
class End(Effect):
    """End of the job: nothing of it runs any more."""

    outcome: Outcome
