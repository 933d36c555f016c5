"""A job's ranks, and what is counted over them, so that no event costs more where there are more.

All counts follow from the ranks themselves; they are kept up to date as ranks come, go and change,
and are made anew when a machine is read back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from .model import FRESH
from .rank import Rank, Stage

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Mapping

    from .model import Slot

__all__ = ["Ranks"]

K = TypeVar("K", bound="Hashable")


class Ranks(dict[int, Rank]):
    """Ranks by their starts; to be changed by assignment, :meth:`pop` and :meth:`clear` only.

    Parameters
    ----------
    ranks : iterable of Rank
        Those to begin with.
    slots : mapping of str to Slot
        The slots that are there, by their identity: looked at when a rank lets go of one.
    generation : int
        Number of the newest plan.

    Attributes
    ----------
    stages : dict of Stage to dict of int to Rank
        Ranks by stage, in each in the order in which they came to it.
    on_slot : dict of str to dict of int to Rank
        Ranks by slot.
    vacant : dict of str to None
        Slots without a rank.
    staying : int
        Ranks that are there and not on their way out.
    loops : dict of int to int
        Loops of those that stay and have been members, with how many are in each.
    newcomers : int
        Starting or ready, and never planned.
    ready_loops : dict of int to int
        Loops of those that are ready.
    ready : int
        Ready, and not leaving.
    synced : int
        Of those, the ones that have synchronised with the job's state once.
    present : int
        Members of the newest plan that are still there.
    versions : dict of float to int
        What they hold.
    unformed : int
        Those of them that have not said that they are connected.
    """

    def __init__(self, ranks: Iterable[Rank], slots: Mapping[str, Slot], generation: int) -> None:
        super().__init__()
        self._slots = slots
        self.generation = generation
        self.stages: dict[Stage, dict[int, Rank]] = {stage: {} for stage in Stage}
        self.on_slot: dict[str, dict[int, Rank]] = {}
        self.vacant: dict[str, None] = dict.fromkeys(self._slots)
        self.staying = self.newcomers = self.ready = self.synced = 0
        self.present = self.unformed = 0
        self.loops: dict[int, int] = {}
        self.ready_loops: dict[int, int] = {}
        self.versions: dict[float, int] = {}
        for rank in ranks:
            self[rank.start] = rank
        for stage, crew in self.stages.items():
            by_age = sorted(crew.values(), key=lambda rank: rank.since)
            self.stages[stage] = {rank.start: rank for rank in by_age}

    def __setitem__(self, start: int, rank: Rank) -> None:
        super().__setitem__(start, rank)
        object.__setattr__(rank, "counted_by", self)
        self.on_slot.setdefault(rank.slot.id, {})[start] = rank
        self.vacant.pop(rank.slot.id, None)
        self.count(rank)

    def pop(self, start: int, *default: None) -> Rank:  # type: ignore[override]
        """Take a rank out; nothing happens where a default is given and it is not there."""
        rank = super().pop(start, *default)
        if rank is not None:
            self.discount(rank, moves=True)
            object.__setattr__(rank, "counted_by", None)
            slot, crew = rank.slot.id, self.on_slot[rank.slot.id]
            crew.pop(start)
            if not crew:
                del self.on_slot[slot]
                if slot in self._slots:
                    self.vacant[slot] = None
        return rank

    def clear(self) -> None:
        """Take out all."""
        for start in list(self):
            self.pop(start)

    def hold(self, rank: Rank, version: float) -> None:
        """Note what a rank holds now: the short way where only that is counted anew."""
        before = rank.version
        if FRESH in (before, version) or rank.start not in self:
            rank.version = version
            return
        if rank.planned == self.generation and rank.planned and rank.stage != Stage.ENDING:
            versions = self.versions  # _tally twice, without its calls: most messages come here
            versions[version] = versions.get(version, 0) + 1
            if versions[before] > 1:
                versions[before] -= 1
            else:
                del versions[before]
        rank.hold(version)

    def first(self, stage: Stage) -> Rank | None:
        """Return who came to `stage` first of those that are in it."""
        crew = self.stages[stage]
        return next(iter(crew.values())) if crew else None

    def begin(self, generation: int) -> None:
        """Go on to another generation, of which nobody is a member yet."""
        self.generation = generation
        self.present = self.unformed = 0
        self.versions.clear()

    def count(self, rank: Rank) -> None:
        """Count a rank as it is now."""
        self.stages[rank.stage].setdefault(rank.start, rank)
        self._add(rank, 1)

    def discount(self, rank: Rank, *, moves: bool) -> None:
        """Take a rank, as it is now, out of all counts: it is about to change, or to move on."""
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
