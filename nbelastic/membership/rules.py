"""What follows from a situation: the rules that the machine applies after every event."""

from __future__ import annotations

import math

from .effects import Notify, Release
from .model import FRESH
from .placement import arrange, choose
from .rank import Phase, Rank, Stage
from .roster import JOIN_WINDOW
from .separation import broken_pairs, outsiders
from .watch import Watch

__all__ = ["Rules"]

FORMING_FAILURES = 5
"""Plans in a row that could not form, after which the job fails."""

FRUITLESS = 10
"""Plans in a row of the same members, each ended by a fault without a commit; then it fails."""


BARREN = 30
"""Plans in a row, whoever their members, each after a fault and without a commit; then it fails."""


class Rules(Watch):
    """The rules; :meth:`_advance` applies them all."""

    def _advance(self) -> None:
        """Do all that the present situation calls for."""
        self._expire()
        if self.roster.phase == Phase.RUNNING:
            self._note_finish()
        if self.roster.phase == Phase.FINISHING:
            self._finish()
        if not self.roster.ended:
            self._trim()
            self._note_shortage()
        if self.roster.phase == Phase.GATHERING:
            self._gather()
        if not self.roster.ended:
            self._hire()
        if self.roster.phase == Phase.RUNNING:
            self._announce_changes()
        if self.roster.phase == Phase.ENDING:
            self._close()

    # -- the end of a generation -------------------------------------------------------------

    def _note_finish(self) -> None:
        """See whether the members have come to their end: of the loop, or of the function."""
        roster = self.roster
        if not roster.any_in(Stage.RETURNED):
            if roster.any_in(Stage.MEMBER):
                return
            self._note_commits()
            starts = tuple(member.start for member in roster.members())
            self._emit(Release(generation=roster.generation, starts=starts))
        self._enter(Phase.FINISHING)
        for rank in roster.awaited():
            rank.moved_at = self._now
        roster.still_since = self._now

    def _note_commits(self) -> None:
        """Note the newest commit that all members hold."""
        roster = self.roster
        common = min(roster.counted.versions, default=FRESH)
        if common >= roster.version + 1:
            roster.version = math.floor(common)
            roster.stalls = roster.fruitless = roster.barren = 0

    def _finish(self) -> None:
        """End the job once every member that is left has returned."""
        roster = self.roster
        for rank in roster.in_stage(Stage.STARTING, Stage.READY):
            self._end_rank(rank, "stop", "the job is finishing")
        if roster.any_in(Stage.MEMBER, Stage.DONE):
            return
        if roster.any_in(Stage.RETURNED):
            self._conclude()
        else:
            self._enter(Phase.GATHERING)

    # -- the next generation -----------------------------------------------------------------

    def _gather(self) -> None:
        """Make the next plan if all who belong to it are ready."""
        roster = self.roster
        if roster.any_in(Stage.MEMBER, Stage.DONE):
            return
        if roster.stopping:
            self._end("stopped", reason="stopped by its user at a commit")
            return
        if roster.any_in(Stage.RETURNED):
            self._gather_returned(self._ready())
            return
        synced = roster.counted.synced
        if roster.broken_by_user and not synced:
            reason = "; ".join(sorted(set(roster.broken_by_user.values())))
            self._end("failed", "rank_failed", reason)
            return
        starting = roster.counted.first(Stage.STARTING)
        if starting is not None and starting.start < roster.founders and not synced:
            return  # those who were started together take part from the first
        if roster.counted.ready >= roster.limits.min_np:
            self._plan(self._ready())

    def _ready(self) -> list[Rank]:
        return [rank for rank in self.roster.in_stage(Stage.READY) if not rank.leaving]

    def _gather_returned(self, ready: list[Rank]) -> None:
        if ready:
            names = ", ".join(self._name(rank) for rank in ready)
            self._end("failed", "returned_early", f"ranks returned while others wait: {names}")
        elif self.roster.plan is not None or not self.roster.any_in(Stage.STARTING):
            self._conclude()

    def _plan(self, ready: list[Rank]) -> None:
        """Make the next plan of those who are ready, if they are enough."""
        roster, limits = self.roster, self.roster.limits
        if roster.forming_failures > 1:
            ready = self._leave_out(ready)
        order = self._order(ready)
        if len(order) < limits.min_np:
            if len(ready) >= limits.min_np and not roster.any_in(Stage.STARTING):
                self._end("failed", "no_progress", "ranks wait at different places of the function")
        elif roster.forming_failures >= FORMING_FAILURES:
            self._give_up("the ranks could not connect")
        elif roster.plan is None or self._count_reset(order):
            chosen = set(order)
            for rank in ready:
                if rank not in chosen and (rank.version != FRESH or rank.planned):
                    self._end_rank(rank, "leave", "the job was scaled down")
            known = set(roster.crew)
            self._publish(order)
            for rank in order:
                if rank.start not in known:
                    self._record("joined", rank)
            self._trim()  # those whom the plan has left behind

    def _order(self, ready: list[Rank]) -> list[Rank]:
        """Choose members and put them in the order of their ranks.

        When there is not room for all, those with the newest commit come first.
        """
        roster, limits = self.roster, self.roster.limits
        before = {start: rank for rank, start in enumerate(roster.crew)}
        loop = max((rank.loop for rank in ready), default=0)
        ready = [rank for rank in ready if rank.loop == loop]
        ready.sort(key=lambda rank: (before.get(rank.start, len(before)), rank.start))
        by_worth = sorted(ready, key=lambda rank: -rank.version)
        chosen = set(choose(by_worth, most=limits.max_np, per_host=limits.slots_per_host))
        survivors = [rank for rank in ready if rank in chosen and rank.start in before]
        newcomers = [rank for rank in ready if rank in chosen and rank.start not in before]
        return arrange(survivors, newcomers)

    def _leave_out(self, ready: list[Rank]) -> list[Rank]:
        """Part with those without whom plans may form, if there are enough others.

        Those are, where ranks say whom they cannot reach, as few as it takes that the others
        reach each other; where nobody does, the newcomers.
        """
        in_order = sorted(self._order(ready), key=lambda rank: rank.version == FRESH)
        order = [rank.start for rank in in_order]
        pairs = broken_pairs(order, {rank.start: rank.unreached for rank in ready})
        for one, other in pairs:
            names = self._name(self.roster.ranks[one]), self._name(self.roster.ranks[other])
            self.roster.reset_causes.append(f"{names[0]} cannot reach {names[1]}")
        out = outsiders(order, pairs)
        others = [rank for rank in ready if rank.start not in out]
        if not out:
            others = [rank for rank in ready if rank.version != FRESH or not rank.planned]
        if len(self._order(others)) < self.roster.limits.min_np:
            return ready
        for rank in ready:
            if rank not in others:
                self._record("lost", rank, "the others cannot connect to it")
                self._end_rank(rank, "evict", "the others cannot connect to this rank")
                if out:  # its worker does nothing wrong, and networks heal
                    self._rest("worker", rank.slot.lasting, rank)
                else:
                    self._cool_down(rank, process_gone=False)
        return others

    def _count_reset(self, order: list[Rank]) -> bool:
        """Count a change of membership; return whether the job may go on."""
        roster, limit = self.roster, self.roster.limits.reset_limit
        causes = "; ".join(dict.fromkeys(roster.reset_causes))
        same = [rank.start for rank in order] == roster.crew
        if same and not causes and roster.plan and order[0].loop > roster.plan.loop:
            return True  # on to the next loop, with nothing changed
        if limit is not None and roster.resets >= limit:
            reason = f"reset_limit={limit} is used up; next: {causes or 'ranks join or leave'}"
            self._end("failed", "reset_limit", reason)
            return False
        roster.fruitless = roster.fruitless + 1 if same and causes else 0
        roster.barren += bool(causes)
        if roster.fruitless >= FRUITLESS or roster.barren >= BARREN:
            times = FRUITLESS if roster.fruitless >= FRUITLESS else BARREN
            self._give_up(f"ranks failed {times} times in a row without a commit")
            return False
        roster.resets += 1
        roster.reset_causes.clear()
        self._record("reset", detail=f"{causes or 'ranks join or leave'} → {len(order)} ranks")
        return True

    def _give_up(self, reason: str) -> None:
        causes = dict.fromkeys(self.roster.reset_causes)
        self._end("failed", "no_progress", f"{reason}: {'; '.join(causes)}")

    # -- newcomers ---------------------------------------------------------------------------

    def _trim(self) -> None:
        """End newcomers that cannot join, or that there is no room for any more."""
        roster, limits = self.roster, self.roster.limits
        for rank in self._left_behind():
            roster.closed = True
            reason = "the others are past where this rank is: nobody can join them there"
            self._end_rank(rank, "stop", reason)
        if limits.max_np is not None:
            surplus = roster.counted.staying - limits.max_np
            if surplus > 0:
                waiting = roster.in_stage(Stage.STARTING, Stage.READY)
                new = [rank for rank in waiting if rank.version == FRESH and not rank.planned]
                for rank in new[max(len(new) - surplus, 0) :]:
                    self._end_rank(rank, "leave", "the job was scaled down")

    def _left_behind(self) -> list[Rank]:
        """Return ranks that cannot take part any more: the others are past where these are."""
        roster, loop = self.roster, self.roster.loop()
        here = loop is None or all(ready == loop for ready in roster.counted.ready_loops)
        if here and (loop in (None, 1) or not roster.counted.newcomers):
            return []
        return [
            rank
            for rank in roster.in_stage(Stage.STARTING, Stage.READY)
            if (loop not in (None, 1) and not rank.planned)
            or (loop is not None and rank.stage == Stage.READY and rank.loop != loop)
        ]

    def _hire(self) -> None:
        """Start ranks on free slots, as many as the job may have."""
        roster, limits = self.roster, self.roster.limits
        if not roster.may_hire():
            return
        if not roster.launched and roster.within_reach(self._now) < roster.needed():
            return
        staying, most = roster.counted.staying, limits.max_np
        if not roster.counted.vacant or (most is not None and staying >= most):
            return
        free = roster.free_slots(self._now)
        if most is not None:
            free = free[: most - staying]
        if free:
            if not staying:
                roster.founders, roster.closed = roster.starts + len(free), False
            roster.launched = True
            self._start(free)

    # -- changes that are planned ------------------------------------------------------------

    def _announce_changes(self) -> None:
        """Tell the members of a change, once per generation."""
        roster, limits = self.roster, self.roster.limits
        counted, most = roster.counted, limits.max_np
        stay = counted.staying == len(roster.ranks) and (most is None or counted.staying <= most)
        if roster.pending or (stay and not roster.stopping and not counted.ready):
            return
        members = roster.members()
        staying = [rank for rank in members if not rank.leaving]
        if limits.max_np is not None:
            for rank in staying[limits.max_np :]:
                self._ask_to_leave(rank, "the job was scaled down")
        leaving = any(rank.leaving for rank in members)
        if leaving or roster.stopping or self._joiners(staying):
            roster.pending = True
            starts = tuple(rank.start for rank in members)
            self._emit(Notify(generation=roster.generation, starts=starts))

    def _joiners(self, members: list[Rank]) -> bool:
        """Return whether newcomers should be taken in now."""
        roster, limits = self.roster, self.roster.limits
        ready = self._ready()
        if not ready:
            return False
        larger = choose([*members, *ready], most=limits.max_np, per_host=limits.slots_per_host)
        waited = self._now >= min(rank.since for rank in ready) + JOIN_WINDOW
        alone = not roster.any_in(Stage.STARTING)
        return len(larger) > len(members) and (alone or waited)
