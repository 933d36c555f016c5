"""State machine of a job's membership: one event in, a list of effects out.

The machine holds no clock, thread or connection. Time and the random part of exclusions are
arguments, so the same events always lead to the same decisions, and every run can be replayed.
After every event, whatever the order, loss and duplication of events, the invariants in the
docstring of :class:`Machine` hold.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence

from msgspec.structs import replace

from nbelastic import messages as m

from . import rules
from .failure_policy import SAME_KIND, ErrorReport, FailurePolicy, Setback
from .placement import arrange, broken_pairs, choose_removed, places_of
from .ranks import Phase, Rank, Stage
from .roster import Roster

TICK = 0.25  # seconds after which a `Tick` is handed in, if nothing else happens

_UNABLE = (m.UnusedReason.OTHER_VERSIONS, m.UnusedReason.REFUSED)

_HANDLERS = {
    kind: "_on" + re.sub("([A-Z])", r"_\1", kind.__name__).lower() for kind in m.leaves(m.Event)
}


class Machine:
    """Membership of one job.

    1. There is one generation at a time, and numbers strictly grow. A message from an older one
       changes nothing.
    2. Ranks of a plan are ``0..n-1``, ``min_np <= n <= max_np``, a slot appears once, ranks on one
       host are contiguous.
    3. Survivors keep their relative order. The source of a plan holds its newest version.
    4. A worker that is excluded, leaving or gone is in no new plan, unless it is leaving and alone
       holds the state.
    5. The committed version never goes back while a rank lives that has it.
    6. Every state but the last has a time limit. They are looked at every TICK seconds.
    7. Success means that every rank of the last generation returned. Nothing happens after the end.
    8. A fault on one worker costs the others no more than the batch in flight.
    """

    def __init__(self, limits: m.Limits) -> None:
        self.roster = Roster(limits=limits, policy=FailurePolicy.of(limits))
        self._chance = 0.0
        self._effects: list[m.Effect] = []

    def handle(self, event: m.Event, now: float, chance: float = 0.0) -> list[m.Effect]:
        """Process one event and return the effects; `chance` is from 0 up to 1."""
        self._chance, self._effects = chance, []
        roster = self.roster
        roster.now = max(now, roster.now)
        if roster.phase != Phase.ENDED:
            handler: Callable[[m.Event], None] = getattr(self, _HANDLERS[type(event)])
            handler(event)
            due = isinstance(event, m.Tick) or roster.now >= roster.advanced + TICK
            if due:
                roster.advanced = roster.now
                roster.note_commits()
                self._apply_time_limits()
            if self._effects or due or not rules.needs_nothing(roster, event):
                self._advance()
        return self._effects

    @property
    def _now(self) -> float:
        return self.roster.now

    # -- events: slots -------------------------------------------------------------------------

    def _on_slots_found(self, event: m.SlotsFound) -> None:
        for slot in event.slots:
            if slot.id not in self.roster.departing:
                self.roster.find_slot(slot)

    def _on_workers_unused(self, event: m.WorkersUnused) -> None:
        before = rules.held_up(self.roster)
        for each in event.workers:
            if each.reason in _UNABLE and each not in self.roster.unused:
                self._emit(m.Record("refused", worker=each.worker, detail=each.why))
        self.roster.unused = list(event.workers)
        for rank in before:
            if rank not in rules.held_up(self.roster):
                rank.since = self._now

    def _on_slot_busy(self, event: m.SlotBusy) -> None:
        roster = self.roster
        roster.drop_slot(event.slot)
        for rank in roster.on_slot(event.slot):
            if rank.stage in (Stage.STARTING, Stage.ENDING):
                roster.ranks.pop(rank.start)
        if not roster.ranks and roster.plan is None:
            roster.launched = False

    def _on_slot_leaving(self, event: m.SlotLeaving) -> None:
        if event.notice is not None and event.notice.soft:
            if event.slot not in self.roster.departing:
                self._note_notice(event.slot, event.notice)
            return
        self.roster.depart(event.slot)
        if event.notice is not None:
            self._note_notice(event.slot, event.notice)
        for rank in self.roster.on_slot(event.slot):
            urgent = event.soon or rank.leave_reason == m.SHARED
            asked = rank.leaving and not (urgent and not rank.leave_sent)
            stay, gone = self._time_of(event)
            if not asked and rank.stage not in (Stage.ENDING, Stage.RETURNED):
                self._ask_to_leave(rank, m.WORKER_LEAVING, stay=stay, gone=gone)
            elif rank.leaving:  # it may have less time than it had
                rank.leave_deadline = min(rank.leave_deadline, self._now + stay)
                rank.gone_at = min(rank.gone_at, self._now + gone)
        there = self.roster.counted.staying or self.roster.limits.checkpoint or self.roster.stopping
        if event.notice is not None and not there and rules.last_holders(self.roster):
            self._warn(m.NONE_STAYS)

    def _time_of(self, event: m.SlotLeaving) -> tuple[float, float]:
        """Return how long last holders may stay, and after how long the worker is gone."""
        if event.soon:
            return 0.0, rules.SOON
        if event.notice is None:
            return rules.STAY, rules.LONGEST_STAY + rules.MARGIN
        left = max(event.notice.seconds, 0.0)
        return rules.time_to_stay(self.roster, left), max(left - rules.MARGIN, rules.SOON)

    def _note_notice(self, slot: str, notice: m.Notice) -> None:
        """Note the end of a worker with ranks, or a worker's risk."""
        roster, ranks = self.roster, self.roster.on_slot(slot)
        known = slot in (roster.at_risk if notice.soft else roster.notices)
        if notice.soft:
            roster.at_risk[slot] = notice
        elif ranks:
            roster.notices[slot] = replace(notice, seconds=self._now + max(notice.seconds, 0.0))
        for rank in [] if known else ranks:
            self._record("notice", rank, notice)

    def _on_slot_stays(self, event: m.SlotStays) -> None:
        roster = self.roster
        risk = roster.at_risk.pop(event.slot, None)
        if roster.departing.pop(event.slot, None) is None and risk is None:
            return  # it never was to leave
        notice = roster.notices.pop(event.slot, risk)
        for rank in roster.on_slot(event.slot):
            if notice is not None:
                self._record("notice", rank, replace(notice, revoked=True, seconds=0.0))
            asked = rank.leave_sent or rank.stage == Stage.ENDING
            if rank.leaving and not asked and rank.leave_reason == m.WORKER_LEAVING:
                rank.leaving = False
                roster.find_slot(rank.slot)

    def _on_slot_gone(self, event: m.SlotGone) -> None:
        self.roster.depart(event.slot)
        self.roster.notices.pop(event.slot, None)
        dead = self.roster.dead.items()
        self.roster.dead = {start: slot for start, slot in dead if slot.id != event.slot}
        for rank in self.roster.on_slot(event.slot):
            self._lose(rank, m.Lost(self.roster.id(rank), event.reason, event.detail))

    def _on_slot_silent(self, event: m.SlotSilent) -> None:
        self.roster.drop_slot(event.slot)
        for rank in self.roster.on_slot(event.slot):
            lost = m.Lost(self.roster.id(rank), event.reason, seconds=event.seconds)
            if rank.stage != Stage.RETURNED:
                self._send_end(rank, "evict", lost)
                self._emit(m.RestartWorker(slot=rank.slot, reason=lost))
                self.roster.depart(rank.slot.id)
            self._lose(rank, lost)

    # -- events: ranks -------------------------------------------------------------------------

    def _on_rank_ready(self, event: m.RankReady) -> None:
        rank = self.roster.ranks.get(event.start)
        if rank is None or rank.stage in (Stage.ENDING, Stage.RETURNED):
            return  # fenced: it was ordered to end
        if event.left < rank.planned or event.left > self.roster.generation:
            return  # sent before the plan that it is in now
        was_member = rank.stage in (Stage.MEMBER, Stage.DONE)
        rank.since = rank.since if rank.stage == Stage.READY else self._now
        rank.stage, rank.loop, rank.store = Stage.READY, event.loop, event.store
        rank.unreached, rank.line, rank.part = event.unreached, event.line, event.part
        if event.part:
            self._summon(*self.roster.in_stage(Stage.STARTING))
        self.roster.note_version(rank, event.version)
        if was_member:
            self._remove_dead_members(rank, event.gone)
            self._left_generation(rank, event)
        self._end_leaving()

    def _summon(self, *ranks: Rank) -> None:
        """Let ranks form the first generation, though they need not begin an operation."""
        starts = tuple(rank.start for rank in ranks)
        if starts and self.roster.plan is None:
            self._emit(m.Notify(generation=0, starts=starts))

    def _remove_dead_members(self, witness: Rank, gone: tuple[int, ...]) -> None:
        """Remove members whose processes have ended, as a neighbour reports."""
        for start in gone:
            rank = self.roster.ranks.get(start)
            if rank is None or rank.stage not in (Stage.MEMBER, Stage.DONE) or rank is witness:
                continue  # it is known already
            self.roster.drop_slot(rank.slot.id)  # it is found again, if its worker lives
            self._lose(rank, m.Lost(self.roster.id(rank), m.LossReason.PROCESS_ENDED))
            self.roster.dead[rank.start] = rank.slot

    def _left_generation(self, rank: Rank, event: m.RankReady) -> None:
        roster = self.roster
        if event.own and event.detail and roster.own_failure is None:
            # The others fail with it, and may report sooner.
            roster.own_failure = m.GenerationLeft(roster.id(rank), event.failed, event.detail)
        if event.failed and roster.aborted:
            return  # it followed the order
        if roster.plan and event.loop > roster.plan.loop and not event.failed:
            self._note_formed(rank)  # reports of others may still be on their way
            if roster.phase not in (Phase.FORMING, Phase.GATHERING):
                roster.enter(Phase.GATHERING)  # the next loop has a generation of its own
        elif roster.phase == Phase.RUNNING and roster.pending and not event.failed:
            self._regather()
        elif event.failed or roster.phase in (Phase.RUNNING, Phase.FORMING):
            roster.policy.forming_failures += roster.phase == Phase.FORMING and not event.own
            self._break(m.GenerationLeft(roster.id(rank), event.failed, event.detail))

    def _on_rank_formed(self, event: m.RankFormed) -> None:
        roster = self.roster
        rank = roster.ranks.get(event.start)
        if rank is None or not rank.planned == event.generation == roster.generation:
            return
        roster.backend = event.backend
        self._note_formed(rank)
        if event.remark and event.remark != roster.remark:  # once, not with every generation
            roster.remark = event.remark
            words = f"tensors go {m.over(event.backend)}: {event.remark}"
            self._record("backend", reason=m.Text(words))

    def _note_formed(self, rank: Rank) -> None:
        roster = self.roster
        if roster.phase != Phase.FORMING:
            return
        rank.formed = True
        if all(kind.formed for kind, _ in roster.counted.members(roster.generation)):
            for member in roster.members():
                member.progress_at = member.heartbeat_at = self._now
            roster.policy.forming_failures = 0
            roster.ran = roster.ran or roster.in_loop
            roster.enter(Phase.RUNNING)
            words = f"{m.so_many_ranks(roster.present)} {m.over(roster.backend)}"
            self._record("formed", reason=m.Text(words.rstrip()))

    def _on_loop_done(self, event: m.LoopDone) -> None:
        rank = self.roster.ranks.get(event.start)
        if rank is None or rank.planned != event.generation or rank.stage != Stage.MEMBER:
            return
        rank.stage, rank.progress_at, rank.operations = Stage.DONE, self._now, event.operations
        self.roster.note_version(rank, event.version)
        self._note_formed(rank)
        if self.roster.phase == Phase.GATHERING:
            self._abort_awaited(m.STEPS_DIFFER)

    def _on_beats(self, event: m.Beats) -> None:
        roster = self.roster
        for beat in event.beats:
            rank = roster.ranks.get(beat.start)
            if rank is not None:
                first = rank.heartbeat_at == 0.0 and rank.stage == Stage.STARTING
                if first and any(each.part for each in roster.in_stage(Stage.READY)):
                    self._summon(rank)  # it was started later, or its worker did not know it
                rank.note_heartbeat(roster.now, beat)
                if rank.stage == Stage.MEMBER:
                    self.roster.note_version(rank, beat.version)

    def _on_rank_note(self, event: m.RankNote) -> None:
        rank = self.roster.ranks.get(event.start)
        if rank is not None:
            self._record(event.about, rank, m.Text(event.detail), event.figures)

    def _on_weights_sampled(self, event: m.WeightsSampled) -> None:
        roster = self.roster
        present = event.start in roster.ranks and event.generation == roster.generation
        if present and rules.differs(roster.samples, event):
            self._warn(m.WEIGHTS_DIFFER)

    # -- events: the end of a rank -------------------------------------------------------------

    def _on_rank_returned(self, event: m.RankReturned) -> None:
        roster = self.roster
        rank = roster.ranks.get(event.start)
        if rank is None or rank.stage == Stage.RETURNED:
            return
        leaves = roster.in_loop and rank.leaving and roster.phase != Phase.FINISHING
        if rank.stage == Stage.ENDING or leaves:
            self._on_rank_left(m.RankLeft(event.start))
            return
        rank.stage, rank.since, rank.exits = Stage.RETURNED, self._now, event.exits
        if event.isolated:
            roster.isolated.append(event.start)
        if roster.plan is None and not roster.expected:
            roster.expected = [other.start for other in arrange([], roster.staying())]
        if roster.in_loop and roster.phase in (Phase.RUNNING, Phase.FORMING):
            early = f"{roster.id(rank)} returned while others train"
            self._fail(m.FailureKind.RETURNED_EARLY, m.Text(early))
        else:
            self._note_formed(rank)

    def _on_rank_exited(self, event: m.RankExited) -> None:
        rank = self.roster.ranks.get(event.start)
        if rank is not None and rank.exits:
            self._note_exit(rank, event.cut)

    def _note_exit(self, rank: Rank, cut: str = "") -> None:
        """Note the end of a process whose function had returned; warn if it was cut off."""
        rank.exits = False
        if cut:
            self._warn(m.CutOff(self.roster.id(rank), cut))

    def _on_rank_raised(self, event: m.RankRaised) -> None:
        roster = self.roster
        rank = roster.ranks.get(event.start)
        if rank is None or rank.stage == Stage.RETURNED:
            return
        self.roster.note_version(rank, event.version)
        if rank.stage == Stage.ENDING:
            if roster.ended and not event.collective:
                roster.user_errors[event.start] = event.error
                self._blame(m.Lost(roster.id(rank), m.LossReason.RAISED, event.error))
            roster.ranks.pop(rank.start)
            return
        cause = m.Lost(roster.id(rank), m.LossReason.RAISED, event.error)
        self._record("lost", rank, cause)
        others = sum(other is not rank for other in roster.staying())
        if rules.is_fatal(roster, event):
            roster.ranks.pop(rank.start)
            if not event.collective:
                roster.user_errors[event.start] = event.error
            kind = m.FailureKind.RANK_LOST if event.collective else m.FailureKind.RANK_FAILED
            self._fail(kind, cause)
        elif event.state_mismatch and event.version == m.FRESH and others >= roster.limits.min_np:
            words = (
                f"{roster.id(rank)} could not join: its function builds another state than the "
                f"others have\n{event.error}\nThe others go on without it, and its worker is tried "
                "again later. Whatever training adds to the model or the optimizer must be there, "
                "on each rank, before the state is made."
            )
            self._warn(m.Text(words))
            self._drop(rank, cause)
            # The worker is not at fault. It is tried again later, when another state may fit.
            self._record(
                "cooldown", rank, roster.policy.exclude_name(rank.slot, self._now, self._chance)
            )
        else:
            if not event.collective and rank.stage != Stage.STARTING:
                roster.user_errors[event.start] = event.error
            self._drop(rank, cause)
            self._note_failure(rank, cause, process_gone=False)
            if rank.planned and not event.collective:
                self._end_if_repeated(rank, event.error)
            if not event.collective and not roster.ended:
                self._warn(m.RankError(event.error), rank)

    def _blame(self, cause: m.Lost) -> None:
        """Make the cause that came later the end of a job, in place of the failed operation."""
        outcome = self.roster.outcome
        if outcome is None or outcome.error != m.FailureKind.RANK_LOST:
            return
        consequence = outcome.reason
        if isinstance(consequence, m.Lost) and consequence.reason == m.LossReason.RAISED:
            self.roster.outcome = replace(outcome, error=m.FailureKind.RANK_FAILED, reason=cause)

    def _end_if_repeated(self, rank: Rank, error: str) -> None:
        """End the job if the same error came from several workers."""
        roster, policy = self.roster, self.roster.policy
        if roster.ended:
            return
        known = (rank.planned, roster.version, self._now, error)
        chain = policy.note_error(ErrorReport(rank.start, rank.slot, *known))
        for_good = policy.workers.bounds is None
        short = for_good and rules.within_reach(roster) < roster.limits.min_np
        reason = policy.repeated_error(chain, roster.hosts(), short=short)
        if reason is not None:
            roster.user_errors.update({each.start: each.error for each in chain})
            self._fail(m.FailureKind.RANK_FAILED, reason)

    def _on_rank_died(self, event: m.RankDied) -> None:
        roster = self.roster
        rank = roster.ranks.get(event.start)
        slot = roster.dead.pop(event.start, None)
        if slot is not None:  # a neighbour has noticed it before
            roster.last_death = event.detail
            if not roster.ended:
                self._record("died", Rank(event.start, slot, self._now), m.Text(event.detail))
        elif rank is not None and rank.stage == Stage.ENDING:
            roster.ranks.pop(rank.start)
        elif rank is not None and rank.stage != Stage.RETURNED:
            roster.last_death = event.detail
            roster.note_version(rank, event.version)
            roster.drop_slot(rank.slot.id)  # it is found again at once
            reason = m.LossReason.PROCESS_ENDED
            self._lose(rank, m.Lost(roster.id(rank), reason, event.detail))

    def _on_rank_left(self, event: m.RankLeft) -> None:
        roster = self.roster
        rank = roster.ranks.get(event.start)
        if rank is None or rank.stage == Stage.RETURNED:
            return
        if not roster.ended and not rank.evicted:
            ordered = rank.leaving or rank.stage == Stage.ENDING
            reason = m.LossReason.LEFT if ordered else m.LossReason.ENDED
            detail = str(rank.leave_reason) if ordered else ""
            self._record("left", rank, m.Lost(roster.id(rank), reason, detail))
        agreed = rank.leaving and roster.phase in (Phase.GATHERING, Phase.FINISHING)
        planned = roster.phase == Phase.RUNNING and roster.pending
        if planned or agreed:
            roster.ranks.pop(rank.start)
            if planned and rank.stage in (Stage.MEMBER, Stage.DONE):
                self._regather()
        else:
            self._drop(rank, m.Lost(roster.id(rank), m.LossReason.ENDED))

    # -- events: the owner ---------------------------------------------------------------------

    def _on_stop_requested(self, event: m.StopRequested) -> None:
        roster = self.roster
        reason = m.Text(event.reason)
        commits_to_come = roster.in_loop and roster.phase in (Phase.RUNNING, Phase.FINISHING)
        if roster.ended:
            if event.now:
                for rank in roster.in_stage(Stage.ENDING, Stage.RETURNED):
                    if rank.stage == Stage.ENDING or rank.exits:
                        self._send_end(rank, "cancel", reason)
        elif event.now or not commits_to_come:
            self._end(m.Outcome("stopped", reason=reason), "cancel" if event.now else "stop")
        else:
            roster.stopping = True

    def _on_limits_changed(self, event: m.LimitsChanged) -> None:
        self.roster.limits = self.roster.limits.changed(event)

    def _on_share_set(self, event: m.ShareSet) -> None:
        roster, before = self.roster, self.roster.share
        roster.sharing = event.sharing
        if event.sharing is not None:
            # The slots of the new share are announced after this.
            vacant = [roster.slots[slot] for slot in roster.counted.vacant]
            for slot in vacant:
                if not roster.excluded(slot):
                    roster.drop_slot(slot.id)
        if roster.share != before:
            former = "all" if before is None else before
            present = "all" if event.sharing is None else event.sharing.among(event.sharing.share)
            self._record("share", reason=m.Text(f"{former} → {present}"))
        for reclaimed in event.reclaimed:
            roster.drop_slot(reclaimed)
            for rank in roster.on_slot(reclaimed):
                if not rank.leaving and rank.stage not in (Stage.ENDING, Stage.RETURNED):
                    self._ask_to_leave(rank, m.SHARED)

    def _on_cluster_gone(self, event: m.ClusterGone) -> None:
        for start in list(self.roster.ranks):
            self.roster.ranks.pop(start)
        self._fail(m.FailureKind.CLUSTER_LOST, m.Text(event.detail))

    def _on_tick(self, event: m.Tick) -> None:
        """Let time pass; :meth:`_advance` does the rest."""

    # -- what follows from the situation -------------------------------------------------------

    def _advance(self) -> None:
        """Do all that the present situation calls for."""
        if not self.roster.ended:
            self._end_leaving()
        if self.roster.phase == Phase.RUNNING:
            self._note_finish()
        if self.roster.phase == Phase.FINISHING:
            self._finish()
        if not self.roster.ended:
            self._remove_surplus()
            self._note_shortage()
        if self.roster.phase == Phase.GATHERING:
            self._gather()
        if not self.roster.ended:
            self._start_ranks()
        if self.roster.phase == Phase.RUNNING:
            self._announce_changes()
            self._warn(rules.past_first_loop(self.roster))
        if self.roster.phase == Phase.ENDING:
            self._close()

    def _note_finish(self) -> None:
        """Enter ``FINISHING`` if the members are at the end of their loop or function."""
        roster = self.roster
        if not roster.any_in(Stage.RETURNED):
            if roster.any_in(Stage.MEMBER):
                return
            roster.note_commits()
            starts = tuple(member.start for member in roster.members())
            self._emit(m.Release(generation=roster.generation, starts=starts))
        roster.enter(Phase.FINISHING)
        for rank in roster.awaited():
            rank.progress_at = self._now

    def _finish(self) -> None:
        """End the job once every member that is left has returned."""
        roster = self.roster
        for rank in roster.in_stage(Stage.STARTING, Stage.READY):
            self._end_rank(rank, "stop", m.FINISHING)
        if roster.any_in(Stage.MEMBER, Stage.DONE):
            return
        if roster.any_in(Stage.RETURNED):
            self._conclude()
        else:
            roster.enter(Phase.GATHERING)

    def _remove_surplus(self) -> None:
        """End newcomers that cannot join, and surplus newcomers."""
        for rank in rules.left_behind(self.roster):
            self.roster.closed = True
            self._end_rank(rank, "stop", m.LEFT_BEHIND)
        for rank in rules.surplus(self.roster):
            self._end_rank(rank, "leave", self._why_fewer())

    def _why_fewer(self) -> m.Text:
        """Return why the job may have fewer ranks than it has: its limits, or its share."""
        roster, high = self.roster, self.roster.limits.max_np
        scaled = roster.share is None or (high is not None and high <= roster.share)
        return m.SCALED_DOWN if scaled else m.SHARED

    def _note_shortage(self) -> None:
        """Note since when there are too few slots; give up after the elastic timeout."""
        roster, limits = self.roster, self.roster.limits
        if roster.phase != Phase.GATHERING:
            roster.short_since = None
            return
        there = rules.within_reach(roster)
        if there >= rules.needed(roster):
            return
        if rules.suspended(roster):
            roster.short_since = None  # this wait does not count
            return
        past = rules.past_first_loop(roster)
        if past is not None and past.ranks is not None:
            self._fail(m.FailureKind.NOT_ENOUGH_WORKERS, past)
            return
        if roster.user_errors and roster.counted.synced and rules.is_stuck(roster):
            errors = f"{rules.errors(roster)}; {rules.presence(roster)}"
            self._fail(m.FailureKind.RANK_FAILED, m.Text(errors))
            return
        if roster.short_since is None:
            roster.short_since = self._now
            self._record("waiting", reason=m.Text(rules.presence(roster)))
        if self._now < roster.short_since + limits.elastic_timeout:
            return
        if not roster.launched and there >= limits.min_np:
            roster.limits = replace(limits, np=limits.min_np)
            roster.short_since = None
            return
        self._fail(m.FailureKind.NOT_ENOUGH_WORKERS, rules.shortage(roster))

    def _start_ranks(self) -> None:
        """Start ranks on free slots, as many as the job may have, each with a foreseen place."""
        roster, slots = self.roster, rules.slots_to_start(self.roster)
        if not slots:
            return
        if not roster.counted.staying and not rules.last_holders(roster):
            roster.first_starts, roster.closed = roster.starts + len(slots), False
        roster.launched = True
        newcomers = [
            Rank(start, slot, since=self._now) for start, slot in enumerate(slots, roster.starts)
        ]
        for rank in newcomers:
            roster.ranks[rank.start] = rank
        roster.starts += len(newcomers)
        members = [rank for rank in roster.members() if not rank.leaving]
        known = {rank.start for rank in members}
        order = arrange(members, [rank for rank in roster.staying() if rank.start not in known])
        places = dict(zip(order, places_of([rank.slot for rank in order]), strict=True))
        for rank in newcomers:
            self._emit(m.StartRank(start=rank.start, slot=rank.slot, place=places[rank]))

    def _announce_changes(self) -> None:
        """Notify the members of a planned change, once per generation."""
        roster, most = self.roster, rules.most_ranks(self.roster)
        counted = roster.counted
        stay = counted.staying == len(roster.ranks) and (most is None or counted.staying <= most)
        if roster.pending or (stay and not roster.stopping and not counted.ready):
            return
        members = roster.members()
        for rank in rules.replaced(roster):
            roster.depart(rank.slot.id)
            self._ask_to_leave(rank, m.WORKER_LEAVING)
        staying = [rank for rank in members if not rank.leaving]
        for rank in rules.ranks_to_release(roster, staying):
            self._ask_to_leave(rank, self._why_fewer())
        leaving = any(rank.leave_sent for rank in members)
        if leaving or roster.stopping or rules.newcomers_should_join(roster, staying):
            roster.pending = True
            starts = tuple(rank.start for rank in members)
            self._emit(m.Notify(generation=roster.generation, starts=starts))

    # -- the next generation -------------------------------------------------------------------

    def _gather(self) -> None:
        """Make the next plan if all its ranks are ready."""
        roster = self.roster
        if roster.any_in(Stage.MEMBER, Stage.DONE):
            return
        roster.note_commits()
        if roster.stopping:
            self._end(m.Outcome("stopped", reason=m.Text("stopped by its user at a commit")))
            return
        if roster.any_in(Stage.RETURNED):
            self._gather_returned(rules.ready(roster))
            return
        holders = len(rules.last_holders(roster))
        synced = roster.counted.synced or holders
        if roster.user_errors and not synced:
            self._fail(m.FailureKind.RANK_FAILED, m.Text(rules.errors(roster)))
            return
        if rules.first_start(roster) and not synced:
            held_up = rules.held_up(roster)
            first = [r for r in roster.in_stage(Stage.STARTING) if r.start < roster.first_starts]
            if any(rank not in held_up for rank in first):
                return  # ranks that were started together take part from the first generation
        most = rules.most_ranks(roster)
        if most is not None and most < roster.limits.min_np:  # no plan will leave them out
            staying = [rank for rank in roster.in_stage(Stage.READY) if not rank.leaving]
            for rank in rules.ranks_to_release(roster, staying):
                self._ask_to_leave(rank, self._why_fewer())
        if roster.counted.ready + holders >= roster.limits.min_np:
            self._plan(rules.ready(roster))

    def _gather_returned(self, ready: list[Rank]) -> None:
        if ready:
            words = (
                "ranks returned while others wait to train: {ranks}. All ranks must enter the same "
                "elastic loops, and outside them call the same operations"
            )
            lines = tuple(rank.line for rank in ready)
            early = m.RanksAt(words, tuple(map(self.roster.id, ready)), lines)
            self._fail(m.FailureKind.RETURNED_EARLY, early)
        elif self.roster.plan is not None or not self.roster.any_in(Stage.STARTING):
            self._conclude()

    def _plan(self, ready: list[Rank]) -> None:
        """Make the next plan of the ready ranks, if they are enough."""
        roster, low = self.roster, self.roster.limits.min_np
        if roster.policy.forming_failures > 1:
            ready = self._remove_unreachable(ready)
        order = rules.next_members(roster, ready)
        most = rules.most_ranks(roster)
        if len(order) < low:
            allowed = most is None or most >= low
            if len(ready) >= low and allowed and not roster.any_in(Stage.STARTING):
                self._fail(m.FailureKind.NO_PROGRESS, m.PLACES_DIFFER)
        elif roster.policy.forming_failures >= SAME_KIND:
            failures = roster.policy.forming_failures
            count = m.Tally(m.Counted.UNFORMED, failures, SAME_KIND, roster.version)
            self._fail(m.FailureKind.NO_PROGRESS, m.NoNewCommit(roster.causes(), count))
        elif roster.plan is None or self._count_reset(order):
            chosen = set(order)
            for rank in ready:
                if rank not in chosen and (rank.version != m.FRESH or rank.planned):
                    self._end_rank(rank, "leave", self._why_fewer())
            known = set(roster.expected)
            self._publish(order)
            for rank in order:
                if rank.start not in known:
                    self._record("joined", rank)
            self._remove_surplus()  # those that the plan has left behind

    def _remove_unreachable(self, ready: list[Rank]) -> list[Rank]:
        """Remove unreachable ranks if the rest is enough for a plan."""
        roster, policy = self.roster, self.roster.policy
        candidates = rules.next_members(roster, ready)
        order = [r.start for r in sorted(candidates, key=lambda rank: rank.version == m.FRESH)]
        pairs = broken_pairs(order, {rank.start: rank.unreached for rank in ready})
        for pair in pairs:
            one, other = (roster.id(roster.ranks[start]) for start in pair)
            roster.reset_causes.append(m.Text(f"{one} cannot reach {other}"))
        removed = choose_removed(order, pairs)
        others = [rank for rank in ready if rank.start not in removed]
        if not removed:
            others = [rank for rank in ready if rank.version != m.FRESH or not rank.planned]
        if len(rules.next_members(roster, others)) < roster.limits.min_np:
            return ready
        for rank in ready:
            if rank not in others:
                lost = m.Lost(roster.id(rank), m.LossReason.UNREACHABLE)
                self._record("lost", rank, lost)
                rank.evicted = True
                self._end_rank(rank, "evict", lost)
                if removed:  # the worker is not at fault, and networks heal
                    exclusion = policy.exclude_name(rank.slot, self._now, self._chance)
                    self._record("cooldown", rank, exclusion)
                else:
                    self._note_failure(rank, None, process_gone=False)
        return others

    def _count_reset(self, order: list[Rank]) -> bool:
        """Count a change of membership; return whether the job may go on."""
        roster, policy = self.roster, self.roster.policy
        causes = roster.causes()
        same = [rank.start for rank in order] == roster.expected
        if same and not causes and roster.plan and order[0].loop > roster.plan.loop:
            return True  # on to the next loop, with nothing changed
        joined = [rank for rank in order if rank.start not in roster.expected]
        limit = roster.limits.reset_limit
        if limit is not None and policy.resets >= limit:
            words = f"reset_limit={limit} is reached; next reset: {m.listed(causes)}"
            self._fail(m.FailureKind.RESET_LIMIT, m.Text(words))
            return False
        count = self._count_setback(order) if causes or roster.lost else None
        if count is not None and count.reached:
            known = (*roster.lost.values(),) or causes
            if count.counted in (m.Counted.SAME_ERROR, m.Counted.ERRORS) and roster.own_failure:
                known = (roster.own_failure,)
            raised = bool(roster.user_errors)
            kind = m.FailureKind.RANK_FAILED if raised else m.FailureKind.NO_PROGRESS
            self._fail(kind, m.NoNewCommit(known, count, roster.last_death))
            return False
        policy.resets += 1
        roster.reset_causes.clear()
        newcomers = f"{m.so_many_ranks(len(joined))} joined" if joined else "a planned change"
        again = f" ({count})" if count is not None and count.times > 1 else ""
        words = f"{m.listed(causes, newcomers)} → {m.so_many_ranks(len(order))}{again}"
        self._record("reset", reason=m.Text(words))
        return True

    def _count_setback(self, order: list[Rank]) -> m.Tally:
        """Count the end of the generation that the members of `order` have left."""
        roster = self.roster
        newest = max(rank.version for rank in order)
        state_lost = newest == m.FRESH and roster.ran
        error, kinds = "", [(m.Counted.SAME_WORKER, name) for name in roster.lost]
        if roster.own_failure is not None and not roster.lost:
            error, kinds = roster.own_failure.detail, [(m.Counted.ERRORS, "")]
        if state_lost:
            kinds.append((m.Counted.STATE, ""))
        if roster.all_waited:
            kinds.append((m.Counted.WAITS, ""))
        commit = roster.newest if state_lost else math.ceil(max(newest, 0))
        count = roster.policy.count(Setback(commit, error, tuple(kinds)))
        if len(roster.policy.setbacks) == 1:
            roster.last_death = ""  # earlier deaths are no part of it
        return count

    def _publish(self, order: Sequence[Rank]) -> None:
        """Make `order` the next generation."""
        roster = self.roster
        roster.generation += 1
        plan = m.Plan(
            generation=roster.generation,
            members=tuple(m.Member(r.start, r.slot, r.store, r.version) for r in order),
            loop=max(rank.loop for rank in order),
        )
        newest = plan.version
        lost = roster.version > max(newest, 0) and not roster.restarted
        if lost or (roster.ran and newest == m.FRESH):
            newest_known = f"commit {roster.newest}, the newest known one"
            lost_state = newest_known if roster.newest else "the state"
            words = f"no rank is left that holds {lost_state}"
            self._record("restarted", reason=m.Text(words))
            roster.newest = math.floor(max(newest, 0))
            roster.restarted = roster.limits.checkpoint and newest == m.FRESH
            if not roster.restarted:
                roster.version = roster.newest
        for rank in order:
            rank.stage, rank.planned = Stage.MEMBER, plan.generation
            rank.formed = rank.waiting = False
            rank.since = rank.progress_at = rank.heartbeat_at = self._now
            rank.operations, rank.operation = 0, ""
            if rank.version == m.FRESH:
                rank.version_at_join = max(newest, 0)
        roster.plan = plan
        roster.expected = [rank.start for rank in order]
        roster.aborted = roster.pending = roster.all_waited = False
        roster.backend = ""
        roster.short_since = None
        roster.user_errors.clear()
        roster.lost.clear()
        roster.own_failure = None
        roster.enter(Phase.FORMING)
        self._emit(m.Publish(plan))

    # -- time limits: `now >= since + limit` means that it is over -----------------------------

    def _apply_time_limits(self) -> None:
        self._expire_ending()
        self._expire_exits()
        if self.roster.ended:
            return
        self._expire_starting()
        if self.roster.phase == Phase.FORMING:
            self._expire_forming()
        elif self.roster.phase == Phase.GATHERING:
            limit = self.roster.limits.stall_timeout
            if self._now >= self.roster.phase_since + limit:
                self._evict(self.roster.awaited(), m.LossReason.NOT_LEFT, limit)
        else:
            self._end_if_apart()
        if self.roster.phase in (Phase.RUNNING, Phase.FINISHING):
            self._check_for_stalls()

    def _expire_ending(self) -> None:
        roster, limit = self.roster, self.roster.limits.ending_timeout
        for rank in roster.in_stage(Stage.ENDING):
            if self._now >= rank.since + limit:
                roster.ranks.pop(rank.start)
                roster.drop_slot(rank.slot.id)
                reason = m.Text(
                    f"{roster.id(rank)} did not end within {limit:g} s of the order to: its worker "
                    "is restarted, or closed if it has no nanny"
                )
                self._emit(m.RestartWorker(slot=rank.slot, reason=reason))
                self._warn(reason)

    def _expire_exits(self) -> None:
        """Wait no longer for processes whose agents have not reported their end."""
        limit = self.roster.limits.exit_timeout + self.roster.limits.ending_timeout
        for rank in rules.exiting(self.roster):
            if self._now >= rank.since + limit:
                self._note_exit(rank, f"its process did not end within {limit:g} s")

    def _expire_starting(self) -> None:
        roster, limit = self.roster, self.roster.limits.elastic_timeout
        starting = roster.in_stage(Stage.STARTING)
        late = [rank for rank in starting if self._now >= rank.since + limit]
        held_up = rules.held_up(roster)  # their workers do what others have asked for
        if rules.cannot_begin(roster, [rank for rank in late if rank in held_up]):
            self._fail(m.FailureKind.NOT_ENOUGH_WORKERS, rules.shortage(roster))
            return
        late = [rank for rank in late if rank not in held_up]
        too_few = rules.within_reach(roster) - len(late) < roster.limits.min_np
        if late and too_few and roster.plan is None:  # they do what takes long, and would again
            ids = tuple(map(roster.id, late))
            words = (
                "ranks are neither at the elastic loop nor in an operation between ranks, "
                f"{limit:g} s after the start (elastic_timeout): {{ranks}}. Raise elastic_timeout, "
                "or prepare what takes so long before the job"
            )
            self._fail(m.FailureKind.NOT_ENOUGH_WORKERS, m.RanksAt(words, ids))
            return
        self._evict(late, m.LossReason.NOT_READY, limit)

    def _expire_forming(self) -> None:
        """Evict members that are silent and not connected; without any, break the generation."""
        # One member that cannot connect keeps others from connecting: they are not to blame.
        roster, limit = self.roster, self.roster.limits.forming_timeout
        if self._now < roster.phase_since + limit:
            return
        roster.policy.forming_failures += 1
        late = [rank for rank in roster.members() if not rank.formed]
        silent = rules.silent(roster, late)
        self._evict(silent, m.LossReason.NOT_CONNECTED, limit)
        if not silent:
            names = ", ".join(str(roster.id(rank)) for rank in late)
            self._break(m.Text(f"not connected after {limit:g} s: {names}"))

    def _end_if_apart(self) -> None:
        """End the job if ranks wait in operations without the other ranks."""
        pair = rules.waits_for_finished(self.roster)
        if pair is not None:
            done, waiting = map(self.roster.id, pair)
            words = (
                f"{done} has reached the end of its elastic loop, but {waiting} waits for it in "
                "another operation, because it has more batches or commits. Give all ranks the "
                "same number of batches (hvd.elastic.ElasticSampler does), and commit on all of "
                "them; or end the loop over batches by hvd.join(), with which a rank waits for "
                "those that have more"
            )
            self._fail(m.FailureKind.NO_PROGRESS, m.Text(words))
        sides = rules.different_operations(self.roster)
        if sides:
            words = "; ".join(f"{self.roster.id(rank)}: {each}" for each, rank in sides.items())
            reason = m.Text(
                f"ranks wait for each other in different operations: {words}. All ranks must call "
                "the same operations in the same order"
            )
            self._fail(m.FailureKind.NO_PROGRESS, reason)

    def _check_for_stalls(self) -> None:
        roster, limit = self.roster, self.roster.limits.stall_timeout
        suspects = rules.stall_suspects(roster)
        if not suspects:
            return
        words = f"all ranks waited for each other for {limit:g} s (stall_timeout)"
        if len(suspects) < len(roster.awaited()):
            self._evict(suspects, m.LossReason.STALLED, limit)
        elif roster.phase == Phase.FINISHING:
            self._fail(m.FailureKind.NO_PROGRESS, m.Text(f"{words} after their elastic loop"))
        else:
            roster.all_waited = True
            self._break(m.Text(words))

    # -- steps: ranks --------------------------------------------------------------------------

    def _end_rank(self, rank: Rank, how: str, reason: m.Reason, save: float = 0.0) -> None:
        """Order a rank to end. From now on it does not count."""
        if rank.stage != Stage.ENDING:
            rank.stage, rank.since = Stage.ENDING, self._now
            rank.leave_reason = reason
            self._send_end(rank, how, reason, save)

    def _send_end(self, rank: Rank, how: str, reason: m.Reason, save: float = 0.0) -> None:
        self._emit(m.EndRank(start=rank.start, how=how, reason=reason, save=save))

    def _ask_to_leave(
        self,
        rank: Rank,
        reason: m.Reason,
        *,
        stay: float = rules.STAY,
        gone: float = rules.STAY + rules.MARGIN,
    ) -> None:
        """Ask a rank to leave its generation, in which a last holder may `stay` for a while."""
        rank.leaving, rank.leave_reason = True, reason
        # For other jobs the last holder of the state stays as long as it takes: they can wait.
        stay = math.inf if reason == m.SHARED else stay
        rank.leave_deadline = self._now + stay
        rank.gone_at = self._now + gone
        if rank.stage == Stage.STARTING:
            self._end_rank(rank, "leave", reason)
        self._end_leaving()

    def _end_leaving(self) -> None:
        """Order leaving ranks to end, except the last holders of the state."""
        roster = self.roster
        if not roster.any_leaving:
            return
        holders = rules.last_holders(roster)
        leaves = roster.phase != Phase.FINISHING  # there it returns anyway
        going = [
            rank
            for rank in roster.in_stage(Stage.READY, Stage.MEMBER, Stage.DONE)
            if rank.leaving and rank not in holders
            if rank.stage == Stage.READY or (leaves and not rank.leave_sent)
        ]
        heir = None if holders or not going else rules.heir(roster, going)
        for rank in going:
            retired = rank.slot.id in roster.departing and rank.slot.id not in roster.notices
            if retired:  # its worker waits for it, but not for long
                rank.gone_at = min(rank.gone_at, self._now + rules.STAY + rules.MARGIN)
            save = rules.time_to_save(roster, rank) if rank is heir else 0.0
            order = rank.leave_reason
            if rank.stage == Stage.READY:
                self._end_rank(rank, "leave", order, save)
            else:
                rank.leave_sent = True
                self._send_end(rank, "leave", order, save)

    def _drop(self, rank: Rank, cause: m.Reason) -> None:
        """Remove a rank from the job; the generation of a member is over."""
        was_member = rank.stage in (Stage.MEMBER, Stage.DONE)
        self.roster.ranks.pop(rank.start, None)
        if was_member:
            self._break(cause)

    def _lose(self, rank: Rank, lost: m.Lost) -> None:
        """Remove a rank whose process is gone, and exclude its worker or host."""
        roster = self.roster
        if rank.stage == Stage.RETURNED:  # its result is here already
            if rank.exits:
                self._note_exit(rank, lost.cause)
            return
        planned = rank.leaving or rank.stage == Stage.ENDING
        if not roster.ended and not rank.evicted:
            self._record("left" if planned else "lost", rank, lost)
        self._drop(rank, lost)
        if not planned and not roster.ended:
            self._note_failure(rank, lost, process_gone=True)
            ended = lost.reason in (m.LossReason.PROCESS_ENDED, m.LossReason.WORKER_GONE)
            if roster.plan is None and ended:  # a death before the first generation
                count = roster.policy.count(
                    Setback(m.FRESH, kinds=((m.Counted.SAME_WORKER, rank.slot.lasting),))
                )
                if count.reached:
                    failure = m.NoNewCommit((lost,), count, roster.last_death)
                    self._fail(m.FailureKind.NO_PROGRESS, failure)

    def _evict(self, ranks: Sequence[Rank], reason: m.LossReason, seconds: float) -> None:
        """Go on without silent ranks; their workers end them and are free."""
        roster = self.roster
        for rank in ranks:
            lost = m.Lost(roster.id(rank), reason, seconds=seconds)
            was_member = rank.stage in (Stage.MEMBER, Stage.DONE)
            rank.evicted = True
            roster.drop_slot(rank.slot.id)
            ages = {
                "seconds_since_heartbeat": self._now - rank.heartbeat_at,
                "seconds_since_progress": self._now - rank.progress_at,
            }
            self._record("left" if rank.leaving else "lost", rank, lost, ages)
            self._end_rank(rank, "evict", lost)
            if was_member:
                self._break(lost)
            if not rank.leaving and not roster.ended:
                self._note_failure(rank, lost, process_gone=True)

    def _note_failure(self, rank: Rank, lost: m.Lost | None, *, process_gone: bool) -> None:
        """Exclude a rank's worker after a failure, and its host after several."""
        roster, slot, policy = self.roster, rank.slot, self.roster.policy
        if lost is not None and rank.planned == roster.generation > 0:
            roster.lost[slot.lasting] = lost
        exclusion = policy.exclude_worker(slot, self._now, self._chance, process_gone=process_gone)
        if exclusion is not None:
            self._record("cooldown", rank, exclusion)
            key = policy.worker_key(slot)
            for other in list(roster.ranks.values()):
                if policy.worker_key(other.slot) == key and not other.leaving and other is not rank:
                    self._ask_to_leave(other, m.WORKER_EXCLUDED)
        for exclusion in policy.count_failure(slot, self._now, self._chance):
            self._record("cooldown", rank, exclusion)

    # -- steps: the generation -----------------------------------------------------------------

    def _break(self, cause: m.Reason) -> None:
        """End the generation because of a fault, and free its members wherever they wait."""
        roster = self.roster
        if roster.ended:
            return
        roster.reset_causes.append(cause)
        if roster.plan is not None and roster.plan.loop == 0 and roster.phase != Phase.GATHERING:
            words = f"{cause}; the function has no elastic loop, so it cannot go back to a commit"
            self._fail(m.FailureKind.RANK_LOST, m.Text(words))
            return
        if roster.phase in (Phase.FORMING, Phase.RUNNING):
            roster.enter(Phase.GATHERING)
        elif roster.phase == Phase.FINISHING:
            for rank in roster.awaited():
                rank.progress_at = self._now
        self._abort_awaited(cause)

    def _regather(self) -> None:
        """End the present generation as planned: its members leave it at the same step."""
        self.roster.enter(Phase.GATHERING)
        if self.roster.any_in(Stage.DONE):
            self._abort_awaited(m.STEPS_DIFFER)

    def _abort_awaited(self, cause: m.Reason) -> None:
        if self.roster.aborted:
            return
        starts = tuple(rank.start for rank in self.roster.awaited())
        if starts:
            self.roster.aborted = True
            self._emit(m.Abort(generation=self.roster.generation, starts=starts, reason=cause))

    # -- steps: the end ------------------------------------------------------------------------

    def _fail(self, error: m.FailureKind, reason: m.Reason) -> None:
        """End the job with a failure."""
        errors = self.roster.user_errors if error == m.FailureKind.RANK_FAILED else ()
        self._end(m.Outcome("failed", error, reason, tuple(errors)), "cancel")

    def _end(self, outcome: m.Outcome, how: str = "stop") -> None:
        """Fix the outcome, and end the ranks that still run."""
        roster = self.roster
        if roster.ended:
            return
        roster.outcome = outcome
        reason = outcome.reason or m.FINISHING
        roster.enter(Phase.ENDING)
        for rank in roster.in_stage(Stage.STARTING, Stage.READY, Stage.MEMBER, Stage.DONE):
            self._end_rank(rank, how, reason)

    def _conclude(self) -> None:
        """End the job: finished if every rank whose result it needs has returned."""
        roster = self.roster
        returned = {rank.start for rank in roster.in_stage(Stage.RETURNED)}
        missing = [start for start in roster.expected if start not in returned]
        if missing:
            lost = f"{len(missing)} of {len(roster.expected)} ranks ended before they returned"
            words = "; ".join([lost, *map(str, roster.causes())])
            self._fail(m.FailureKind.RANK_LOST, m.Text(words))
        else:
            self._warn(rules.never_met(roster))
            self._end(m.Outcome("finished", starts=tuple(roster.expected)))

    def _close(self) -> None:
        """Emit the end of the job, once nothing runs any more."""
        roster = self.roster
        outcome = roster.outcome
        if roster.any_in(Stage.ENDING) or outcome is None:
            return
        if outcome.kind == "finished" and rules.exiting(roster):
            return  # as a script does not end before its threads and exit handlers
        if outcome.error == m.FailureKind.RANK_FAILED:
            outcome = roster.outcome = replace(outcome, starts=tuple(roster.user_errors))
        roster.enter(Phase.ENDED)
        self._record(outcome.kind, reason=outcome.reason)
        self._emit(m.End(outcome))

    # -- steps: effects ------------------------------------------------------------------------

    def _emit(self, effect: m.Effect) -> None:
        self._effects.append(effect)

    def _record(
        self,
        kind: str,
        rank: Rank | None = None,
        reason: m.Reason | None = None,
        figures: dict[str, float] | None = None,
    ) -> None:
        plan = self.roster.plan
        number = plan.rank_of(rank.start) if plan is not None and rank is not None else None
        self._emit(
            m.Record(
                kind=kind,
                generation=self.roster.generation,
                worker=rank.slot.worker if rank else None,
                rank=number,
                start=rank.start if rank else None,
                reason=reason,
                name=rank.slot.name if rank else "",
                figures=figures or {},
            )
        )

    def _warn(self, warning: m.Reason | None, rank: Rank | None = None) -> None:
        """Record a warning, if any, and if it is new."""
        if warning is not None and warning not in self.roster.warnings:
            self.roster.warnings.append(warning)
            self._record("warning", rank, warning)


def pack_machine(machine: Machine) -> bytes:
    """Write a machine as bytes."""
    return m.encode(machine.roster)


def unpack_machine(data: bytes) -> Machine:
    """Read :func:`pack_machine`'s bytes; raise ValueError if they are none."""
    roster: Roster = m.decode(data, Roster)
    machine = Machine(roster.limits)
    machine.roster = roster
    return machine
