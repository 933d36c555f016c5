"""Which messages call for nothing, since others like them are waited for.

That spares the many messages of a large job the rules.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import events as ev
from .rank import Phase, Stage

if TYPE_CHECKING:
    from .roster import Roster

__all__ = ["is_idle"]


def is_idle(roster: Roster, event: ev.Event) -> bool:
    """Return whether an event that has been taken in calls for nothing more.

    Nothing is due by time, and taking it in has had no effect yet.
    """
    kind = type(event)
    if kind is ev.Beats:
        in_generation = roster.phase in (Phase.RUNNING, Phase.FINISHING)
        return in_generation and roster.now < roster.still_since + roster.limits.stall_timeout
    if kind is ev.SlotsFound:
        waiting = roster.phase == Phase.GATHERING and roster.short_since is not None
        short = waiting and roster.within_reach(roster.now) < roster.needed()
        return short and not roster.launched
    if kind is ev.RankFormed:
        return roster.phase == Phase.FORMING
    return kind is ev.RankReady and _others_are_to_come(roster)


def _others_are_to_come(roster: Roster) -> bool:
    counted = roster.counted
    starting = counted.first(Stage.STARTING)
    founding = starting is not None and starting.start < roster.founders
    awaited = roster.any_in(Stage.MEMBER, Stage.DONE) or (founding and not counted.synced)
    alike = counted.loops if counted.loops else counted.ready_loops
    return (
        roster.phase == Phase.GATHERING
        and awaited
        and not roster.any_in(Stage.RETURNED)
        and not counted.vacant
        and not roster.broken_by_user
        and alike.keys() == counted.ready_loops.keys()
        and len(alike) == 1
        and (roster.short_since is not None or roster.within_reach(roster.now) >= roster.needed())
    )
