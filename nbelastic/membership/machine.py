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
from .effects import Effect, EndRank
from .idle import is_idle
from .model import over
from .placement import arrange
from .rank import Phase, Rank, Stage
from .rules import Rules

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Machine"]

_HANDLERS = {kind: f"_on_{kind.__name__}" for kind in ev.Event.__subclasses__()}


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
        self._chance, self._effects = chance, []
        roster = self.roster
        due = self.deadline()  # asked first, so that what is due at this very moment counts
        roster.now = max(now, roster.now)
        if roster.phase != Phase.ENDED:
            handler: Callable[[ev.Event], None] = getattr(self, _HANDLERS[type(event)])
            handler(event)
            if self._effects or roster.now >= (due or 0.0) or not self._is_idle(event):
                self._deadline = None
                self._advance()
        return self._effects

    def deadline(self) -> float | None:
        """Return when to hand in a ``Tick`` if nothing else happens; None after the end."""
        if self._deadline is None:
            self._deadline = self.roster.deadline(self.roster.now)
        return self._deadline

    def _is_idle(self, event: ev.Event) -> bool:
        """Return whether the rules can be spared; who applies them gets the same decisions."""
        return is_idle(self.roster, event)

    # -- slots -------------------------------------------------------------------------------

    def _on_SlotsFound(self, event: ev.SlotsFound) -> None:  # noqa: N802
        for slot in event.slots:
            if slot.id not in self.roster.departing:
                self.roster.find_slot(slot)

    def _on_SlotBusy(self, event: ev.SlotBusy) -> None:  # noqa: N802
        self.roster.drop_slot(event.slot)
        for rank in self._on_slot(event.slot):
            if rank.stage in (Stage.STARTING, Stage.ENDING):
                self.roster.ranks.pop(rank.start)
        if not self.roster.ranks and self.roster.plan is None:
            self.roster.launched = False

    def _on_SlotLeaving(self, event: ev.SlotLeaving) -> None:  # noqa: N802
        self._depart(event.slot)
        for rank in self._on_slot(event.slot):
            if not rank.leaving and rank.stage not in (Stage.ENDING, Stage.RETURNED):
                self._ask_to_leave(rank, "its worker was asked to leave")

    def _on_SlotGone(self, event: ev.SlotGone) -> None:  # noqa: N802
        self._depart(event.slot)
        for rank in self._on_slot(event.slot):
            if rank.stage != Stage.RETURNED:  # else its result is here already
                self._lose(rank, event.detail or "its worker is gone", process_gone=True)

    def _on_SlotSilent(self, event: ev.SlotSilent) -> None:  # noqa: N802
        self.roster.drop_slot(event.slot)
        running = [rank for rank in self._on_slot(event.slot) if rank.stage != Stage.RETURNED]
        self._evict(running, event.detail or "its worker sends no heartbeat")

    def _on_slot(self, slot: str) -> list[Rank]:
        return list(self.roster.counted.on_slot.get(slot, {}).values())

    # -- ranks -------------------------------------------------------------------------------

    def _on_RankReady(self, event: ev.RankReady) -> None:  # noqa: N802
        rank = self.roster.ranks.get(event.start)
        if rank is None or rank.stage in (Stage.ENDING, Stage.RETURNED):
            return  # fenced: it was told to end, or is told again by whoever relays this
        if event.left < rank.planned or event.left > self.roster.generation:
            return  # sent before the plan that it is in now
        was_member = rank.stage in (Stage.MEMBER, Stage.DONE)
        rank.change(
            stage=Stage.READY,
            since=rank.since if rank.stage == Stage.READY else self._now,
            loop=event.loop,
            store=event.store,
            unreached=event.unreached,
        )
        self._note_version(rank, event.version)
        if was_member:
            self._note_commits()
            self._bury(rank, event.gone)
            self._left_generation(rank, event)
        if rank.leaving:
            self._end_rank(rank, "leave", "its worker was asked to leave")

    def _bury(self, witness: Rank, gone: tuple[int, ...]) -> None:
        """Take out members whose processes have ended; a neighbour has it from the system."""
        for start in gone:
            rank = self.roster.ranks.get(start)
            if rank is None or rank.stage not in (Stage.MEMBER, Stage.DONE) or rank is witness:
                continue  # it is known already
            self._depart(rank.slot.id)
            self._lose(rank, "its process has ended", process_gone=True)

    def _left_generation(self, rank: Rank, event: ev.RankReady) -> None:
        roster = self.roster
        if event.failed and roster.aborted:
            return  # it did as it was told
        if roster.plan and event.loop > roster.plan.loop and not event.failed:
            if roster.phase != Phase.GATHERING:  # on to the next loop, in a generation of its own
                self._enter(Phase.GATHERING)
        elif roster.phase == Phase.RUNNING and roster.pending and not event.failed:
            self._regather()
        elif event.failed or roster.phase in (Phase.RUNNING, Phase.FORMING):
            roster.forming_failures += roster.phase == Phase.FORMING
            unasked = "an operation failed" if event.failed else "it left its generation unasked"
            self._break(f"{self._name(rank)}: {event.detail or unasked}")

    def _on_RankFormed(self, event: ev.RankFormed) -> None:  # noqa: N802
        rank = self.roster.ranks.get(event.start)
        if rank is not None and rank.planned == event.generation == self.roster.generation:
            self.roster.backend = event.backend
            self._note_formed(rank)
            self._note_remark(event)

    def _note_remark(self, event: ev.RankFormed) -> None:
        """Put into the history why there is nothing faster: once, not with every generation."""
        if event.remark and event.remark != self.roster.remark:
            self.roster.remark = event.remark
            self._record("backend", detail=f"tensors go {over(event.backend)}: {event.remark}")

    def _note_formed(self, rank: Rank) -> None:
        roster = self.roster
        if roster.phase != Phase.FORMING:
            return
        rank.formed = True
        if not roster.counted.unformed:
            for member in roster.members():
                member.moved_at = member.heard_at = self._now
            roster.still_since = self._now
            roster.forming_failures = 0
            roster.ran = roster.ran or (roster.plan is not None and roster.plan.loop > 0)
            self._enter(Phase.RUNNING)
            size = roster.counted.present
            words = f"{size} rank{'s' * (size != 1)} {over(roster.backend)}"
            self._record("formed", detail=words.rstrip())

    def _on_LoopDone(self, event: ev.LoopDone) -> None:  # noqa: N802
        rank = self.roster.ranks.get(event.start)
        if rank is None or rank.planned != event.generation or rank.stage != Stage.MEMBER:
            return
        rank.stage, rank.moved_at = Stage.DONE, self._now
        self._note_version(rank, event.version)
        self._note_formed(rank)
        if self.roster.phase == Phase.GATHERING:
            self._abort_awaited("ranks left their loop at different steps")

    # -- ranks that have ended ---------------------------------------------------------------

    def _on_RankReturned(self, event: ev.RankReturned) -> None:  # noqa: N802
        roster = self.roster
        rank = roster.ranks.get(event.start)
        if rank is None or rank.stage == Stage.RETURNED:
            return
        in_loop = roster.plan is not None and roster.plan.loop > 0
        if rank.stage == Stage.ENDING or (
            in_loop and rank.leaving and roster.phase != Phase.FINISHING
        ):
            self._on_RankLeft(ev.RankLeft(event.start))
            return
        rank.stage, rank.since = Stage.RETURNED, self._now
        if roster.plan is None and not roster.crew:
            roster.crew = [other.start for other in arrange([], roster.staying())]
        if in_loop and roster.phase in (Phase.RUNNING, Phase.FORMING):
            self._end("failed", "returned_early", f"{self._name(rank)} returned while others train")
        else:
            self._note_formed(rank)

    def _on_RankFailed(self, event: ev.RankFailed) -> None:  # noqa: N802
        roster = self.roster
        rank = roster.ranks.get(event.start)
        if rank is None or rank.stage == Stage.RETURNED:
            return
        self._note_version(rank, event.version)
        if rank.stage == Stage.ENDING:
            if roster.ended and not event.collective:
                roster.broken_by_user[event.start] = event.error
            self._drop(rank, "it ended")
            return
        self._record("lost", rank, event.error)
        cause = f"{self._name(rank)}: {event.error}"
        if self._is_fatal(event):
            roster.ranks.pop(rank.start)
            if not event.collective:
                roster.broken_by_user[event.start] = event.error
            self._end("failed", "rank_lost" if event.collective else "rank_failed", cause)
            return
        if not event.collective and rank.stage != Stage.STARTING:
            roster.broken_by_user[event.start] = event.error
        self._drop(rank, cause)
        self._cool_down(rank, process_gone=False)
        if rank.planned and not event.collective:
            self._blame_function(rank, event.error)

    def _is_fatal(self, event: ev.RankFailed) -> bool:
        """Return whether a rank's failure cannot be made good by going back to a commit."""
        roster = self.roster
        if roster.phase == Phase.FINISHING:
            return True
        if event.collective:
            return roster.plan is None or roster.plan.loop == 0
        return max(other.version for other in roster.ranks.values()) <= 0

    def _on_RankLeft(self, event: ev.RankLeft) -> None:  # noqa: N802
        roster = self.roster
        rank = roster.ranks.get(event.start)
        if rank is None or rank.stage == Stage.RETURNED:
            return
        if not roster.ended:
            self._record("left", rank, "as planned")
        agreed = rank.leaving and roster.phase in (Phase.GATHERING, Phase.FINISHING)
        planned = roster.phase == Phase.RUNNING and roster.pending
        if planned or agreed:
            roster.ranks.pop(rank.start)
            if planned and rank.stage in (Stage.MEMBER, Stage.DONE):
                self._regather()
        else:
            self._drop(rank, f"{self._name(rank)} ended")

    def _on_RankNote(self, event: ev.RankNote) -> None:  # noqa: N802
        if event.start in self.roster.ranks:
            self._record(event.about, self.roster.ranks[event.start], event.detail)

    # -- beats -------------------------------------------------------------------------------

    def _on_Beats(self, event: ev.Beats) -> None:  # noqa: N802
        roster = self.roster
        for beat in event.beats:
            rank = roster.ranks.get(beat.start)
            if rank is not None:
                self._note_beat(rank, beat)
        if roster.phase == Phase.RUNNING:
            self._note_commits()

    def _note_beat(self, rank: Rank, beat: ev.Beat) -> None:
        rank.hear(self.roster.now, beat.progress, beat.waiting)
        if rank.stage == Stage.MEMBER:
            self._note_version(rank, beat.version)

    # -- the owner ---------------------------------------------------------------------------

    def _on_StopRequested(self, event: ev.StopRequested) -> None:  # noqa: N802
        roster = self.roster
        if roster.ended:
            if event.now:
                for rank in roster.in_stage(Stage.ENDING):
                    self._emit(
                        EndRank(start=rank.start, slot=rank.slot, how="cancel", reason=event.reason)
                    )
        elif event.now or not self._commits_to_come():
            self._end("stopped", reason=event.reason, how="cancel" if event.now else "stop")
        else:
            roster.stopping = True

    def _commits_to_come(self) -> bool:
        """Return whether the members will reach a commit, or the end, by themselves."""
        roster = self.roster
        in_loop = roster.plan is not None and roster.plan.loop > 0
        return in_loop and roster.phase in (Phase.RUNNING, Phase.FINISHING)

    def _on_LimitsChanged(self, event: ev.LimitsChanged) -> None:  # noqa: N802
        limits = self.roster.limits
        low = limits.min_np if event.min_np is None else event.min_np
        high = limits.max_np if event.max_np is None else event.max_np
        if high is not None and low > high:  # asked for one after the other: the later one counts
            low, high = (low, low) if event.max_np is None else (high, high)
        start = limits.np if event.min_np is None else low
        self.roster.limits = replace(limits, np=start, min_np=low, max_np=high)

    def _on_ClusterGone(self, event: ev.ClusterGone) -> None:  # noqa: N802
        self.roster.ranks.clear()
        self._end("failed", "cluster_lost", event.detail)

    def _on_Tick(self, event: ev.Tick) -> None:  # noqa: N802
        """Let time pass; :meth:`_advance` does the rest."""
