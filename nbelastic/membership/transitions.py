"""The steps of which everything that happens to a job is made. Each keeps the invariants."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from .effects import (
    Abort,
    Effect,
    End,
    EndRank,
    Publish,
    Record,
    RestartWorker,
    StartRank,
)
from .model import FRESH, Limits, Member, Outcome, Plan, Slot
from .placement import arrange, place_of
from .roster import HOST_STRIKES, Phase, Rank, Roster, Stage

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Transitions"]


class Transitions:
    """The roster, and the steps that change it. `now` and `chance` are those of the event."""

    def __init__(self, limits: Limits) -> None:
        self.roster = Roster(limits=limits)
        self.roster.workers_out.bounds = limits.cooldown
        self.roster.hosts_out.bounds = limits.cooldown
        self._now = 0.0
        self._chance = 0.0
        self._effects: list[Effect] = []

    def _emit(self, effect: Effect) -> None:
        self._effects.append(effect)

    def _record(self, kind: str, rank: Rank | None = None, detail: str = "") -> None:
        plan = self.roster.plan
        number = plan.rank_of(rank.start) if plan is not None and rank is not None else None
        self._emit(
            Record(
                kind=kind,
                generation=self.roster.generation,
                worker=rank.slot.worker if rank else None,
                rank=number,
                start=rank.start if rank else None,
                detail=detail,
            )
        )

    def _enter(self, phase: Phase) -> None:
        self.roster.phase = phase
        self.roster.phase_since = self._now

    # -- ranks -------------------------------------------------------------------------------

    def _start(self, slots: Sequence[Slot]) -> None:
        """Start the function on `slots` and foresee a place for each."""
        roster = self.roster
        newcomers = []
        for slot in slots:
            rank = Rank(start=roster.starts, slot=slot, since=self._now)
            roster.starts += 1
            roster.ranks[rank.start] = rank
            newcomers.append(rank)
        members = [rank for rank in roster.members() if not rank.leaving]
        known = {rank.start for rank in members}
        others = [rank for rank in roster.staying() if rank.start not in known]
        order = arrange(members, others)
        slots_in_order = [rank.slot for rank in order]
        for rank in newcomers:
            place = place_of(slots_in_order, order.index(rank))
            self._emit(StartRank(start=rank.start, slot=rank.slot, place=place))

    def _end_rank(self, rank: Rank, how: str, reason: str) -> None:
        """Tell a rank to end, at once as far as the job is concerned."""
        if rank.stage == Stage.ENDING:
            return
        rank.stage = Stage.ENDING
        rank.since = self._now
        self._emit(EndRank(start=rank.start, slot=rank.slot, how=how, reason=reason))

    def _ask_to_leave(self, rank: Rank) -> None:
        """Have a rank leave: with its generation if it is in one, else at once."""
        rank.leaving = True
        if rank.stage in (Stage.MEMBER, Stage.DONE):
            reason = "its worker was asked to leave"
            self._emit(EndRank(start=rank.start, slot=rank.slot, how="leave", reason=reason))
        else:
            self._end_rank(rank, "leave", "its worker was asked to leave")

    def _drop(self, rank: Rank, cause: str) -> None:
        """Take a rank out of the job: it has ended, or does not count any more.

        If it was a member, its generation is over for the others too, unless that generation has
        no need of it any more.
        """
        was_member = rank.stage in (Stage.MEMBER, Stage.DONE)
        self.roster.ranks.pop(rank.start, None)
        if was_member:
            self._break(cause)

    def _lose(self, rank: Rank, detail: str, *, process_gone: bool) -> None:
        """Take out a rank that failed: note it, and let its worker or host cool down."""
        self._record("left" if rank.leaving else "lost", rank, detail)
        fault = not rank.leaving and rank.stage not in (Stage.ENDING, Stage.RETURNED)
        self._drop(rank, f"{self._name(rank)}: {detail}")
        if fault and not self.roster.ended:
            self._cool_down(rank, process_gone=process_gone)

    def _evict(self, rank: Rank, reason: str) -> None:
        """Go on without a rank whose worker does not answer, and have its process restarted."""
        self._emit(EndRank(start=rank.start, slot=rank.slot, how="evict", reason=reason))
        self._emit(RestartWorker(slot=rank.slot, reason=reason))
        self.roster.slots.pop(rank.slot.id, None)
        self._lose(rank, reason, process_gone=True)

    def _cool_down(self, rank: Rank, *, process_gone: bool) -> None:
        roster, slot = self.roster, rank.slot
        if not (process_gone and roster.workers_out.bounds is None):
            seconds = roster.workers_out.fail(roster.worker_key(slot), self._now, self._chance)
            self._record("cooldown", rank, _for_how_long("worker", slot.worker, seconds))
        if rank.version > rank.version_at_join:
            roster.host_strikes[slot.host] = 0
        strikes = roster.host_strikes[slot.host] = roster.host_strikes.get(slot.host, 0) + 1
        if strikes >= HOST_STRIKES:
            roster.host_strikes[slot.host] = 0
            seconds = roster.hosts_out.fail(slot.host, self._now, self._chance)
            self._record("cooldown", rank, _for_how_long("host", slot.host, seconds))

    def _name(self, rank: Rank) -> str:
        plan = self.roster.plan
        number = plan.rank_of(rank.start) if plan else None
        who = f"start {rank.start}" if number is None else f"rank {number}"
        return f"{who} on {rank.slot.worker}"

    # -- generations -------------------------------------------------------------------------

    def _break(self, cause: str) -> None:
        """End the present generation because of a fault: free its members wherever they wait."""
        roster = self.roster
        if roster.phase not in (Phase.FORMING, Phase.RUNNING, Phase.GATHERING):
            return
        roster.reset_causes.append(cause)
        if roster.plan is not None and roster.plan.loop == 0 and roster.phase != Phase.GATHERING:
            self._end("failed", "rank_lost", f"{cause}; the function has no elastic loop")
            return
        if roster.phase != Phase.GATHERING:
            self._enter(Phase.GATHERING)
        self._abort_awaited(cause)

    def _abort_awaited(self, cause: str) -> None:
        starts = tuple(rank.start for rank in self.roster.awaited())
        if starts and not self.roster.aborted:
            self.roster.aborted = True
            self._emit(Abort(generation=self.roster.generation, starts=starts, reason=cause))

    def _publish(self, order: Sequence[Rank]) -> None:
        """Make `order` the next generation."""
        roster = self.roster
        loop = max(rank.loop for rank in order)
        roster.generation += 1
        plan = Plan(
            generation=roster.generation,
            members=tuple(Member(r.start, r.slot, r.store, r.version) for r in order),
            loop=loop,
        )
        if roster.version > 0 and plan.version == FRESH:
            self._record("restarted", detail=f"no rank is left that holds commit {roster.version}")
            roster.version = 0
        for rank in order:
            rank.stage, rank.planned, rank.formed = Stage.MEMBER, plan.generation, False
            rank.since = rank.moved_at = rank.heard_at = self._now
            rank.waiting = False
            if rank.version == FRESH:
                rank.version_at_join = max(plan.version, 0)
        roster.plan = plan
        roster.aborted = roster.pending = False
        roster.short_since = None
        roster.broken_by_user.clear()
        self._enter(Phase.FORMING)
        self._emit(Publish(plan))

    # -- the end -----------------------------------------------------------------------------

    def _end(self, kind: str, error: str = "", reason: str = "", how: str = "stop") -> None:
        """Fix the outcome, and end what still runs."""
        roster = self.roster
        if roster.ended:
            return
        members = roster.members() or arrange([], list(roster.ranks.values()))
        starts: tuple[int, ...] = ()
        if kind == "finished":
            starts = tuple(rank.start for rank in members)
        elif error == "rank_failed":
            starts = tuple(roster.broken_by_user)
        roster.outcome = Outcome(kind=kind, error=error, reason=reason, starts=starts)
        if kind == "failed":
            self._abort_awaited(reason)
        self._enter(Phase.ENDING)
        for rank in roster.in_stage(Stage.STARTING, Stage.READY, Stage.MEMBER, Stage.DONE):
            self._end_rank(rank, "cancel" if kind == "failed" else how, reason)

    def _close(self) -> None:
        """Say that it is over, once nothing runs any more."""
        roster = self.roster
        if roster.in_stage(Stage.ENDING) or roster.outcome is None:
            return
        outcome = roster.outcome
        if outcome.error == "rank_failed":
            outcome = roster.outcome = replace(outcome, starts=tuple(roster.broken_by_user))
        self._enter(Phase.ENDED)
        self._record(outcome.kind, detail=outcome.reason)
        self._emit(End(outcome))


def _for_how_long(kind: str, name: str, seconds: float | None) -> str:
    length = "for good" if seconds is None else f"for {seconds:.1f} s"
    return f"{kind} {name} is left out {length}"
