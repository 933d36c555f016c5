"""The status of a job, from its roster, and the reasons for its state."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from nbelastic import messages as m
from nbelastic.status import JobStatus, RankStatus

from . import rules
from .machine import Machine
from .ranks import Phase, Stage
from .roster import Roster

MOST_NOTICES = 3  # most workers that the status names as about to go

# Reasons that a user need not know of a job that trains: the own options, and the job's course.
_KNOWN = ("NOT_IN_WORKERS", "LACKS_RESOURCES", "HOST_FULL", "TOO_LATE")
_BY_OTHERS = [reason for reason in m.UnusedReason if reason.name not in _KNOWN]


def view(machine: Machine, of_rank: Callable[[int], dict[str, Any]] = lambda _: {}) -> JobStatus:
    """Return the part of a job's status that its machine knows, ranks with further fields."""
    roster = machine.roster
    members = [] if roster.phase == Phase.GATHERING else roster.members()
    last = roster.plan if roster.phase == Phase.ENDED else None
    slots = {each.start: each.slot for each in (last.members if last else members)}
    numbers = {start: number for number, start in enumerate(slots)}
    if last is None:  # at the end, only the last members are shown, also those that are gone
        slots |= {start: roster.ranks[start].slot for start in sorted(roster.ranks)}
    return JobStatus(
        name="",
        state=_state(roster),
        generation=roster.generation,
        size=len(members),
        min_np=roster.limits.min_np,
        max_np=roster.limits.max_np,
        resets=roster.policy.resets,
        commits=roster.version,
        elapsed=0.0,
        reason="",
        ranks=tuple(
            _rank_status(roster, start, slot, numbers.get(start), of_rank(start))
            for start, slot in slots.items()
        ),
        backend=roster.backend,
        share=None if roster.ended else roster.share,
        errors=sum(isinstance(each, (m.CutOff, m.RankError)) for each in roster.warnings),
    )


def _state(roster: Roster) -> str:
    if roster.outcome is not None:
        return roster.outcome.kind if roster.phase == Phase.ENDED else "running"
    gathering = roster.phase == Phase.GATHERING and roster.plan is not None
    waits = roster.short_since is not None or rules.suspended(roster)
    if roster.phase == Phase.FORMING or (gathering and not waits):
        return "forming"
    return "running" if roster.phase in (Phase.RUNNING, Phase.FINISHING) else "waiting"


def _rank_status(
    roster: Roster, start: int, slot: m.Slot, number: int | None, more: dict[str, Any]
) -> RankStatus:
    rank, state, commits = roster.ranks.get(start), "ended", roster.version
    if rank is not None:
        state, commits = rank.stage.value, math.floor(max(rank.version, 0))
        if rank.leaving:
            state = "leaving"
        elif rank.stage == Stage.MEMBER:
            state = "running" if roster.phase == Phase.RUNNING else "forming"
    more = {"name": slot.name, "start": start, **more}
    return RankStatus(number, slot.worker, slot.host, state, commits, **more)


def reasons(machine: Machine, now: float) -> list[m.Reason]:
    """Return the reasons for the state of a job: its wait or its end, and its share."""
    roster = machine.roster
    return [each for each in (_reason(roster, now), _sharing(roster)) if each is not None]


def _sharing(roster: Roster) -> m.Reason | None:
    """Return the share, where the job could have more ranks without it."""
    high = roster.limits.max_np
    if roster.ended or roster.sharing is None:
        return None
    if high is not None and high <= roster.sharing.share:
        return None
    return replace(roster.sharing, suspended=rules.suspended(roster))


def _noticed(roster: Roster, now: float) -> m.Text:
    """Return the departing workers, with the time left to each, and the workers at risk."""
    firm = sorted(roster.notices.values(), key=lambda notice: notice.seconds)
    shown = [replace(each, seconds=max(each.seconds - now, 0.0)) for each in firm]
    shown += [notice for slot, notice in roster.at_risk.items() if roster.on_slot(slot)]
    more = len(shown) - MOST_NOTICES
    return m.Text(m.listed(shown[:MOST_NOTICES]) + (f"; and {more} more" if more > 0 else ""))


def _reason(roster: Roster, now: float) -> m.Reason | None:
    limits = roster.limits
    if roster.outcome is not None:
        exits = m.so_many_ranks(len(rules.exiting(roster)))
        if roster.phase == Phase.ENDED or not rules.exiting(roster):
            return roster.outcome.reason
        return m.Text(
            f"all ranks have returned; threads, exit handlers or children of {exits} still run, "
            f"for {limits.exit_timeout:g} s at most (exit_timeout)"
        )
    most = rules.most_ranks(roster)
    if roster.phase != Phase.GATHERING:
        if roster.stopping:
            return m.STOP_PENDING
        if roster.notices or any(map(roster.on_slot, roster.at_risk)):
            return _noticed(roster, now)
        if roster.phase != Phase.RUNNING or (most is not None and roster.counted.staying >= most):
            return None
        unused = rules.not_used(roster, _BY_OTHERS)
        return m.Text(unused) if unused else None
    more = rules.needed(roster) - rules.within_reach(roster)
    if roster.short_since is not None and more > 0:
        time = f"{now - roster.short_since:.0f} s of {limits.elastic_timeout:g} s"
        return m.Text(f"{rules.presence(roster)}; waiting {time} for {more} more")
    awaited, starting = len(roster.awaited()), roster.in_stage(Stage.STARTING)
    if awaited:
        ranks = m.so_many_ranks(awaited)
        return m.Text(f"waiting for {ranks} to leave generation {roster.generation}")
    if not starting:
        return None
    words = f"waiting for {m.so_many_ranks(len(starting))} to be ready"
    if held_up := next((rank for rank in starting if rank.operation), None):
        words += f": {held_up.operation}, {now - held_up.since:.0f} s"
    if busy := rules.not_used(roster, (m.UnusedReason.BUSY,)):
        words += f" ({busy})"
    return m.Text(words)
