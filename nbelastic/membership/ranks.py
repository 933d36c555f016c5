"""One start of the function, and the count of a job's ranks by their kind.

Every number follows from the ranks themselves. Those of each kind are counted as ranks are added,
removed and changed, so that no event costs more in a larger job. They are counted anew when a
machine is read back.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple, cast

from nbelastic.messages import FRESH, WORKER_LEAVING, AnyReason, Beat, CodeLine, Number, Slot


class Phase(str, enum.Enum):
    """Phase of a job."""

    GATHERING = "gathering"  # ranks become ready for the next generation
    FORMING = "forming"  # the ranks of a plan connect
    RUNNING = "running"
    FINISHING = "finishing"  # all have left the elastic loop
    ENDING = "ending"  # the outcome is known and ranks are being ended
    ENDED = "ended"


class Stage(str, enum.Enum):
    """Stage of a rank."""

    STARTING = "starting"  # until it reports ready
    READY = "ready"  # it waits for a plan
    MEMBER = "member"  # of the present generation
    DONE = "done"  # with its elastic loop, and waits for the others
    RETURNED = "returned"  # from its function
    ENDING = "ending"  # from the order to end until it has ended

    __hash__ = str.__hash__  # an Enum's takes longer


class RankKind(NamedTuple):
    """The fields of a rank by which ranks are counted."""

    stage: Stage
    leaving: bool
    planned: int
    formed: bool
    loop: int
    synced: bool

    @property
    def stays(self) -> bool:
        """Whether the rank neither ends nor leaves."""
        return not self.leaving and self.stage != Stage.ENDING


_COUNTED = frozenset(RankKind._fields)
_kind_of = cast("Callable[[Rank], tuple[object, ...]]", attrgetter(*RankKind._fields))


@dataclass(eq=False)
class Rank:
    """One start of the function."""

    start: int
    slot: Slot
    since: float  # when it entered its stage
    stage: Stage = Stage.STARTING
    version: Number = FRESH
    synced: bool = False  # it has a version
    loop: int = 0
    store: tuple[str, int] = ("", 0)
    unreached: tuple[int, ...] = ()
    line: CodeLine | None = None  # of user code, at which it waited last
    part: bool = False  # it waits to begin an operation of some ranks
    planned: int = 0  # newest generation that it was planned into
    formed: bool = False
    leaving: bool = False  # it was asked to leave
    leave_sent: bool = False  # the order to leave was sent
    leave_reason: AnyReason = WORKER_LEAVING
    leave_deadline: float = 0.0  # until then it stays, if no other rank holds the state
    gone_at: float = 0.0  # when its worker is gone
    progress: int = 0
    waiting: bool = False
    operations: int = 0
    operation: str = ""
    progress_at: float = 0.0
    heartbeat_at: float = 0.0
    version_at_join: Number = 0
    evicted: bool = False  # it is at fault, and the others go on without it
    exits: bool = False  # its function has returned, and its process has not ended

    counted_by = cast("Ranks | None", None)  # updated by every change of a counted field
    kind = cast("RankKind", None)  # by which it is counted there

    def __setattr__(self, name: str, value: object) -> None:
        ranks = self.counted_by if name in _COUNTED else None
        if ranks is None:
            self.__dict__[name] = value
        elif getattr(self, name) != value:
            ranks.discount(self, moves=name == "stage")
            self.__dict__[name] = value
            ranks.count(self)

    def note_heartbeat(self, now: float, beat: Beat) -> None:
        """Note a heartbeat; it may come after a newer event."""
        self.heartbeat_at = now
        if beat.generation == self.planned and self.stage == Stage.MEMBER:
            self.operations, self.operation = beat.operations, beat.operation
        elif self.stage == Stage.STARTING:
            self.operation = beat.operation  # for which its process waits
        if (beat.progress, beat.waiting) != (self.progress, self.waiting):
            self.progress_at, self.progress, self.waiting = now, beat.progress, beat.waiting

    def waits(self, phase: Phase) -> bool:
        """Return whether the rank waits for others, in a collective or at its loop's end."""
        return self.waiting or (self.stage == Stage.DONE and phase == Phase.RUNNING)


class Ranks(dict[int, Rank]):
    """Ranks by start, changed by assignment and :meth:`pop` only."""

    def __init__(self, ranks: Iterable[Rank], slots: Mapping[str, Slot]) -> None:
        super().__init__()
        self._slots = slots
        self.stages: dict[Stage, dict[int, Rank]] = {stage: {} for stage in Stage}
        self.on_slot: dict[str, dict[int, Rank]] = {}
        self.vacant: dict[str, None] = dict.fromkeys(self._slots)  # slots without a rank
        self._kinds: dict[RankKind, int] = {}  # number of ranks of each kind; there are few kinds
        for rank in ranks:
            self[rank.start] = rank

    def __setitem__(self, start: int, rank: Rank) -> None:
        super().__setitem__(start, rank)
        object.__setattr__(rank, "counted_by", self)
        self.on_slot.setdefault(rank.slot.id, {})[start] = rank
        self.vacant.pop(rank.slot.id, None)
        self.count(rank)

    def pop(self, start: int, *default: None) -> Rank:  # type: ignore[override]
        """Remove a rank; with a default, an unknown rank is no error."""
        rank = super().pop(start, *default)
        if rank is not None:
            self.discount(rank, moves=True)
            object.__setattr__(rank, "counted_by", None)
            slot, group = rank.slot.id, self.on_slot[rank.slot.id]
            group.pop(start)
            if not group:
                del self.on_slot[slot]
                if slot in self._slots:
                    self.vacant[slot] = None
        return rank

    def count(self, rank: Rank) -> None:
        """Count a rank as it is now."""
        self.stages[rank.stage].setdefault(rank.start, rank)
        rank.kind = kind = RankKind._make(_kind_of(rank))
        self._kinds[kind] = self._kinds.get(kind, 0) + 1

    def discount(self, rank: Rank, *, moves: bool) -> None:
        """Remove a rank from its count, before it changes."""
        if moves:
            self.stages[rank.stage].pop(rank.start)
        left = self._kinds[rank.kind] = self._kinds[rank.kind] - 1
        if not left:
            del self._kinds[rank.kind]

    def members(self, generation: int) -> list[tuple[RankKind, int]]:
        """Return the kinds of a generation's members that are left, with their numbers."""
        kinds = self._kinds.items()
        planned = [each for each in kinds if each[0].planned == generation > 0]
        return [each for each in planned if each[0].stage != Stage.ENDING]

    @property
    def staying(self) -> int:
        """Number of ranks that neither end nor leave."""
        return sum(number for kind, number in self._kinds.items() if kind.stays)

    @property
    def ready(self) -> int:
        """Number of staying ranks that are ready."""
        kinds = self._kinds.items()
        return sum(number for kind, number in kinds if kind.stage == Stage.READY and kind.stays)

    @property
    def synced(self) -> bool:
        """Whether any staying rank that is ready has the job's state."""
        ready = [kind for kind in self._kinds if kind.stage == Stage.READY and kind.stays]
        return any(kind.synced for kind in ready)

    @property
    def newcomers(self) -> bool:
        """Whether any rank starts or is ready that was in no generation."""
        waiting = (Stage.STARTING, Stage.READY)
        return any(not kind.planned and kind.stage in waiting for kind in self._kinds)

    @property
    def loops(self) -> set[int]:
        """Elastic loops of the staying ranks that have been members."""
        return {kind.loop for kind in self._kinds if kind.planned and kind.stays}

    @property
    def ready_loops(self) -> set[int]:
        """Elastic loops of the ready ranks."""
        return {kind.loop for kind in self._kinds if kind.stage == Stage.READY}
