"""All that the machine remembers, and what follows from it. Nothing here decides anything."""

from __future__ import annotations

from dataclasses import dataclass, field

from .cooldown import Cooldown
from .model import Limits, Outcome, Plan, Slot
from .placement import spread
from .rank import Phase, Rank, Stage
from .ranks import Ranks
from .repeats import Repeats

__all__ = [
    "JOIN_WINDOW",
    "QUIET",
    "REST",
    "STRIKES",
    "STRIKE_WINDOW",
    "Roster",
]

JOIN_WINDOW = 1.0
"""Seconds that a newcomer waits for others that are starting, so that they join in one reset."""

STRIKES = 3
"""Failures in a row after which a host, or a worker that is restarted each time, has to rest.

In a row: without a commit of a rank of it in between. For a host, so many of its workers.
"""


REST = (10.0, 600.0)
"""Shortest and longest rest, in seconds, where the job's owner has given no range."""


QUIET = 5.0
"""Seconds without a heartbeat after which a rank is not heard of any more, if others are."""


STRIKE_WINDOW = 2.0
"""Seconds in which failures on a host count as one: a machine that goes takes all its workers."""


@dataclass
class Roster:
    """The machine's memory.

    Attributes
    ----------
    generation : int
        Number of the newest plan.
    plan : Plan or None
        The newest plan; in force in ``FORMING``, ``RUNNING`` and ``FINISHING``.
    aborted : bool
        Whether its members were told that it is over.
    pending : bool
        Whether its members were told that a change is coming.
    ran : bool
        Whether any generation has formed in an elastic loop: there was a state to lose.
    launched : bool
        Whether enough slots were there once.
    founders : int
        Starts below this number were started together, with nobody there before.
    closed : bool
        Whether the function turned out to be one that newcomers cannot join.
    backend : str
        What the members of the newest plan are connected by, once the first of them has said so.
    remark : str
        What was said last of why it is nothing faster.
    version : int
        Newest commit that every member holds.
    crew : list of int
        Whose results the job needs, by rank: the members of the newest plan; without any plan,
        those who were there when the first of them returned.
    fruitless : int
        Plans in a row with the members of the one before, which a fault had ended without a commit.
    barren : int
        The same, whoever the members.
    short_since : float or None
        Since when there has been no training because too few slots were there.
    departing : dict of str to float
        Slots that are leaving or gone, and since when: nothing is ever started on them again.
    broken_by_user : dict of int to str
        What user code raised since the newest plan, by start.
    workers_out : Cooldown
        Workers that failed, and live.
    resting : Cooldown
        Hosts, and workers by name, that failed again and again.
    strikes : dict of str to int
        Failures in a row of each worker, by name.
    host_strikes : dict of str to list of str
        Workers of each host that failed, with no commit by a rank of it since.
    struck_at : dict of str to float
        When the newest of them failed.
    repeats : Repeats
        Errors that members raised lately.
    still_since : float
        No member has moved before this; some have since.
    now : float
        Time of the newest event.
    """

    limits: Limits
    now: float = 0.0
    phase: Phase = Phase.GATHERING
    phase_since: float = 0.0
    generation: int = 0
    plan: Plan | None = None
    aborted: bool = False
    pending: bool = False
    stopping: bool = False
    launched: bool = False
    ran: bool = False
    founders: int = 0
    closed: bool = False
    backend: str = ""
    remark: str = ""
    version: int = 0
    resets: int = 0
    starts: int = 0
    crew: list[int] = field(default_factory=list)
    fruitless: int = 0
    barren: int = 0
    forming_failures: int = 0
    stalls: int = 0
    short_since: float | None = None
    reset_causes: list[str] = field(default_factory=list)
    ranks: dict[int, Rank] = field(default_factory=dict)
    slots: dict[str, Slot] = field(default_factory=dict)
    departing: dict[str, float] = field(default_factory=dict)
    broken_by_user: dict[int, str] = field(default_factory=dict)
    workers_out: Cooldown = field(default_factory=Cooldown)
    resting: Cooldown = field(default_factory=Cooldown)
    strikes: dict[str, int] = field(default_factory=dict)
    host_strikes: dict[str, list[str]] = field(default_factory=dict)
    struck_at: dict[str, float] = field(default_factory=dict)
    repeats: Repeats = field(default_factory=Repeats)
    still_since: float = 0.0
    outcome: Outcome | None = None

    def __post_init__(self) -> None:
        self.counted = Ranks(self.ranks.values(), self.slots, self.generation)
        self.ranks = self.counted

    @property
    def ended(self) -> bool:
        """Whether the outcome is known."""
        return self.phase in (Phase.ENDING, Phase.ENDED)

    def members(self) -> list[Rank]:
        """Return those of the newest plan that are still there, by rank."""
        if self.plan is None:
            return []
        order = [self.ranks.get(member.start) for member in self.plan.members]
        return [rank for rank in order if rank is not None and rank.stage != Stage.ENDING]

    def any_in(self, *stages: Stage) -> bool:
        """Return whether any rank is in any of `stages`."""
        crews = self.counted.stages
        return any(map(crews.__getitem__, stages))

    def in_stage(self, *stages: Stage) -> list[Rank]:
        """Return the ranks in any of `stages`, in the order of their starts."""
        ranks = [rank for stage in stages for rank in self.counted.stages[stage].values()]
        return sorted(ranks, key=_start) if len(ranks) > 1 else ranks

    def awaited(self) -> list[Rank]:
        """Return members that have not left the generation yet."""
        return self.in_stage(Stage.MEMBER, Stage.DONE)

    def staying(self) -> list[Rank]:
        """Return the ranks that are there and not on their way out."""
        return [r for r in self.ranks.values() if r.stage != Stage.ENDING and not r.leaving]

    def find_slot(self, slot: Slot) -> None:
        """Note a slot, be it new or known."""
        self.slots[slot.id] = slot
        if slot.id not in self.counted.on_slot:
            self.counted.vacant[slot.id] = None

    def drop_slot(self, slot: str) -> None:
        """Forget a slot, if it is known."""
        self.slots.pop(slot, None)
        self.counted.vacant.pop(slot, None)

    def worker_key(self, slot: Slot) -> str:
        """Return under which key a worker cools down: with a range, its name on its host."""
        return slot.id if self.workers_out.bounds is None else slot.lasting

    def excluded(self, slot: Slot, now: float) -> bool:
        """Return whether a slot's worker or host is cooling down."""
        return (
            self.workers_out.excludes(self.worker_key(slot), now)
            or self.resting.excludes(slot.lasting, now)
            or self.resting.excludes(slot.host, now)
        )

    def hosts(self) -> set[str]:
        """Return the hosts on which the job has ranks, or could have them."""
        ranks = [rank.slot for rank in self.ranks.values()]
        return {slot.host for slot in [*self.slots.values(), *ranks]}

    def presence(self, now: float) -> str:
        """Return in words how many workers there are of those needed."""
        words = f"{self.within_reach(now)} of at least {self.needed()} workers"
        out = sum(self.excluded(slot, now) for slot in self.slots.values())
        return f"{words} ({out} more are there, but left out because they failed)" if out else words

    def free_slots(self, now: float) -> list[Slot]:
        """Return the slots on which a rank could be started now, in the order of discovery."""
        vacant = [self.slots[id] for id in self.counted.vacant]
        vacant = [slot for slot in vacant if not self.excluded(slot, now)]
        if len(vacant) > 1:
            ids = {slot.id for slot in vacant}
            vacant = [slot for slot in self.slots.values() if slot.id in ids]
        cap = self.limits.slots_per_host
        if cap is None or not vacant:
            return vacant
        crews = spread([rank.slot for rank in self.staying()])
        free = []
        for slot in vacant:
            crew = crews.get(slot.host, 0)
            if crew < cap:
                free.append(slot)
                crews[slot.host] = crew + 1
        return free

    def loop(self) -> int | None:
        """Return which elastic loop those are in, or enter, who have been members; None if nobody.

        Newcomers start the function from the top: they can join those in loop 1, and nobody else.
        """
        return max(self.counted.loops, default=None)

    def may_hire(self) -> bool:
        """Return whether newcomers could join."""
        if self.ended or self.stopping or self.phase == Phase.FINISHING:
            return False
        if self.any_in(Stage.RETURNED):
            return False
        return not self.counted.staying or (self.loop() in (None, 1) and not self.closed)

    def within_reach(self, now: float) -> int:
        """Return how many ranks the job could have with what is there now."""
        count, most = self.counted.staying, self.limits.max_np
        if self.may_hire() and (most is None or count < most):
            plain = self.limits.slots_per_host is None
            if plain and not self.workers_out.until and not self.resting.until:
                count += len(self.counted.vacant)
            else:
                count += len(self.free_slots(now))
        return count if most is None else min(count, most)

    def needed(self) -> int:
        """Return how many slots the job waits for."""
        low, high = self.limits.min_np, self.limits.max_np
        if self.launched:
            return low
        return max(low, self.limits.np if high is None else min(self.limits.np, high))

    def unheard(self, ranks: list[Rank], now: float, quiet: float = QUIET) -> list[Rank]:
        """Return those of `ranks` that send no heartbeats for `quiet` s while other members do.

        If nobody is heard of, the messages are late, not the ranks.
        """
        heard = {rank for rank in self.awaited() if now < rank.heard_at + quiet}
        return [rank for rank in ranks if rank not in heard] if heard else []

    def stall_suspects(self, now: float) -> list[Rank]:
        """Return members that hold up others for longer than the stall timeout.

        Somebody must have waited all that time. Those who wait, and say so, are not to blame;
        unless everybody waits, which has no culprit among them (an empty list of suspects is
        never returned while the generation is stalled: then it is all of them).
        """
        members, limit = self.awaited(), self.limits.stall_timeout
        quiet = min(QUIET, limit / 2)  # one that froze while it waited has said last that it waits
        lost = set(self.unheard(members, now, quiet))
        if not any(now < rank.heard_at + quiet for rank in members):
            return []
        still = [rank for rank in members if now >= rank.moved_at + limit]
        if not any(rank.waits(self.phase) for rank in still):
            return []
        idle = [rank for rank in still if rank in lost or not rank.waits(self.phase)]
        if idle:
            return idle
        return members if len(still) == len(members) else []

    def deadline(self, now: float) -> float | None:
        """Return when time alone may change something next; None only after the end."""
        if self.phase == Phase.ENDED:
            return None
        limits = self.limits
        times = [now + limits.stall_timeout]
        times += self._oldest(Stage.ENDING, limits.ending_timeout)
        times += self._oldest(Stage.STARTING, limits.elastic_timeout)
        if self.phase == Phase.FORMING:
            times.append(self.phase_since + limits.forming_timeout)
        elif self.phase == Phase.GATHERING and self.any_in(Stage.MEMBER, Stage.DONE):
            times.append(self.phase_since + limits.stall_timeout)
        elif self.phase in (Phase.RUNNING, Phase.FINISHING):
            still = [self.still_since]
            if now >= self.still_since + limits.stall_timeout:
                still = [rank.moved_at for rank in self.awaited()]
            times += [since + limits.stall_timeout for since in still]
            times += self._oldest(Stage.READY, JOIN_WINDOW)
        if self.short_since is not None:
            times.append(self.short_since + limits.elastic_timeout)
        for out in (self.workers_out, self.resting):
            end = out.next_end(now) if out.until else None
            if end is not None:
                times.append(end)
        return min([time for time in times if time > now], default=now)

    def _oldest(self, stage: Stage, limit: float) -> list[float]:
        """Return when whoever is in `stage` the longest has been there for `limit` s."""
        crew = self.counted.stages[stage]
        return [next(iter(crew.values())).since + limit] if crew else []


def _start(rank: Rank) -> int:
    return rank.start
