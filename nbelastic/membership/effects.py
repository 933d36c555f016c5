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
    """Announce a change to members, which agree on the step at which they leave."""

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
    """End a rank's function."""

    start: int
    slot: Slot
    # ``leave`` (at the agreed step), ``stop`` (where it waits, or at its next commit or operation),
    # ``cancel`` (now, wherever it is), ``evict`` (the job has gone on without it).
    how: str
    reason: Reason
    save: float = 0.0  # seconds to write a checkpoint first, because no other rank has the state


@dataclass(frozen=True)
class RestartWorker(Effect):
    """Restart a worker's process if it has a nanny, because its rank cannot be ended."""

    slot: Slot
    reason: Reason


@dataclass(frozen=True)
class Record(Effect):
    """Entry of the job's history."""

    # joined, lost, died, left, formed, reset, cooldown, restarted, backend, checkpoint, warning,
    # phases, straggler, waiting, share, notice, finished, failed, or stopped.
    kind: str
    generation: int  # at that time
    worker: str | None = None  # address
    rank: int | None = None
    start: int | None = None  # of the function, by that rank
    reason: Reason | None = None
    name: str = ""  # Dask's name of the worker
    figures: dict[str, float] = field(default_factory=dict, hash=False)


@dataclass(frozen=True)
class End(Effect):
    """End of the job: nothing of it runs any more."""

    outcome: Outcome
