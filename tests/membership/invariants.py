"""Machine with its invariants checked after every event."""

from __future__ import annotations

import math
from itertools import groupby
from typing import Any
from unittest.mock import patch

from nbelastic import messages as ev
from nbelastic.membership import Machine, Phase, Stage, pack_machine, rules, unpack_machine
from nbelastic.membership.ranks import Ranks

FAULTS = (ev.SlotGone, ev.SlotSilent, ev.RankRaised, ev.RankDied, ev.RankReady)
OF_A_RANK = (
    ev.RankReady,
    ev.RankFormed,
    ev.LoopDone,
    ev.RankReturned,
    ev.RankRaised,
    ev.RankDied,
    ev.RankLeft,
)


def contents(machine: Machine) -> dict[str, Any]:
    """Return all that a machine holds, as plain values."""
    held: dict[str, Any] = ev.decode(pack_machine(machine), dict)
    return held


class Checked:
    """A machine that is handed an event only together with all its invariants."""

    def __init__(self, limits: ev.Limits) -> None:
        self.limits = limits
        self.machine = Machine(limits)
        self.log: list[tuple[ev.Event, float, float, list[ev.Effect]]] = []
        self.plans: list[ev.Plan] = []
        self.returned: set[int] = set()
        self.unusable: set[str] = set()
        self.gone: set[str] = set()
        self.spent: set[str] = set()  # a rank was evicted there, and its worker has not said more
        self.outcome: ev.Outcome | None = None

    @property
    def roster(self) -> Any:
        return self.machine.roster

    def copy(self) -> Machine:
        return unpack_machine(pack_machine(self.machine))

    def restore(self) -> None:
        """Go on with a copy that was written to a dict and read back."""
        self.machine = self.copy()

    def replay(self) -> None:
        """The same events always lead to the same decisions, at the next tick at the latest."""
        machine = Machine(self.limits)
        for event, now, chance, effects in self.log:
            assert machine.handle(event, now, chance) == effects
        assert contents(machine) == contents(self.machine)
        machine, thorough = Machine(self.limits), Machine(self.limits)
        for event, now, chance, _ in self.log:
            with patch.object(rules, "needs_nothing", lambda *_: False):
                effects = thorough.handle(event, now, chance)
            effects = effects + thorough.handle(ev.Tick(), now, chance)
            ours = machine.handle(event, now, chance)
            assert ours + machine.handle(ev.Tick(), now, chance) == effects
        assert contents(machine) == contents(thorough)

    def handle(self, event: ev.Event, now: float, chance: float) -> list[ev.Effect]:
        before = (self.roster.phase, self.roster.outcome)
        ranks = {start: (r.slot.id, r.version) for start, r in self.roster.ranks.items()}
        here = [rank.start for rank in self.roster.staying()]
        version, unchanged, restarted = self.roster.version, None, self.roster.restarted
        members = self.roster.in_stage(Stage.READY, Stage.MEMBER, Stage.DONE)
        holders = {
            r.start for r in members if r.version != ev.FRESH and r.loop == 1 and not r.leave_sent
        }
        stale = self._stale(event)
        if stale or isinstance(event, FAULTS):
            unchanged = self.copy()
        self._note_slots(event)
        if isinstance(event, ev.RankReturned) and event.start in ranks:
            self.returned.add(event.start)

        effects = self.machine.handle(event, now, chance)
        self.log.append((event, now, chance, effects))

        if stale and unchanged is not None:
            self.check_1_old_messages(unchanged, now, chance, effects)
        elif unchanged is not None:
            self.check_8_fault_isolated(event, unchanged, now, chance, ranks, effects)
        for effect in effects:
            if isinstance(effect, ev.Publish):
                self.check_1_one_generation(effect.plan)
                self.check_2_shape(effect.plan)
                self.check_3_order_and_source(effect.plan, here)
                self.check_4_no_excluded(effect.plan)
                self.plans.append(effect.plan)
            if isinstance(effect, ev.EndRank) and effect.how == "evict":
                self.spent.add(ranks[effect.start][0])
            if isinstance(effect, ev.RestartWorker):
                self.spent.add(effect.slot.id)
            if isinstance(effect, ev.StartRank):
                self.check_4_start(effect)
        if not (restarted and not self.roster.restarted):  # else the checkpoint's has become known
            self.check_5_version(version, ranks, effects)
        self.check_5_kept(holders, effects)
        self.check_counts()
        self.check_7_end(before, effects)
        return effects

    def _note_slots(self, event: ev.Event) -> None:
        """Note on which slots no rank may be started."""
        soft = isinstance(event, ev.SlotLeaving) and event.notice is not None and event.notice.soft
        if isinstance(event, (ev.SlotGone, ev.SlotLeaving)) and not soft:
            self.unusable.add(event.slot)
        if isinstance(event, ev.SlotStays):
            self.unusable.discard(event.slot)
            self.gone.discard(event.slot)
        if isinstance(event, ev.SlotGone):
            self.gone.add(event.slot)
        if isinstance(event, ev.SlotsFound):
            self.spent -= {slot.id for slot in event.slots}

    def _stale(self, event: ev.Event) -> bool:
        """Whether a message is from an older generation, or of a rank that is out already."""
        if not isinstance(event, OF_A_RANK):
            return False
        rank = self.roster.ranks.get(event.start)
        if isinstance(event, ev.RankDied) and event.start in self.roster.dead:
            return False
        if rank is None or rank.stage == Stage.RETURNED:
            return True
        if isinstance(event, ev.RankReady):
            return event.left < rank.planned or rank.stage == Stage.ENDING
        return isinstance(event, (ev.RankFormed, ev.LoopDone)) and event.generation < rank.planned

    def _known(self, ranks: dict[int, tuple[str, int]]) -> list[Any]:
        return [rank for rank in self.roster.ranks.values() if rank.start in ranks]

    # -- the invariants ------------------------------------------------------------------------

    def check_1_old_messages(
        self, machine: Machine, now: float, chance: float, effects: list[ev.Effect]
    ) -> None:
        """A message from an older generation changes nothing: it is no more than a tick."""
        ours = self.copy()
        effects = effects + ours.handle(ev.Tick(), now, chance)
        assert machine.handle(ev.Tick(), now, chance) == effects
        assert contents(machine) == contents(ours)

    def check_1_one_generation(self, plan: ev.Plan) -> None:
        """One generation at a time; numbers strictly grow."""
        assert plan.generation == len(self.plans) + 1
        ours = {member.start for member in plan.members}
        in_older = [r.start for r in self.roster.awaited() if r.start not in ours]
        assert not in_older, f"{in_older} have not left the generation before"

    def check_2_shape(self, plan: ev.Plan) -> None:
        """Ranks are 0..n-1, min_np <= n <= max_np and the share; a slot once; hosts contiguous."""
        limits, members = self.roster.limits, plan.members
        assert [plan.rank_of(m.start) for m in members] == list(range(len(members)))
        kept = sum(self.roster.ranks[member.start].leaving for member in members)
        bounds = [bound for bound in (limits.max_np, self.roster.share) if bound is not None]
        most = max(min(bounds), kept + 1) if bounds else math.inf
        assert limits.min_np <= len(members) <= most
        assert len({member.slot.id for member in members}) == len(members)
        sizes = [(host, len(list(on))) for host, on in groupby(m.slot.host for m in members)]
        assert len({host for host, _ in sizes}) == len(sizes)
        assert max(size for _, size in sizes) <= (limits.slots_per_host or math.inf) + kept

    def check_3_order_and_source(self, plan: ev.Plan, here: list[int]) -> None:
        """Survivors keep their relative order, newcomers follow those on their host, and the
        source holds the newest committed version; with equal versions, it is the lowest rank."""
        old = [member.start for member in self.plans[-1].members] if self.plans else []
        survivors = [m.start for m in plan.members if m.start in old]
        assert survivors == [start for start in old if start in survivors]
        for _, group in groupby(plan.members, key=lambda member: member.slot.host):
            new = [member.start not in old for member in group]
            assert new == sorted(new)
        versions = [member.version for member in plan.members]
        assert plan.source == versions.index(max(versions))
        ranks = [self.roster.ranks[start] for start in here if start in self.roster.ranks]
        ranks += [r for r in self.roster.ranks.values() if r.leaving and r.stage == Stage.MEMBER]
        # One that was evicted just now is here, but at fault.
        candidates = [r.version for r in ranks if r.loop == plan.loop and not r.evicted]
        assert plan.version == max([*candidates, ev.FRESH])

    def check_4_no_excluded(self, plan: ev.Plan) -> None:
        """A worker that cools down, is retiring or is gone is in no new plan; unless it is one
        that was asked to leave and holds the state, which no other rank does."""
        roster = self.roster
        holders = [r for r in roster.ranks.values() if r.version != ev.FRESH and not r.leaving]
        keep = not any(rank.stage in (Stage.MEMBER, Stage.READY) for rank in holders)
        for member in plan.members:
            if keep and roster.ranks[member.start].leaving and member.version != ev.FRESH:
                continue
            assert member.slot.id not in self.unusable
            assert not roster.policy.workers.excludes(
                roster.policy.worker_key(member.slot), roster.now
            )
            assert not roster.ranks[member.start].leaving

    def check_4_start(self, effect: ev.StartRank) -> None:
        """No rank is started on a worker or host that cools down, is retiring, gone or taken."""
        slot, roster = effect.slot, self.roster
        assert slot.id not in self.unusable | self.spent
        assert not roster.excluded(slot)
        assert [r.start for r in roster.ranks.values() if r.slot.id == slot.id] == [effect.start]

    def check_5_version(
        self, version: int, ranks: dict[int, tuple[str, int]], effects: list[ev.Effect]
    ) -> None:
        """The committed version never goes back while a rank lives that has it."""
        assert all(r.version >= ranks[r.start][1] for r in self._known(ranks))
        again = any(isinstance(e, ev.Record) and e.kind == "restarted" for e in effects)
        if self.roster.version < version or again:
            assert again, "the job starts over without a word"
            alive = [r for r in self.roster.staying() if r.version >= version]
            assert not alive, f"{alive} have commit {version}"

    def check_5_kept(self, holders: set[int], effects: list[ev.Effect]) -> None:
        """Who holds the state alone is not sent away before another has it, or its time is up."""
        roster = self.roster
        if roster.ended or roster.stopping:
            return
        present = [r for r in roster.ranks.values() if not r.leaving and not r.evicted]
        others = [r.start for r in present if r.version != ev.FRESH]
        saving = [e.start for e in effects if isinstance(e, ev.EndRank) and e.save > 0]
        assert len(saving) <= 1, f"starts {saving} are all to save the state"
        assert not (saving and others), f"start {saving} saves what {others} have"
        for effect in effects:
            if isinstance(effect, ev.EndRank) and effect.how == "leave" and effect.start in holders:
                rank = roster.ranks[effect.start]
                early = roster.now < rank.leave_deadline and rank.loop == 1  # others can join there
                # One that is leaving, too, but was not told yet, stays until another has the state.
                untold = [r for r in rules.last_holders(roster) if r.start != effect.start]
                assert others or untold or not early, f"start {effect.start} holds the state alone"

    def check_counts(self) -> None:
        """What is counted over the ranks as they change is what counting them now gives."""
        roster = self.roster
        anew = Ranks(dict(roster.ranks).values(), roster.slots)
        for rank in roster.ranks.values():
            object.__setattr__(rank, "counted_by", roster.counted)
        assert vars(roster.counted) == vars(anew)
        dead = {slot.id for slot in roster.dead.values() if roster.phase != Phase.ENDED}
        assert self.gone.isdisjoint(dead)
        for stage, group in roster.counted.stages.items():
            assert all(rank.stage == stage for rank in group.values())

    def check_7_end(
        self, before: tuple[Phase, ev.Outcome | None], effects: list[ev.Effect]
    ) -> None:
        """Success means that every rank of the last generation returned; after the end, no effect
        but cleaning up."""
        outcome = self.roster.outcome
        if before[0] == Phase.ENDED:
            assert effects == []
        if before[1] is not None:
            cleaning = (ev.EndRank, ev.RestartWorker, ev.Record, ev.End)
            assert all(isinstance(effect, cleaning) for effect in effects)
            assert outcome.kind == before[1].kind
        if any(isinstance(effect, ev.End) for effect in effects):
            assert not self.roster.in_stage(*set(Stage) - {Stage.RETURNED})
        if outcome is not None and outcome.kind == "finished":
            assert set(outcome.starts) <= self.returned
            assert outcome.starts
            if self.plans:
                assert outcome.starts == tuple(m.start for m in self.plans[-1].members)

    def check_8_fault_isolated(
        self,
        event: ev.Event,
        machine: Machine,
        now: float,
        chance: float,
        ranks: dict[int, Any],
        effects: list[ev.Effect],
    ) -> None:
        """A fault on one worker never costs another worker more than the batch in flight: no
        other rank is ended for it, unless the job ends. (Who is said to be gone is a fault, too.)
        """
        if isinstance(event, ev.RankReady) and not event.failed:
            return
        by_time = machine.handle(ev.Tick(), now, chance)
        if self.roster.ended:
            return
        known = machine.roster.dead.get(getattr(event, "start", -1))
        slot = getattr(event, "slot", None) or (known.id if known else ranks[event.start][0])
        for effect in effects:
            harsh = isinstance(effect, ev.EndRank) and effect.how in ("evict", "cancel")
            if harsh or isinstance(effect, ev.RestartWorker):
                reason = effect.reason
                left_out = (
                    isinstance(reason, ev.Lost) and reason.reason == ev.LossReason.UNREACHABLE
                )
                at = ranks[effect.start][0] if isinstance(effect, ev.EndRank) else effect.slot.id
                assert at == slot or left_out or effect in by_time
        for start in set(ranks) & set(machine.roster.ranks):
            gone = start in getattr(event, "gone", ())
            assert ranks[start][0] == slot or gone or start in self.roster.ranks
