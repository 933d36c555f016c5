"""Rules of membership: pure questions to the roster."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, MutableMapping
from operator import attrgetter

from nbelastic import messages as m

from .placement import arrange, choose, choose_released
from .ranks import Phase, Rank, Stage
from .roster import Roster

JOIN_WINDOW = 1.0  # seconds that a newcomer waits for others that start, to join in one reset

STAY = 20.0
"""Seconds that last holders of the state, asked to leave, stay for a successor.

Dask's workers are given longer, by MARGIN, so that they reach their next commit then.
"""

LONGEST_STAY = 110.0  # seconds that they stay on a retired worker while others are being prepared
MARGIN = 10.0  # seconds before a machine's end at which its workers are retired in any case
SOON = 5.0  # seconds that ranks have in any case when their worker or machine ends
VAIN_WAIT = 1.0  # seconds after which a wait for an operation that can never finish counts
QUIET = 5.0  # seconds without a heartbeat after which a rank is silent, if others are not
MOST_NAMES = 3  # unused workers that a reason names; of the others it has the number


# -- starting ranks ------------------------------------------------------------------------------


def loop(roster: Roster) -> int | None:
    """Return the elastic loop of former members, or None: newcomers can join in loop 1 only."""
    loops = roster.counted.loops
    here = [] if loops else [rank.loop for rank in last_holders(roster)]
    return max(here or loops, default=None)


def last_holders(roster: Roster) -> list[Rank]:
    """Return the ranks that alone hold the state, and were asked to leave."""
    if not roster.any_leaving:
        return []
    ranks = roster.in_stage(Stage.READY, Stage.MEMBER, Stage.DONE)
    holders = [rank for rank in ranks if rank.version != m.FRESH]
    if roster.stopping or any(not rank.leaving for rank in holders):
        return []
    return [
        rank
        for rank in holders
        if rank.loop == 1 and not rank.leave_sent and roster.now < stays_until(roster, rank)
    ]


def stays_until(roster: Roster, rank: Rank) -> float:
    """Return until when a last holder stays: longer while newcomers are on the way."""
    # With a notice of its machine it stays no longer: each second is planned there.
    newcomers = roster.in_stage(Stage.STARTING, Stage.READY, Stage.MEMBER)
    if rank.slot.id in roster.notices or all(each.leaving for each in newcomers):
        return rank.leave_deadline
    return max(rank.leave_deadline, rank.gone_at - MARGIN)


def time_to_stay(roster: Roster, left: float) -> float:
    """Return how long last holders stay on a machine that ends in `left` seconds."""
    # With a checkpoint half of the time is for writing it; else the state ends with them.
    if roster.limits.checkpoint:
        return max(left - MARGIN, 0.0) / 2
    return max(left - STAY, left / 2)


def heir(roster: Roster, going: list[Rank]) -> Rank | None:
    """Return the rank among `going` to save the state, unless another rank keeps it."""
    ranks = roster.in_stage(Stage.READY, Stage.MEMBER, Stage.DONE)
    if roster.stopping or any(rank.version != m.FRESH and not rank.leaving for rank in ranks):
        return None
    able = [rank for rank in going if rank.version != m.FRESH]
    return min(able, key=lambda rank: (-rank.version, rank.start), default=None)


def time_to_save(roster: Roster, rank: Rank) -> float:
    """Return how many seconds a rank may take to save the state before it ends."""
    left = max(rank.gone_at - roster.now, 0.0)
    if rank.stage == Stage.READY:
        return 0.9 * min(left, roster.limits.ending_timeout)
    return min(left, roster.limits.stall_timeout) / 2


def can_start(roster: Roster) -> bool:
    """Return whether newcomers could join."""
    if roster.ended or roster.stopping or roster.phase == Phase.FINISHING:
        return False
    if roster.any_in(Stage.RETURNED):
        return False
    alone = not roster.counted.staying and not last_holders(roster)
    return alone or (loop(roster) in (None, 1) and not roster.closed)


def free_slots(roster: Roster) -> list[m.Slot]:
    """Return the slots on which a rank could start now, in the order of discovery."""
    there = [slot for id, slot in roster.slots.items() if id in roster.counted.vacant]
    vacant = [slot for slot in there if not roster.excluded(slot)]
    cap = roster.limits.slots_per_host
    if cap is None:
        return vacant
    counts = Counter(rank.slot.host for rank in roster.staying())
    free = []
    for slot in vacant:
        if counts[slot.host] < cap:
            free.append(slot)
            counts[slot.host] += 1
    return free


def most_ranks(roster: Roster) -> int | None:
    """Return how many ranks the limits and the share allow now; None for any number."""
    most, share = roster.limits.max_np, roster.share
    if share is None:
        return most
    return share if most is None else min(most, share)


def suspended(roster: Roster) -> bool:
    """Return whether the job waits with its state, having given way to other jobs."""
    # Not on a cluster with too few slots, besides those of suspended jobs that come first: then it
    # lacks workers like any other job, and fails in time, so that these go on.
    share, limits = roster.share, roster.limits
    if share is None or share >= limits.min_np or not (limits.preemptible and roster.ran):
        return False
    enough = roster.sharing is not None and roster.sharing.slots >= limits.min_np
    return enough and (share > 0 or limits.checkpoint)


def slots_to_start(roster: Roster) -> list[m.Slot]:
    """Return the slots on which ranks start now, as many as the job may have."""
    most = most_ranks(roster)
    room = None if most is None else most - roster.counted.staying
    extra = _on_top(roster)
    if not can_start(roster):
        return []
    if not roster.launched and within_reach(roster) < needed(roster):
        return []
    if not roster.counted.vacant or (room is not None and room + extra <= 0):
        return []
    free = free_slots(roster)
    if room is None or not roster.at_risk:
        return free if room is None else free[:room]
    safe = [slot for slot in free if slot.id not in roster.at_risk][: max(room + extra, 0)]
    return safe + [slot for slot in free if slot.id in roster.at_risk][: max(room - len(safe), 0)]


def replaceable(roster: Roster) -> list[Rank]:
    """Return ranks on machines at risk, which newcomers may replace; oldest first."""
    if not roster.at_risk:
        return []
    found = [rank for slot in roster.at_risk for rank in roster.on_slot(slot)]
    staying = [r for r in found if not r.leaving and r.stage in (Stage.MEMBER, Stage.READY)]
    return sorted(staying, key=attrgetter("start"))


def _on_top(roster: Roster) -> int:
    """Return how many newcomers may prepare, to replace, beyond the most ranks."""
    return len(replaceable(roster)) if roster.share is None else 0


def replaced(roster: Roster) -> list[Rank]:
    """Return the ranks in whose place newcomers are ready to join."""
    risky = replaceable(roster)
    if not risky:
        return []
    waiting = [rank for rank in ready(roster) if rank.slot.id not in roster.at_risk]
    return risky[: len(waiting)] if _should_join(roster, waiting) else []


def within_reach(roster: Roster) -> int:
    """Return the number of ranks that the present slots allow."""
    count, most = roster.counted.staying, most_ranks(roster)
    if can_start(roster) and (most is None or count < most):
        if roster.limits.slots_per_host is None and not roster.policy.excludes_any:
            count += len(roster.counted.vacant)
        else:
            count += len(free_slots(roster))
    return count if most is None else min(count, most)


def needed(roster: Roster) -> int:
    """Return how many slots the job waits for."""
    low, high = roster.limits.min_np, most_ranks(roster)
    if roster.launched:
        return low
    return max(low, roster.limits.np if high is None else min(roster.limits.np, high))


def is_stuck(roster: Roster) -> bool:
    """Return whether the job lacks only workers that are excluded for good."""
    # They are still present, so no cluster replaces them.
    if roster.policy.workers.bounds is not None or roster.any_in(Stage.ENDING):
        return False
    out = {id for id in roster.slots if roster.policy.workers.excludes(id, roster.now)}
    others = (slot for id, slot in roster.slots.items() if id not in out)
    for_a_while = any(map(roster.excluded, others))
    recent = roster.now - roster.limits.elastic_timeout
    there = {slot.lasting for slot in roster.slots.values()}
    gone = any(at > recent and name not in there for name, at in roster.departing.values())
    enough = within_reach(roster) + len(out) >= needed(roster)
    return enough and not for_a_while and not gone


def presence(roster: Roster) -> str:
    """Return the shortage of workers in words, with the unused workers."""
    words = f"{within_reach(roster)} of at least {needed(roster)} workers"
    if out := sum(map(roster.excluded, roster.slots.values())):
        words += f" ({out} more are there, but excluded because they failed)"
    unused = not_used(roster)
    return f"{words} ({unused})" if unused else words


def shortage(roster: Roster) -> m.Text:
    """Return why a job fails that has waited for workers too long."""
    limits = roster.limits
    since = roster.now if roster.short_since is None else roster.short_since
    words = (
        f"{presence(roster)} (min_np={limits.min_np}) after waiting {roster.now - since:.1f} s "
        f"(elastic_timeout={limits.elastic_timeout:g})"
    )
    excluded = [slot.worker for slot in roster.slots.values() if roster.excluded(slot)]
    facts = {
        "excluded after failures": ", ".join(excluded),
        "the last process that died": roster.last_death,
        "last error": roster.policy.last_error,
    }
    return m.Text("; ".join([words, *(f"{k}: {fact}" for k, fact in facts.items() if fact)]))


def not_used(roster: Roster, reasons: Collection[m.UnusedReason] = tuple(m.UnusedReason)) -> str:
    """Return the workers that are unused for some reasons, in words; empty without any."""
    groups: dict[str, list[str]] = {}
    for each in roster.unused:
        if each.reason in reasons:
            groups.setdefault(each.why, []).append(each.worker)
    if m.UnusedReason.TOO_LATE in reasons:
        why, usable = m.UnusedReason.TOO_LATE.value, set()
        if can_start(roster):
            why = m.UnusedReason.HOST_FULL.value.format(detail=roster.limits.slots_per_host)
            usable = {slot.id for slot in free_slots(roster)}
        for slot in roster.slots.values():  # in the order of discovery, which is serialized
            free = slot.id in roster.counted.vacant and slot.id not in usable
            if free and not roster.excluded(slot):
                groups.setdefault(why, []).append(slot.worker)
    words = [
        f"{len(workers)} {why} ({m.and_more(workers[:MOST_NAMES], len(workers))})"
        for why, workers in groups.items()
    ]
    return f"not used: {'; '.join(words)}" if words else ""


def first_start(roster: Roster) -> bool:
    """Return whether ranks of one common start still start, without others."""
    starting = roster.counted.stages[Stage.STARTING]  # in the order of their starts
    return next(iter(starting), roster.first_starts) < roster.first_starts


def past_first_loop(roster: Roster) -> m.PastFirstLoop | None:
    """Return the reason why no newcomer can join, if the job has room or too few ranks."""
    here, staying, most = loop(roster) or 0, roster.counted.staying, most_ranks(roster)
    if here < 2 or not staying or last_holders(roster) or (most is not None and staying >= most):
        return None
    if staying < roster.limits.min_np:
        return m.PastFirstLoop(here, staying, roster.limits.min_np)
    return m.PastFirstLoop(here) if free_slots(roster) else None


def held_up(roster: Roster) -> list[Rank]:
    """Return the ranks that wait for other tasks of Dask to leave their workers."""
    busy = {each.worker for each in roster.unused if each.reason == m.UnusedReason.BUSY}
    if not busy:
        return []
    return [rank for rank in roster.in_stage(Stage.STARTING) if rank.slot.worker in busy]


def cannot_begin(roster: Roster, late: list[Rank]) -> bool:
    """Return whether the job waits only for ranks that are held up, some too long."""
    if roster.phase != Phase.GATHERING or roster.any_in(Stage.MEMBER, Stage.DONE, Stage.ENDING):
        return False
    all_starting = roster.in_stage(Stage.STARTING)
    enough = roster.counted.ready + len(last_holders(roster)) >= roster.limits.min_np
    return not enough and bool(late) and len(held_up(roster)) == len(all_starting)


# -- members of the next generation ---------------------------------------------------------------


def ready(roster: Roster) -> list[Rank]:
    """Return the ranks that are ready for the next generation."""
    holders = last_holders(roster)
    return [rank for rank in roster.in_stage(Stage.READY) if not rank.leaving or rank in holders]


def next_members(roster: Roster, candidates: list[Rank]) -> list[Rank]:
    """Choose the members of the next generation, in the order of their ranks."""
    # A last holder takes no place from the last rank that could take the state over.
    limits = roster.limits
    before = {start: rank for rank, start in enumerate(roster.expected)}
    furthest = max((rank.loop for rank in candidates), default=0)
    candidates = [rank for rank in candidates if rank.loop == furthest]
    candidates.sort(key=lambda rank: (before.get(rank.start, len(before)), rank.start))
    holders = set(last_holders(roster)).intersection(candidates)
    most = most_ranks(roster)
    if most is not None and holders:
        most = max(most - len(holders), 1)
    others = [rank for rank in candidates if rank not in holders]
    by_version = sorted(others, key=lambda rank: -rank.version)
    chosen = set(choose(by_version, most=most, per_host=limits.slots_per_host)) | holders
    survivors = [rank for rank in candidates if rank in chosen and rank.start in before]
    newcomers = [rank for rank in candidates if rank in chosen and rank.start not in before]
    return arrange(survivors, newcomers)


def ranks_to_release(roster: Roster, members: list[Rank]) -> list[Rank]:
    """Return the surplus members; a holder of the state stays."""
    most = max(most_ranks(roster) or 1, 1)
    if most_ranks(roster) is None or len(members) <= most:
        return []
    by_age = sorted(members, key=attrgetter("start"))
    newest = max(rank.version for rank in members)
    holders = [rank for rank in by_age if rank.version == newest]
    keep = holders[0] if len(holders) == 1 else None
    released = choose_released(by_age, len(members) - most, keep=keep)
    staying = [rank for rank in members if rank not in released]
    if newest != m.FRESH and all(rank.version == m.FRESH for rank in staying):
        released = choose_released(by_age, len(members) - most, keep=holders[0])
    return sorted(released, key=attrgetter("start"))


def is_fatal(roster: Roster, event: m.RankRaised) -> bool:
    """Return whether no return to a commit makes up for the failure of a rank."""
    if roster.phase == Phase.FINISHING or event.on_all_ranks:
        return True
    if event.collective:
        return not roster.in_loop
    return max(other.version for other in roster.ranks.values()) <= 0


def left_behind(roster: Roster) -> list[Rank]:
    """Return ranks that cannot take part, because training is past their place."""
    here = loop(roster)
    together = here is None or all(each == here for each in roster.counted.ready_loops)
    if together and (here in (None, 1) or not roster.counted.newcomers):
        return []
    return [
        rank
        for rank in roster.in_stage(Stage.STARTING, Stage.READY)
        if (here not in (None, 1) and not rank.planned)
        or (here is not None and rank.stage == Stage.READY and rank.loop != here)
    ]


def surplus(roster: Roster) -> list[Rank]:
    """Return the latest newcomers, beyond the most ranks that the job may have."""
    most = most_ranks(roster)
    number = 0 if most is None else roster.counted.staying - most - _on_top(roster)
    if number <= 0 or roster.any_in(Stage.RETURNED):  # then the others are about to return
        return []
    waiting = roster.in_stage(Stage.STARTING, Stage.READY)
    new = [rank for rank in waiting if rank.version == m.FRESH and not rank.planned]
    return new[max(len(new) - number, 0) :]


def admits(roster: Roster) -> bool:
    """Return whether the owner lets newcomers join at the next commit."""
    plan, every = roster.plan, roster.limits.check_every
    if every == 1 or plan is None or last_holders(roster):
        return True
    return roster.version + 1 >= math.ceil(max(plan.version, 0)) + every


def newcomers_should_join(roster: Roster, members: list[Rank]) -> bool:
    """Return whether the generation should end so that newcomers can join."""
    limits, waiting = roster.limits, ready(roster)
    if not waiting or not admits(roster):
        return False
    most = most_ranks(roster)
    larger = choose([*members, *waiting], most=most, per_host=limits.slots_per_host)
    return len(larger) > len(members) and _should_join(roster, waiting)


def _should_join(roster: Roster, waiting: list[Rank]) -> bool:
    """Return whether ready newcomers need not wait for starting ranks."""
    if not waiting:
        return False
    waited = roster.now >= min(rank.since for rank in waiting) + JOIN_WINDOW
    return waited or not roster.any_in(Stage.STARTING)


# -- ranks that hold up the others -----------------------------------------------------------------


def silent(roster: Roster, ranks: list[Rank], quiet: float = QUIET) -> list[Rank]:
    """Return the `ranks` that are silent for `quiet` s; with all members, messages are late."""
    heard = {rank for rank in roster.awaited() if roster.now < rank.heartbeat_at + quiet}
    return [rank for rank in ranks if rank not in heard] if heard else []


def waits_for_finished(roster: Roster) -> tuple[Rank, Rank] | None:
    """Return a member past its loop, and a member waiting for it in vain."""
    # All members in the loop have sent a heartbeat since: what the one waits for is not late.
    done = min(roster.in_stage(Stage.DONE), key=attrgetter("operations"), default=None)
    if done is None or roster.phase != Phase.RUNNING:
        return None
    members = roster.in_stage(Stage.MEMBER)
    heard = min((rank.heartbeat_at for rank in members), default=0.0)
    ahead = [rank for rank in members if rank.waiting and rank.operations > done.operations]
    vain = (rank for rank in ahead if heard >= rank.progress_at + VAIN_WAIT)
    rank = next(vain, None)
    return None if rank is None else (done, rank)


def different_operations(roster: Roster) -> dict[str, Rank]:
    """Return a member for each of several operations that wait for all members."""
    # All have begun equally many operations and sent a heartbeat since: it is the same operation,
    # and they do not mean the same by it.
    members = roster.in_stage(Stage.MEMBER)
    if roster.phase != Phase.RUNNING or roster.any_in(Stage.DONE):
        return {}
    together = len({rank.operations for rank in members}) == 1
    if not together or not all(r.waiting and r.operations and r.operation for r in members):
        return {}
    sides = {rank.operation: rank for rank in reversed(members)}
    heard = min(rank.heartbeat_at for rank in members)
    late = heard >= max(rank.progress_at for rank in members) + VAIN_WAIT
    return dict(reversed(sides.items())) if late and len(sides) > 1 else {}


def stall_suspects(roster: Roster) -> list[Rank]:
    """Return members that hold up the job for longer than the stall timeout."""
    # A member that waits is not to blame, unless all wait: then all are returned.
    members, limit, now = roster.awaited(), roster.limits.stall_timeout, roster.now
    still = [rank for rank in members if now >= rank.progress_at + limit]
    quiet = min(QUIET, limit / 2)  # the last heartbeat of a frozen rank may say that it waits
    lost = set(silent(roster, members, quiet))
    if not any(now < rank.heartbeat_at + quiet for rank in members):
        return []
    if not any(rank.waits(roster.phase) for rank in still):
        return []
    idle = [rank for rank in still if rank in lost or not rank.waits(roster.phase)]
    if idle:
        return idle
    return members if len(still) == len(members) else []


def errors(roster: Roster) -> str:
    """Return the different errors that user code raised since the newest plan."""
    return "; ".join(sorted(set(roster.user_errors.values())))


def exiting(roster: Roster) -> list[Rank]:
    """Return the ranks that have returned and whose processes have not ended."""
    return [rank for rank in roster.in_stage(Stage.RETURNED) if rank.exits]


def never_met(roster: Roster) -> m.Text | None:
    """Return a warning if no two ranks ever exchanged anything."""
    number = len(roster.expected)
    if number < 2 or not set(roster.isolated).issuperset(roster.expected):
        return None
    return m.Text(
        f"ranks never met: {number} separate trainings\n"
        "No rank used an operation between ranks or an elastic loop, so each ran the whole "
        "function alone.\nTo train one model, wrap the optimizer with "
        "nbelastic.torch.DistributedOptimizer and train in a function decorated with "
        "nbelastic.torch.elastic.run. For Keras, Lightning, transformers and accelerate see "
        "nbelastic.keras, nbelastic.lightning, nbelastic.transformers and nbelastic.accelerate."
    )


# -- parameters of the ranks -----------------------------------------------------------------------

SLIGHT = (1e-6, 0.0, 0.25)
CLEAR = (1e-2, 1e-6, 0.05)
"""Relative and absolute difference, and the share of values that may differ so.

Processors of different kinds round differently, so that some values may differ in their last bits.
Without an average over the ranks nearly all values differ a little, and many of them clearly.
"""


def differ(some: tuple[float, ...], others: tuple[float, ...]) -> bool:
    """Return whether two samples of parameters belong to different models."""
    if len(some) != len(others):
        return True
    for relative, absolute, share in (SLIGHT, CLEAR):
        pairs = zip(some, others, strict=True)
        unequal = sum(not math.isclose(a, b, rel_tol=relative, abs_tol=absolute) for a, b in pairs)
        if unequal > share * len(some):
            return True
    return False


def differs(seen: MutableMapping[int, m.WeightsSampled], sample: m.WeightsSampled) -> bool:
    """Return whether a sample differs from the first of its moment, kept in `seen`."""
    first = seen.get(sample.moment)
    if first is None or first.generation != sample.generation:
        seen[sample.moment] = sample
        return False
    return differ(first.values, sample.values)


# -- events that change nothing more ---------------------------------------------------------------


def needs_nothing(roster: Roster, event: m.Event) -> bool:
    """Return whether the rules can wait for the next tick: most messages in a large job."""
    kind = type(event)
    if kind in (m.Beats, m.WorkersUnused, m.WeightsSampled):
        return True
    if kind is m.SlotsFound:
        waiting = roster.phase == Phase.GATHERING and roster.short_since is not None
        short = waiting and within_reach(roster) < needed(roster)
        return short and not roster.launched
    if kind is m.RankFormed:
        return roster.phase == Phase.FORMING
    return kind is m.RankReady and _others_will_report(roster)


def _others_will_report(roster: Roster) -> bool:
    counted = roster.counted
    first = first_start(roster) and not counted.synced
    awaited = roster.any_in(Stage.MEMBER, Stage.DONE) or first
    alike = counted.loops or counted.ready_loops
    return (
        roster.phase == Phase.GATHERING
        and awaited
        and not roster.any_in(Stage.RETURNED)
        and not counted.vacant
        and not roster.user_errors
        and alike == counted.ready_loops
        and len(alike) == 1
        and (roster.short_since is not None or within_reach(roster) >= needed(roster))
    )
