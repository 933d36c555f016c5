"""What follows from a situation: the rules that the machine applies after every event."""

from __future__ import annotations

from dataclasses import replace

from .effects import Notify, RestartWorker
from .model import FRESH
from .placement import arrange
from .roster import JOIN_WINDOW, Phase, Rank, Stage
from .transitions import Transitions

__all__ = ["Rules"]

FORMING_FAILURES = 5
"""Plans in a row that could not form, after which the job fails."""

STALLS = 3
"""Stalls in a row with everybody waiting and no commit in between, after which the job fails."""


class Rules(Transitions):
    """The rules; :meth:`_advance` applies them all."""

    def _advance(self) -> None:
        """Do all that the present situation calls for."""
        self._expire()
        if not self.roster.ended:
            self._note_shortage()
        if self.roster.phase == Phase.FINISHING:
            self._finish()
        if self.roster.phase == Phase.GATHERING:
            self._gather()
        if not self.roster.ended:
            self._hire()
        if self.roster.phase == Phase.RUNNING:
            self._announce_changes()
        if self.roster.phase == Phase.ENDING:
            self._close()

    def _expire(self) -> None:
        roster, limits, now = self.roster, self.roster.limits, self._now
        for rank in roster.in_stage(Stage.ENDING):
            if now - rank.since >= limits.ending_timeout:
                roster.ranks.pop(rank.start)
                roster.slots.pop(rank.slot.id, None)
                self._emit(RestartWorker(slot=rank.slot, reason="its rank did not end when told"))
        if roster.ended:
            return
        for rank in roster.in_stage(Stage.STARTING):
            if now - rank.since >= limits.elastic_timeout:
                self._evict(rank, f"not ready {limits.elastic_timeout:g} s after its start")
        in_phase = now - roster.phase_since
        if roster.phase == Phase.FORMING and in_phase >= limits.forming_timeout:
            roster.forming_failures += 1
            late = [rank for rank in roster.members() if not rank.formed]
            for rank in late:
                self._evict(rank, f"not connected after {limits.forming_timeout:g} s")
        elif roster.phase == Phase.GATHERING and in_phase >= limits.stall_timeout:
            for rank in roster.awaited():
                self._evict(rank, f"did not let go of its generation in {limits.stall_timeout:g} s")
        elif roster.phase == Phase.RUNNING:
            self._watch_for_stalls()

    def _watch_for_stalls(self) -> None:
        roster = self.roster
        suspects = roster.stall_suspects(self._now)
        if not suspects:
            return
        seconds = roster.limits.stall_timeout
        if len(suspects) < len(roster.members()):
            for rank in suspects:
                self._evict(rank, f"held up the others for {seconds:g} s")
            return
        roster.stalls += 1
        if roster.stalls >= STALLS:
            reason = f"all ranks waited for each other for {seconds:g} s, {STALLS} times in a row"
            self._end("failed", "no_progress", reason)
        else:
            self._break(f"all ranks waited for each other for {seconds:g} s")

    def _note_shortage(self) -> None:
        """Keep the time since when there are too few slots, and give up when it is too long."""
        roster, limits = self.roster, self.roster.limits
        if roster.phase != Phase.GATHERING:
            roster.short_since = None
            return
        there, needed = roster.within_reach(self._now), roster.needed()
        if there >= needed:
            return
        if roster.short_since is None:
            roster.short_since = self._now
            self._record("waiting", detail=f"{there} of at least {needed} workers")
        waited = self._now - roster.short_since
        if waited < limits.elastic_timeout:
            return
        if not roster.launched and there >= limits.min_np:
            roster.limits = replace(limits, np=limits.min_np)
            return
        reason = (
            f"{there} of at least {needed} workers (min_np={limits.min_np}) "
            f"after waiting {waited:.1f} s (elastic_timeout={limits.elastic_timeout:g})"
        )
        self._end("failed", "not_enough_workers", reason)

    def _finish(self) -> None:
        """End the job well once every rank that is left has returned."""
        roster = self.roster
        if roster.in_stage(Stage.STARTING, Stage.READY, Stage.MEMBER, Stage.DONE):
            return
        if roster.in_stage(Stage.RETURNED):
            self._end("finished")
        else:
            self._enter(Phase.GATHERING)

    def _gather(self) -> None:
        """Make the next plan if all who belong to it are ready."""
        roster = self.roster
        if roster.awaited():
            return
        if roster.stopping:
            self._end("stopped", reason="stopped by its user at a commit")
            return
        ready = [rank for rank in roster.in_stage(Stage.READY) if not rank.leaving]
        if roster.in_stage(Stage.RETURNED):
            self._gather_returned(ready)
            return
        synced = [rank for rank in ready if rank.version != FRESH]
        if roster.broken_by_user and not synced:
            reason = "; ".join(sorted(set(roster.broken_by_user.values())))
            self._end("failed", "rank_failed", reason)
            return
        founders = [r for r in roster.in_stage(Stage.STARTING) if r.start < roster.founders]
        if founders and not synced:
            return  # those who were started together take part from the first
        self._plan(ready)

    def _gather_returned(self, ready: list[Rank]) -> None:
        if ready:
            names = ", ".join(self._name(rank) for rank in ready)
            self._end("failed", "returned_early", f"ranks returned while others wait: {names}")
        elif not self.roster.in_stage(Stage.STARTING):
            self._end("finished")

    def _plan(self, ready: list[Rank]) -> None:
        roster, limits = self.roster, self.roster.limits
        loop = max((rank.loop for rank in ready), default=0)
        ready = [rank for rank in ready if rank.loop == loop]
        order_before = [member.start for member in roster.plan.members] if roster.plan else []
        survivors = [rank for rank in ready if rank.version != FRESH]
        survivors.sort(key=lambda rank: order_before.index(rank.start))
        newcomers = [rank for rank in ready if rank.version == FRESH]
        order = arrange(survivors, newcomers, most=limits.max_np, per_host=limits.slots_per_host)
        if len(order) < limits.min_np:
            return
        if roster.forming_failures > 1 and self._leave_out(newcomers, len(survivors)):
            return self._plan([rank for rank in ready if rank.stage == Stage.READY])
        if roster.forming_failures >= FORMING_FAILURES:
            reason = "; ".join(dict.fromkeys(roster.reset_causes))
            self._end("failed", "no_progress", f"the ranks could not connect: {reason}")
            return
        if roster.plan is not None and not self._count_reset(order):
            return
        known = set(order_before)
        for rank in survivors:
            if rank not in order:
                self._end_rank(rank, "leave", "the job was scaled down")
        self._publish(order)
        for rank in order:
            if rank.start not in known:
                self._record("joined", rank)

    def _leave_out(self, newcomers: list[Rank], others: int) -> bool:
        """Part with newcomers whose plans do not form, if there are enough others."""
        tried = [rank for rank in newcomers if rank.planned > 0]
        if others < self.roster.limits.min_np:
            return False
        for rank in tried:
            self._record("lost", rank, "the others cannot connect to it")
            self._end_rank(rank, "evict", "the others cannot connect to this rank")
            self._cool_down(rank, process_gone=False)
        return bool(tried)

    def _count_reset(self, order: list[Rank]) -> bool:
        roster, limit = self.roster, self.roster.limits.reset_limit
        causes = "; ".join(dict.fromkeys(roster.reset_causes)) or "ranks join or leave"
        roster.reset_causes.clear()
        if limit is not None and roster.resets >= limit:
            self._end("failed", "reset_limit", f"reset_limit={limit} is used up; next: {causes}")
            return False
        roster.resets += 1
        self._record("reset", detail=f"{causes} → {len(order)} ranks")
        return True

    def _hire(self) -> None:
        """Start ranks on free slots, as many as the job may have."""
        roster, limits = self.roster, self.roster.limits
        self._trim()
        if not roster.may_hire():
            return
        if not roster.launched and roster.within_reach(self._now) < roster.needed():
            return
        free = roster.free_slots(self._now)
        if limits.max_np is not None:
            free = free[: max(0, limits.max_np - len(roster.staying()))]
        if free:
            if not roster.ranks:
                roster.founders = roster.starts + len(free)
            roster.launched = True
            self._start(free)

    def _trim(self) -> None:
        """End newcomers that there is no room for any more."""
        roster, limits = self.roster, self.roster.limits
        newcomers = [r for r in roster.in_stage(Stage.STARTING, Stage.READY) if r.version == FRESH]
        loop = roster.plan.loop if roster.plan else 0
        for rank in newcomers:
            if roster.phase == Phase.RUNNING and rank.stage == Stage.READY and rank.loop < loop:
                roster.closed = True
                reason = "the function uses collectives before its elastic loop: nobody can join it"
                self._end_rank(rank, "stop", reason)
        if limits.max_np is not None:
            surplus = min(len(roster.staying()) - limits.max_np, len(newcomers))
            for rank in newcomers[len(newcomers) - max(surplus, 0) :]:
                self._end_rank(rank, "leave", "the job was scaled down")

    def _announce_changes(self) -> None:
        """Tell the members of a change, once per generation."""
        roster, limits = self.roster, self.roster.limits
        if roster.pending:
            return
        members = roster.members()
        surplus = 0 if limits.max_np is None else max(0, len(members) - limits.max_np)
        for rank in members[len(members) - surplus :]:
            if not rank.leaving:
                self._ask_to_leave(rank)
        leaving = any(rank.leaving for rank in members)
        if leaving or roster.stopping or self._joiners(members):
            roster.pending = True
            starts = tuple(rank.start for rank in members)
            self._emit(Notify(generation=roster.generation, starts=starts))

    def _joiners(self, members: list[Rank]) -> bool:
        """Return whether newcomers should be taken in now."""
        roster, limits = self.roster, self.roster.limits
        loop = roster.plan.loop if roster.plan else 0
        ready = [r for r in roster.in_stage(Stage.READY) if not r.leaving and r.loop == loop]
        if not ready:
            return False
        larger = arrange(members, ready, most=limits.max_np, per_host=limits.slots_per_host)
        waited = self._now - min(rank.since for rank in ready)
        alone = not roster.in_stage(Stage.STARTING)
        return len(larger) > len(members) and (alone or waited >= JOIN_WINDOW)
