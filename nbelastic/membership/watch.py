"""What time alone brings about: whoever is waited for too long, and when to give up waiting."""

from __future__ import annotations

from dataclasses import replace

from .effects import RestartWorker
from .rank import Phase, Stage
from .transitions import Transitions

__all__ = ["HELD_UP", "Watch"]

HELD_UP = "held up the others"
"""How the reason begins for which a rank that others waited for is evicted."""

STALLS = 3
"""Stalls in a row with everybody waiting and no commit in between, after which the job fails."""


class Watch(Transitions):
    """The watch over everything that has a time limit. `now >= since + limit` means: it is over."""

    def _expire(self) -> None:
        self._expire_ending()
        if self.roster.ended:
            return
        self._expire_starting()
        if self.roster.phase == Phase.FORMING:
            self._watch_forming()
        elif self.roster.phase == Phase.GATHERING:
            self._watch_gathering()
        else:
            self._watch_for_stalls()

    def _expire_ending(self) -> None:
        roster, limit = self.roster, self.roster.limits.ending_timeout
        oldest = roster.counted.first(Stage.ENDING)
        if oldest is None or self._now < oldest.since + limit:
            return
        for rank in roster.in_stage(Stage.ENDING):
            if self._now >= rank.since + limit:
                roster.ranks.pop(rank.start)
                roster.drop_slot(rank.slot.id)
                self._emit(RestartWorker(slot=rank.slot, reason="its rank did not end when told"))

    def _expire_starting(self) -> None:
        limit = self.roster.limits.elastic_timeout
        oldest = self.roster.counted.first(Stage.STARTING)
        if oldest is None or self._now < oldest.since + limit:
            return
        starting = self.roster.in_stage(Stage.STARTING)
        late = [rank for rank in starting if self._now >= rank.since + limit]
        self._evict(late, f"not ready {limit:g} s after its start")

    def _watch_forming(self) -> None:
        """Part with members that are silent and do not connect; where none is, try again.

        One member that cannot connect keeps others from connecting too: they are not to blame.
        """
        roster, limit = self.roster, self.roster.limits.forming_timeout
        if self._now < roster.phase_since + limit:
            return
        roster.forming_failures += 1
        late = [rank for rank in roster.members() if not rank.formed]
        silent = roster.unheard(late, self._now)
        self._evict(silent, f"not connected after {limit:g} s")
        if not silent:
            names = ", ".join(self._name(rank) for rank in late)
            self._break(f"not connected after {limit:g} s: {names}")

    def _watch_gathering(self) -> None:
        roster, limit = self.roster, self.roster.limits.stall_timeout
        if self._now >= roster.phase_since + limit:
            self._evict(roster.awaited(), f"did not let go of its generation in {limit:g} s")

    def _watch_for_stalls(self) -> None:
        roster, limit = self.roster, self.roster.limits.stall_timeout
        if self._now < roster.still_since + limit:
            return
        still_since = min((rank.moved_at for rank in roster.awaited()), default=self._now)
        roster.still_since = still_since
        suspects = roster.stall_suspects(self._now)
        if not suspects:
            return
        if len(suspects) < len(roster.awaited()):
            self._evict(suspects, f"{HELD_UP} for {limit:g} s")
            return
        roster.stalls += 1
        reason = f"all ranks waited for each other for {limit:g} s"
        if roster.stalls >= STALLS:
            self._end("failed", "no_progress", f"{reason}, {STALLS} times in a row")
        elif roster.phase == Phase.FINISHING:
            self._end("failed", "no_progress", f"{reason} after their loop")
        else:
            self._break(reason)

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
            self._record("waiting", detail=roster.presence(self._now))
        if self._now < roster.short_since + limits.elastic_timeout:
            return
        if not roster.launched and there >= limits.min_np:
            roster.limits = replace(limits, np=limits.min_np)
            roster.short_since = None
            return
        self._end("failed", "not_enough_workers", self._shortage())

    def _shortage(self) -> str:
        roster, limits = self.roster, self.roster.limits
        waited = self._now - (roster.short_since or 0.0)
        reason = (
            f"{roster.presence(self._now)} (min_np={limits.min_np}) "
            f"after waiting {waited:.1f} s (elastic_timeout={limits.elastic_timeout:g})"
        )
        out = [s.worker for s in roster.slots.values() if roster.excluded(s, self._now)]
        if out:
            reason = f"{reason}; left out after failures: {', '.join(out)}"
        last = roster.repeats.last
        return f"{reason}; last error: {last}" if last else reason
