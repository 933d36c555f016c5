"""What the machine looks like from outside: the part of a job's status that it knows."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .rank import Phase, Rank, Stage
from .roster import Roster

if TYPE_CHECKING:
    from .machine import Machine

__all__ = ["RankView", "View", "view"]

_STATES = {
    Phase.FORMING: "forming",
    Phase.RUNNING: "running",
    Phase.FINISHING: "running",
}


@dataclass(frozen=True)
class RankView:
    """One rank; `rank` is None while it belongs to no generation."""

    start: int
    rank: int | None
    worker: str
    host: str
    state: str
    commits: int


@dataclass(frozen=True)
class View:
    """The job; `state` is one of waiting, forming, running, finished, failed, stopped."""

    state: str
    generation: int
    size: int
    min_np: int
    max_np: int | None
    resets: int
    commits: int
    reason: str
    ranks: tuple[RankView, ...]
    backend: str


def view(machine: Machine, now: float) -> View:
    """Return what a machine looks like at a time."""
    roster = machine.roster
    members = [] if roster.phase == Phase.GATHERING else roster.members()
    numbers = {rank.start: number for number, rank in enumerate(members)}
    ranks = sorted(roster.ranks.values(), key=lambda r: (numbers.get(r.start, 1 << 30), r.start))
    return View(
        state=_state(roster),
        generation=roster.generation,
        size=len(members),
        min_np=roster.limits.min_np,
        max_np=roster.limits.max_np,
        resets=roster.resets,
        commits=roster.version,
        reason=_reason(roster, now),
        ranks=tuple(_rank_view(roster, rank, numbers.get(rank.start)) for rank in ranks),
        backend=roster.backend,
    )


def _state(roster: Roster) -> str:
    if roster.outcome is not None:
        return roster.outcome.kind if roster.phase == Phase.ENDED else "running"
    if roster.phase == Phase.GATHERING and roster.plan is not None and roster.short_since is None:
        return "forming"
    return _STATES.get(roster.phase, "waiting")


def _rank_view(roster: Roster, rank: Rank, number: int | None) -> RankView:
    state = "leaving" if rank.leaving else rank.stage.value
    if state == Stage.MEMBER.value:
        state = "running" if roster.phase == Phase.RUNNING else "forming"
    return RankView(
        start=rank.start,
        rank=number,
        worker=rank.slot.worker,
        host=rank.slot.host,
        state=state,
        commits=math.floor(max(rank.version, 0)),
    )


def _reason(roster: Roster, now: float) -> str:
    if roster.outcome is not None:
        return roster.outcome.reason
    if roster.phase != Phase.GATHERING:
        return "; ".join(r for r in ["stopping at the next commit"] if roster.stopping)
    if roster.short_since is not None:
        there, needed = roster.within_reach(now), roster.needed()
        waited = now - roster.short_since
        left = f"{waited:.0f} s of {roster.limits.elastic_timeout:g} s"
        if there < needed:
            missing = needed - there
            return f"{roster.presence(now)}; waiting {left} for {missing} more"
    awaited = roster.awaited()
    if awaited:
        return f"waiting for {len(awaited)} ranks to leave generation {roster.generation}"
    starting = roster.in_stage(Stage.STARTING)
    return f"waiting for {len(starting)} ranks to be ready" if starting else ""
