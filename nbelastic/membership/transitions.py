"""The steps of which everything that happens to a job is made. Each keeps the invariants."""

from __future__ import annotations

import math
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
from .placement import arrange, places_of
from .rank import Phase, Rank, Stage
from .repeats import BLOWS, Blow, count
from .roster import REST, STRIKE_WINDOW, STRIKES, Roster

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Transitions"]


class Transitions:
    """The roster, and the steps that change it. `now` and `chance` are those of the event."""

    def __init__(self, limits: Limits) -> None:
        self.roster = Roster(limits=limits)
        self.roster.workers_out.bounds = limits.cooldown
        self.roster.resting.bounds = limits.cooldown or REST
        self._chance = 0.0
        self._deadline: float | None = None
        self._effects: list[Effect] = []

    @property
    def _now(self) -> float:
        return self.roster.now

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
        places = dict(zip(order, places_of([rank.slot for rank in order]), strict=True))
        for rank in newcomers:
            self._emit(StartRank(start=rank.start, slot=rank.slot, place=places[rank]))

    def _end_rank(self, rank: Rank, how: str, reason: str) -> None:
        """Tell a rank to end, at once as far as the job is concerned."""
        if rank.stage == Stage.ENDING:
            return
        rank.stage = Stage.ENDING
        rank.since = self._now
        self._emit(EndRank(start=rank.start, slot=rank.slot, how=how, reason=reason))

    def _ask_to_leave(self, rank: Rank, reason: str) -> None:
        """Have a rank leave: with its generation if it is in one, else at once."""
        rank.leaving = True
        if rank.stage not in (Stage.MEMBER, Stage.DONE):
            self._end_rank(rank, "leave", reason)
        elif self.roster.phase != Phase.FINISHING:  # where it is about to return anyway
            self._emit(EndRank(start=rank.start, slot=rank.slot, how="leave", reason=reason))

    def _depart(self, slot: str) -> None:
        """Note that nothing can be started on a slot any more."""
        self.roster.drop_slot(slot)
        self.roster.departing.setdefault(slot, self._now)

    def _drop(self, rank: Rank, cause: str) -> None:
        """Take a rank out of the job: it has ended, or does not count any more.

        If it was a member, its generation is over for the others too.
        """
        was_member = rank.stage in (Stage.MEMBER, Stage.DONE)
        self.roster.ranks.pop(rank.start, None)
        if was_member:
            self._break(cause)

    def _lose(self, rank: Rank, detail: str, *, process_gone: bool) -> None:
        """Take out a rank that failed: note it, and let its worker or host cool down."""
        planned = rank.leaving or rank.stage == Stage.ENDING
        if not self.roster.ended:
            self._record("left" if planned else "lost", rank, detail)
        self._drop(rank, f"{self._name(rank)}: {detail}")
        if not planned and not self.roster.ended:
            self._cool_down(rank, process_gone=process_gone)

    def _evict(self, ranks: Sequence[Rank], reason: str) -> None:
        """Go on without ranks whose workers do not answer, and have their processes restarted."""
        for rank in ranks:
            self._emit(EndRank(start=rank.start, slot=rank.slot, how="evict", reason=reason))
            self._emit(RestartWorker(slot=rank.slot, reason=reason))
            self._depart(rank.slot.id)
            self._lose(rank, reason, process_gone=True)

    def _cool_down(self, rank: Rank, *, process_gone: bool) -> None:
        roster, slot = self.roster, rank.slot
        if not (process_gone and roster.workers_out.bounds is None):
            key = roster.worker_key(slot)
            seconds = roster.workers_out.fail(key, self._now, self._chance)
            self._record("cooldown", rank, _for_how_long("worker", slot.worker, seconds))
            for other in list(roster.ranks.values()):
                if roster.worker_key(other.slot) == key and not other.leaving:
                    self._ask_to_leave(other, "its worker is left out for a while")
        self._strike(rank)

    def _strike(self, rank: Rank) -> None:
        """Count a failure against its worker and its host, and let either rest after several.

        A worker that is restarted and fails, again and again, is one of its host's many: it
        rests alone. Failures on a host within a moment of each other are one.
        """
        roster, host, name = self.roster, rank.slot.host, rank.slot.lasting
        if rank.version > rank.version_at_join:
            self._pardon(rank)
        roster.strikes[name] = roster.strikes.get(name, 0) + 1
        if roster.strikes[name] >= STRIKES and roster.workers_out.bounds is None:
            self._rest("worker", name, rank)
        names = roster.host_strikes.setdefault(host, [])
        if name in names or self._now - roster.struck_at.get(host, -STRIKE_WINDOW) < STRIKE_WINDOW:
            return
        names.append(name)
        roster.struck_at[host] = self._now
        if len(names) >= STRIKES:
            roster.host_strikes.pop(host)
            self._rest("host", host, rank)

    def _rest(self, kind: str, key: str, rank: Rank) -> None:
        seconds = self.roster.resting.fail(key, self._now, self._chance)
        self._record("cooldown", rank, _for_how_long(kind, key, seconds))

    def _pardon(self, rank: Rank) -> None:
        """Forget what a rank's worker and host have failed: it has made progress."""
        roster = self.roster
        if not (roster.strikes or roster.host_strikes or roster.resting.failures):
            return
        roster.host_strikes.pop(rank.slot.host, None)
        roster.strikes.pop(rank.slot.lasting, None)
        for key in (rank.slot.host, rank.slot.lasting):
            roster.resting.failures.pop(key, None)

    def _note_version(self, rank: Rank, version: float) -> None:
        """Note a rank's last commit, which never goes back."""
        if version > rank.version:
            if version > rank.version_at_join:
                self._pardon(rank)
            self.roster.counted.hold(rank, version)

    def _blame_function(self, rank: Rank, error: str) -> None:
        """End the job if the same error came from one worker after another (:mod:`.repeats`).

        Where there are several hosts, workers of one are not enough: it may be the host's fault.
        Where too few workers are left to go on, two are.
        """
        roster, slot = self.roster, rank.slot
        if roster.ended:
            return
        blow = Blow(
            start=rank.start,
            worker=slot.lasting,
            host=slot.host,
            generation=rank.planned,
            version=roster.version,
            time=self._now,
            error=error,
        )
        chain = roster.repeats.note(blow)
        hosts = {each.host for each in chain}
        for_good = roster.workers_out.bounds is None
        short = for_good and roster.within_reach(self._now) < roster.limits.min_np
        one_host = len(hosts) == 1 and bool(roster.hosts() - hosts)
        if count(chain) < (BLOWS - 1 if short else BLOWS) or (one_host and not short):
            return
        roster.broken_by_user.update({each.start: each.error for each in chain})
        workers = len({each.worker for each in chain})
        reason = f"{error} (raised on {workers} workers, one after another)"
        self._end("failed", "rank_failed", reason)

    def _name(self, rank: Rank) -> str:
        plan = self.roster.plan
        number = plan.rank_of(rank.start) if plan else None
        who = f"start {rank.start}" if number is None else f"rank {number}"
        return f"{who} on {rank.slot.worker}"

    # -- generations -------------------------------------------------------------------------

    def _break(self, cause: str) -> None:
        """End the present generation because of a fault: free its members wherever they wait.

        Those who have left their loop for good go on, unless they wait for a member that is lost.
        """
        roster = self.roster
        if roster.ended:
            return
        roster.reset_causes.append(cause)
        if roster.plan is not None and roster.plan.loop == 0 and roster.phase != Phase.GATHERING:
            self._end("failed", "rank_lost", f"{cause}; the function has no elastic loop")
            return
        if roster.phase in (Phase.FORMING, Phase.RUNNING):
            self._enter(Phase.GATHERING)
        elif roster.phase == Phase.FINISHING:
            for rank in roster.awaited():
                rank.moved_at = self._now
        self._abort_awaited(cause)

    def _regather(self) -> None:
        """End the present generation as planned: its members leave it at the same step."""
        self._enter(Phase.GATHERING)
        if self.roster.any_in(Stage.DONE):
            self._abort_awaited("ranks left their loop at different steps")

    def _abort_awaited(self, cause: str) -> None:
        if self.roster.aborted:
            return
        starts = tuple(rank.start for rank in self.roster.awaited())
        if starts:
            self.roster.aborted = True
            self._emit(Abort(generation=self.roster.generation, starts=starts, reason=cause))

    def _publish(self, order: Sequence[Rank]) -> None:
        """Make `order` the next generation."""
        roster = self.roster
        loop = max(rank.loop for rank in order)
        roster.generation += 1
        roster.counted.begin(roster.generation)
        plan = Plan(
            generation=roster.generation,
            members=tuple(Member(r.start, r.slot, r.store, r.version) for r in order),
            loop=loop,
        )
        newest = plan.version
        if roster.version > max(newest, 0) or (roster.ran and newest == FRESH):
            self._record("restarted", detail=f"no rank is left that holds commit {roster.version}")
            roster.version = math.floor(max(newest, 0))
        for rank in order:
            rank.change(stage=Stage.MEMBER, planned=plan.generation, formed=False, waiting=False)
            rank.since = rank.moved_at = rank.heard_at = self._now
            if rank.version == FRESH:
                rank.version_at_join = max(newest, 0)
        roster.plan = plan
        roster.crew = [rank.start for rank in order]
        roster.aborted = roster.pending = False
        roster.backend = ""
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
        starts: tuple[int, ...] = ()
        if kind == "finished":
            starts = tuple(roster.crew)
        elif error == "rank_failed":
            starts = tuple(roster.broken_by_user)
        roster.outcome = Outcome(kind=kind, error=error, reason=reason, starts=starts)
        if kind == "failed":
            self._abort_awaited(reason)
        self._enter(Phase.ENDING)
        for rank in roster.in_stage(Stage.STARTING, Stage.READY, Stage.MEMBER, Stage.DONE):
            self._end_rank(rank, "cancel" if kind == "failed" else how, reason)

    def _conclude(self) -> None:
        """End the job, well if every rank whose result it needs has returned."""
        roster = self.roster
        returned = {rank.start for rank in roster.in_stage(Stage.RETURNED)}
        missing = [start for start in roster.crew if start not in returned]
        if missing:
            lost = f"{len(missing)} of {len(roster.crew)} ranks ended before they returned"
            reason = "; ".join(dict.fromkeys([lost, *roster.reset_causes]))
            self._end("failed", "rank_lost", reason)
        else:
            self._end("finished")

    def _close(self) -> None:
        """Say that it is over, once nothing runs any more."""
        roster = self.roster
        if roster.any_in(Stage.ENDING) or roster.outcome is None:
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
