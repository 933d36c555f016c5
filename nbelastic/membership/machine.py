"""The state machine that decides who is in a job.

``handle(event, now)`` takes one event and returns what to do about it. The machine holds no clock,
no thread and no connection; `now` and the random part of exclusions are handed in, so the same
events always lead to the same decisions, and every run can be replayed.

After every event, whatever the order, loss and duplication of events, this holds:

1. One generation at a time; numbers strictly grow; a message from an older one changes nothing.
2. Ranks of a plan are ``0..n-1``, ``min_np <= n <= max_np``, a slot appears once, ranks on one
   host are contiguous.
3. Survivors keep their relative order; the source of a plan holds its newest version.
4. A worker that cools down, is leaving or is gone is in no new plan.
5. The committed version never goes back while a rank lives that has it.
6. Every state but the last has a deadline (:meth:`Machine.deadline`).
7. Success means that every rank of the last generation returned; after the end, nothing happens.
8. A fault on one worker costs the others no more than the batch in flight.

The machine can be written to a dict and read back (:mod:`.serial`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from . import events as ev
from .effects import Effect, EndRank, Release
from .roster import Phase, Rank, Stage
from .rules import Rules

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Machine"]


class Machine(Rules):
    """Who is in a job.

    Parameters
    ----------
    limits : Limits
        What the job's owner allows.
    """

    def handle(self, event: ev.Event, now: float, chance: float = 0.0) -> list[Effect]:
        """Take in one event and return what to do.

        Parameters
        ----------
        event : Event
            What happened.
        now : float
            The time in seconds, on any clock that never goes back.
        chance : float, default 0.0
            A random number from 0 up to 1, for the random part of an exclusion.
        """
        self._now, self._chance, self._effects = max(now, self._now), chance, []
        if self.roster.phase != Phase.ENDED:
            handler: Callable[[ev.Event], None] = getattr(self, f"_on_{type(event).__name__}")
            handler(event)
            self._advance()
        return self._effects

    def deadline(self) -> float | None:
        """Return when to hand in a ``Tick`` if nothing else happens; None after the end."""
        return self.roster.deadline(self._now)

    # -- slots -------------------------------------------------------------------------------

    def _on_SlotsFound(self, event: ev.SlotsFound) -> None:  # noqa: N802
        for slot in event.slots:
            if slot.id not in self.roster.departing:
                self.roster.slots[slot.id] = slot

    def _on_SlotBusy(self, event: ev.SlotBusy) -> None:  # noqa: N802
        self.roster.slots.pop(event.slot, None)
        for rank in self._on_slot(event.slot):
            if rank.stage in (Stage.STARTING, Stage.ENDING):
                self.roster.ranks.pop(rank.start)
        if not self.roster.ranks and self.roster.plan is None:
            self.roster.launched = False

    def _on_SlotLeaving(self, event: ev.SlotLeaving) -> None:  # noqa: N802
        if event.slot in self.roster.departing:
            return
        self.roster.departing.append(event.slot)
        for rank in self._on_slot(event.slot):
            if not rank.leaving and rank.stage not in (Stage.ENDING, Stage.RETURNED):
                self._ask_to_leave(rank)

    def _on_SlotGone(self, event: ev.SlotGone) -> None:  # noqa: N802
        self.roster.slots.pop(event.slot, None)
        for rank in self._on_slot(event.slot):
            if rank.stage == Stage.RETURNED:
                continue  # its result is here already
            self._lose(rank, event.detail or "its worker is gone", process_gone=True)
        if event.slot in self.roster.departing:
            self.roster.departing.remove(event.slot)

    def _on_SlotSilent(self, event: ev.SlotSilent) -> None:  # noqa: N802
        for rank in self._on_slot(event.slot):
            if rank.stage != Stage.RETURNED:
                self._evict(rank, event.detail or "its worker sends no heartbeat")

    def _on_slot(self, slot: str) -> list[Rank]:
        return [rank for rank in self.roster.ranks.values() if rank.slot.id == slot]

    # -- ranks -------------------------------------------------------------------------------

    def _on_RankReady(self, event: ev.RankReady) -> None:  # noqa: N802
        rank = self.roster.ranks.get(event.start)
        if rank is None or rank.stage in (Stage.ENDING, Stage.RETURNED):
            return  # fenced: it was told to end, or is told again by whoever relays this
        if event.left < rank.planned or event.left > self.roster.generation:
            return  # sent before the plan that it is in now
        was_member = rank.stage in (Stage.MEMBER, Stage.DONE)
        if rank.stage != Stage.READY:
            rank.stage, rank.since = Stage.READY, self._now
        rank.version, rank.loop, rank.store = event.version, event.loop, event.store
        if was_member:
            self._left_generation(rank, event)
        if rank.leaving:
            self._end_rank(rank, "leave", "its worker was asked to leave")

    def _left_generation(self, rank: Rank, event: ev.RankReady) -> None:
        roster = self.roster
        if event.failed and roster.aborted:
            return  # it did as it was told
        if event.failed:
            if roster.phase == Phase.FORMING:
                roster.forming_failures += 1
            self._break(f"{self._name(rank)}: {event.detail or 'an operation failed'}")
        elif roster.phase == Phase.RUNNING and roster.pending:
            self._enter(Phase.GATHERING)
            if any(other.stage == Stage.DONE for other in roster.awaited()):
                self._abort_awaited("ranks left their loop at different steps")
        elif roster.phase == Phase.FINISHING or (roster.plan and event.loop > roster.plan.loop):
            self._enter(Phase.GATHERING)  # on to the next loop, in a generation of its own
        elif roster.phase in (Phase.RUNNING, Phase.FORMING):
            self._break(f"{self._name(rank)} left its generation unasked")

    def _on_RankFormed(self, event: ev.RankFormed) -> None:  # noqa: N802
        roster = self.roster
        rank = roster.ranks.get(event.start)
        if roster.phase != Phase.FORMING or event.generation != roster.generation or rank is None:
            return
        rank.formed = True
        if all(member.formed for member in roster.members()):
            for member in roster.members():
                member.moved_at = member.heard_at = self._now
            roster.forming_failures = 0
            self._enter(Phase.RUNNING)
            self._record("formed", detail=f"{len(roster.members())} ranks")

    def _on_LoopDone(self, event: ev.LoopDone) -> None:  # noqa: N802
        roster = self.roster
        rank = roster.ranks.get(event.start)
        if rank is None or rank.planned != event.generation or rank.stage != Stage.MEMBER:
            return
        rank.stage, rank.version = Stage.DONE, max(rank.version, event.version)
        if roster.phase == Phase.GATHERING:
            self._abort_awaited("ranks left their loop at different steps")
        elif roster.phase == Phase.RUNNING and not roster.in_stage(Stage.MEMBER):
            roster.version = max(roster.version, rank.version)
            starts = tuple(member.start for member in roster.members())
            self._emit(Release(generation=roster.generation, starts=starts))
            self._enter(Phase.FINISHING)
            for other in roster.in_stage(Stage.STARTING, Stage.READY):
                self._end_rank(other, "stop", "the job is finishing")

    def _on_RankReturned(self, event: ev.RankReturned) -> None:  # noqa: N802
        roster = self.roster
        rank = roster.ranks.get(event.start)
        if rank is None or rank.stage == Stage.RETURNED:
            return
        if rank.stage == Stage.ENDING:
            self._drop(rank, "it returned")
            return
        in_loop = roster.plan is not None and roster.plan.loop > 0
        if in_loop and roster.phase in (Phase.RUNNING, Phase.FORMING):
            self._end("failed", "returned_early", f"{self._name(rank)} returned while others train")
            return
        rank.stage, rank.since = Stage.RETURNED, self._now
        if roster.phase == Phase.RUNNING:
            self._enter(Phase.FINISHING)

    def _on_RankFailed(self, event: ev.RankFailed) -> None:  # noqa: N802
        roster = self.roster
        rank = roster.ranks.get(event.start)
        if rank is None:
            return
        rank.version = max(rank.version, event.version)
        if not event.collective:
            roster.broken_by_user[event.start] = event.error
        if rank.stage == Stage.ENDING:
            self._drop(rank, "it ended")
            return
        finishing = roster.phase == Phase.FINISHING or rank.stage == Stage.RETURNED
        self._record("lost", rank, event.error)
        if event.collective and (finishing or roster.plan is None or roster.plan.loop == 0):
            roster.ranks.pop(rank.start)
            self._end("failed", "rank_lost", f"{self._name(rank)}: {event.error}")
        elif finishing or max(other.version for other in roster.ranks.values()) <= 0:
            roster.ranks.pop(rank.start)  # nothing was committed: there is nothing to go back to
            self._end("failed", "rank_failed", f"{self._name(rank)}: {event.error}")
        else:
            self._drop(rank, f"{self._name(rank)}: {event.error}")
            self._cool_down(rank, process_gone=False)

    def _on_RankLeft(self, event: ev.RankLeft) -> None:  # noqa: N802
        rank = self.roster.ranks.get(event.start)
        if rank is None:
            return
        if not self.roster.ended:
            self._record("left", rank, "as planned")
        planned = self.roster.phase == Phase.RUNNING and self.roster.pending
        if planned and rank.stage == Stage.MEMBER:
            self._enter(Phase.GATHERING)
            self.roster.ranks.pop(rank.start)
        elif rank.leaving and self.roster.phase == Phase.GATHERING:
            self.roster.ranks.pop(rank.start)
        else:
            self._drop(rank, f"{self._name(rank)} ended")

    def _on_Beats(self, event: ev.Beats) -> None:  # noqa: N802
        roster = self.roster
        for beat in event.beats:
            rank = roster.ranks.get(beat.start)
            if rank is None:
                continue
            rank.heard_at = self._now
            if beat.progress != rank.progress or beat.waiting != rank.waiting:
                rank.progress, rank.waiting, rank.moved_at = beat.progress, beat.waiting, self._now
            if rank.stage == Stage.MEMBER and beat.version > rank.version:
                rank.version = beat.version
                roster.host_strikes.pop(rank.slot.host, None)
        if roster.phase == Phase.RUNNING:
            common = min(rank.version for rank in roster.members())
            if common > roster.version:
                roster.version, roster.stalls = common, 0

    # -- the owner ---------------------------------------------------------------------------

    def _on_StopRequested(self, event: ev.StopRequested) -> None:  # noqa: N802
        roster = self.roster
        if roster.ended:
            if event.now:
                for rank in roster.in_stage(Stage.ENDING):
                    self._emit(
                        EndRank(start=rank.start, slot=rank.slot, how="cancel", reason=event.reason)
                    )
        elif event.now or roster.phase not in (Phase.RUNNING, Phase.FINISHING):
            self._end("stopped", reason=event.reason, how="cancel" if event.now else "stop")
        else:
            roster.stopping = True

    def _on_LimitsChanged(self, event: ev.LimitsChanged) -> None:  # noqa: N802
        limits = self.roster.limits
        if event.min_np is not None:
            limits = replace(limits, min_np=event.min_np, np=max(event.min_np, 1))
        if event.max_np is not None:
            limits = replace(limits, max_np=event.max_np)
        self.roster.limits = limits

    def _on_ClusterGone(self, event: ev.ClusterGone) -> None:  # noqa: N802
        self.roster.ranks.clear()
        self._end("failed", "cluster_lost", event.detail)

    def _on_Tick(self, event: ev.Tick) -> None:  # noqa: N802
        """Let time pass; :meth:`_advance` does the rest."""
