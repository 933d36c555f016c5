"""One start of the function, and the counts kept over all of a job's ranks.

Every count follows from the ranks themselves. The counts are kept up to date as ranks are added,
removed and changed, so that no event costs more in a larger job. They are computed anew when a
machine is read back.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar, cast

from nbelastic.messages import FRESH, CodeLine, EndReason, Number, Slot

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Mapping

    from nbelastic.messages import Beat

K = TypeVar("K", bound="Hashable")


class Phase(str, enum.Enum):
    """Phase of a job.

    In ``GATHERING`` ranks become ready for the next generation. In ``FORMING`` the ranks of a plan
    connect. In ``RUNNING`` they train. In ``FINISHING`` all have left the elastic loop. In
    ``ENDING`` the outcome is known and ranks are being ended. ``ENDED`` is final.
    """

    GATHERING = "gathering"
    FORMING = "forming"
    RUNNING = "running"
    FINISHING = "finishing"
    ENDING = "ending"
    ENDED = "ended"


class Stage(str, enum.Enum):
    """Stage of a rank.

    ``STARTING`` until the rank reports ready; ``READY`` while it waits for a plan; ``MEMBER`` of
    the present generation; ``DONE`` with its elastic loop, waiting for the others; ``RETURNED``
    from its function; ``ENDING`` from the order to end until the rank has ended.
    """

    STARTING = "starting"
    READY = "ready"
    MEMBER = "member"
    DONE = "done"
    RETURNED = "returned"
    ENDING = "ending"


_COUNTED = frozenset({"stage", "version", "loop", "planned", "formed", "leaving"})


@dataclass(eq=False)
class Rank:
    """One start of the function."""

    start: int
    slot: Slot
    since: float  # when it entered its stage
    stage: Stage = Stage.STARTING
    version: Number = FRESH
    loop: int = 0
    store: tuple[str, int] = ("", 0)
    unreached: tuple[int, ...] = ()
    line: CodeLine | None = None  # of user code, at which it waited last
    part: bool = False  # it waits to begin an operation of some ranks
    planned: int = 0  # newest generation that it was planned into
    formed: bool = False
    leaving: bool = False  # it was asked to leave
    leave_sent: bool = False  # the order to leave was sent
    leave_reason: EndReason = EndReason.WORKER_LEAVING
    leave_since: float = 0.0
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
    by_share: bool = False  # it was started in a job that shares its cluster

    counted_by = cast("Ranks | None", None)  # updated by every change of a counted field

    def __setattr__(self, name: str, value: object) -> None:
        ranks = self.counted_by if name in _COUNTED else None
        if ranks is None:
            self.__dict__[name] = value
        elif getattr(self, name) != value:
            ranks.discount(self, moves=name == "stage")
            self.__dict__[name] = value
            ranks.count(self)

    def change(self, **fields: object) -> None:
        """Change several fields at once, and count once."""
        ranks = self.counted_by
        if ranks is not None:
            ranks.discount(self, moves=fields.get("stage", self.stage) != self.stage)
        self.__dict__.update(fields)
        if ranks is not None:
            ranks.count(self)

    def note_heartbeat(self, now: float, beat: Beat) -> None:
        """Note a heartbeat. None of its fields is counted, so this bypasses the counts.

        Heartbeats are collected on their way, so one may come after an event that is newer.
        """
        fields = self.__dict__
        fields["heartbeat_at"] = now
        if beat.generation == self.planned and self.stage == Stage.MEMBER:
            fields["operations"] = beat.operations
            fields["operation"] = beat.operation
        elif self.stage == Stage.STARTING:
            fields["operation"] = beat.operation  # for which its process waits
        if beat.progress != fields["progress"] or beat.waiting != fields["waiting"]:
            fields["progress_at"] = now
            fields["progress"] = beat.progress
            fields["waiting"] = beat.waiting

    def waits(self, phase: Phase) -> bool:
        """Return whether the rank waits for others, in a collective or at its loop's end."""
        return self.waiting or (self.stage == Stage.DONE and phase == Phase.RUNNING)


class Ranks(dict[int, Rank]):
    """Ranks by start, changed by assignment, :meth:`pop` and :meth:`clear` only."""

    def __init__(self, ranks: Iterable[Rank], slots: Mapping[str, Slot], generation: int) -> None:
        super().__init__()
        self._slots = slots
        self.generation = generation  # of the newest plan
        # In the order in which ranks entered the stage.
        self.stages: dict[Stage, dict[int, Rank]] = {stage: {} for stage in Stage}
        self.on_slot: dict[str, dict[int, Rank]] = {}
        self.vacant: dict[str, None] = dict.fromkeys(self._slots)  # slots without a rank
        # Numbers of ranks: neither ending nor leaving; starting or ready and never planned; ready
        # and not leaving; of these, synchronised with the job's state.
        self.staying = self.newcomers = self.ready = self.synced = 0
        # Members of the newest plan that are left; of these, not reported as connected.
        self.present = self.unformed = 0
        self.loops: dict[int, int] = {}  # of staying ranks that have been members: ranks in each
        self.ready_loops: dict[int, int] = {}  # of ready ranks: ranks in each
        self.versions: dict[float, int] = {}  # of these members: ranks with each
        for rank in ranks:
            self[rank.start] = rank
        for stage, group in self.stages.items():
            by_age = sorted(group.values(), key=lambda rank: rank.since)
            self.stages[stage] = {rank.start: rank for rank in by_age}

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

    def clear(self) -> None:
        """Remove all ranks."""
        for start in list(self):
            self.pop(start)

    def note_version(self, rank: Rank, version: float) -> None:
        """Note the version that a rank holds."""
        # Most messages come here, so this is a short way.
        before = rank.version
        if FRESH in (before, version) or rank.start not in self:
            rank.version = version
            return
        if rank.planned == self.generation and rank.planned and rank.stage != Stage.ENDING:
            versions = self.versions  # two calls of _tally, inlined
            versions[version] = versions.get(version, 0) + 1
            if versions[before] > 1:
                versions[before] -= 1
            else:
                del versions[before]
        rank.__dict__["version"] = version

    def first(self, stage: Stage) -> Rank | None:
        """Return the rank that has been in `stage` the longest."""
        return next(iter(self.stages[stage].values()), None)

    def begin_again(self, rank: Rank, now: float) -> None:
        """Count the time of a rank in its stage from now on."""
        rank.since = now
        there = self.stages[rank.stage]
        there[rank.start] = there.pop(rank.start)

    def begin(self, generation: int) -> None:
        """Begin a generation, which has no members yet."""
        self.generation = generation
        self.present = self.unformed = 0
        self.versions.clear()

    def count(self, rank: Rank) -> None:
        """Count a rank as it is now."""
        self.stages[rank.stage].setdefault(rank.start, rank)
        self._add(rank, 1)

    def discount(self, rank: Rank, *, moves: bool) -> None:
        """Remove a rank from all counts, before it changes."""
        if moves:
            self.stages[rank.stage].pop(rank.start)
        self._add(rank, -1)

    def _add(self, rank: Rank, by: int) -> None:
        stage = rank.stage
        if stage != Stage.ENDING:
            if rank.planned == self.generation and rank.planned:
                self.present += by
                _tally(self.versions, rank.version, by)
                if not rank.formed:
                    self.unformed += by
            if not rank.leaving:
                self.staying += by
                if rank.planned:
                    _tally(self.loops, rank.loop, by)
        if stage == Stage.READY:
            _tally(self.ready_loops, rank.loop, by)
            if not rank.leaving:
                self.ready += by
                if rank.version != FRESH:
                    self.synced += by
        if not rank.planned and stage in (Stage.READY, Stage.STARTING):
            self.newcomers += by


def _tally(counts: dict[K, int], key: K, by: int) -> None:
    number = counts.get(key, 0) + by
    if number:
        counts[key] = number
    else:
        del counts[key]
