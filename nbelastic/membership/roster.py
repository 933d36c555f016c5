"""Memory of the membership machine. It decides nothing."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from .events import WeightsSampled
from .failure_policy import FailurePolicy
from .model import FRESH, Limits, Outcome, Plan, Slot, UnusedWorker
from .ranks import Phase, Rank, Ranks, Stage
from .reasons import GenerationLeft, Lost, NoticeGiven, RankId, Reason, Sharing


@dataclass
class Roster:
    """All that the machine remembers of one job.

    Attributes
    ----------
    now : float
        Time of the newest event.
    generation : int
        Number of the newest plan.
    plan : Plan or None
        The newest plan; in force in ``FORMING``, ``RUNNING`` and ``FINISHING``.
    aborted : bool
        Whether its members were ordered to end their generation.
    pending : bool
        Whether a change was announced to its members.
    stopping : bool
        Whether the job ends at the next commit.
    launched : bool
        Whether enough slots were there once.
    ran : bool
        Whether any generation has formed in an elastic loop, so that there was a state to lose.
    first_starts : int
        Starts below this number were started together, when the job had no other ranks.
    closed : bool
        Whether the function turned out to be one that newcomers cannot join.
    backend : str
        Communicator of the newest plan's members, once the first of them has reported it.
    remark : str
        The newest report on why there is no faster communicator.
    version : int
        Newest commit that every member holds.
    newest : int
        Newest known commit of any rank since the job last started over.
    starts : int
        Number of starts of the function.
    expected : list of int
        Starts that have to return for the job to finish, by rank: the members of the newest plan;
        without any plan, the ranks that were there when the first of them returned.
    saved_in : int
        The generation after which a rank of the suspended job was last told to write its commit.
    short_since : float or None
        Time since when there has been no training because there are too few slots.
    still_since : float
        No member made progress before this time; some have since.
    reset_causes : list of Reason
        Faults since the last reset.
    departing : dict of str to float
        Slots that are leaving or gone, and since when. Nothing is ever started on them again.
    departed : dict of str to float
        When a process of a worker was last to leave or gone, by the worker's lasting name.
    notices : dict of str to NoticeGiven
        Notices of workers with a rank, by slot, each with the moment in the place of `seconds`.
    at_risk : dict of str to NoticeGiven
        Notices without a time, by slot: of workers that another should take the place of.
    isolated : dict of int to tuple of str
        Starts that returned without an exchange with another rank, with what trained in them.
    samples : dict of (int, bool) to WeightsSampled
        The first sample of parameters of each moment of the present generation, those besides the
        state apart.
    warnings : list of Reason
        Warnings so far.
    dead : dict of int to Slot
        Starts whose processes have ended, as neighbours report; their workers will say of what.
    unused : list of UnusedWorker
        Workers that the cluster does not offer to the job.
    user_errors : dict of int to str
        Errors that user code raised since the newest plan, by start.
    policy : FailurePolicy
        Limits on failures, and what is counted for them.
    own_failure : GenerationLeft or None
        The first report of the failure by which the newest plan's members ended it themselves.
    lost : dict of str to Lost
        Lost members of the newest plan, by their workers' lasting names.
    last_death : str
        Cause of the last known death of a process.
    share : int or None
        Most ranks that the job may have besides ``max_np``, while it shares its cluster.
    sharing : Sharing or None
        The share for people.
    shared : bool
        Whether it has ever had a share.
    gave_way : bool
        Whether ranks have left for other jobs since the newest plan.
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
    first_starts: int = 0
    closed: bool = False
    backend: str = ""
    remark: str = ""
    version: int = 0
    newest: int = 0
    starts: int = 0
    expected: list[int] = field(default_factory=list)
    saved_in: int = -1
    short_since: float | None = None
    still_since: float = 0.0
    reset_causes: list[Reason] = field(default_factory=list)
    ranks: dict[int, Rank] = field(default_factory=dict)
    slots: dict[str, Slot] = field(default_factory=dict)
    departing: dict[str, float] = field(default_factory=dict)
    departed: dict[str, float] = field(default_factory=dict)
    notices: dict[str, NoticeGiven] = field(default_factory=dict)
    at_risk: dict[str, NoticeGiven] = field(default_factory=dict)
    isolated: dict[int, tuple[str, ...]] = field(default_factory=dict)
    samples: dict[tuple[int, bool], WeightsSampled] = field(default_factory=dict)
    warnings: list[Reason] = field(default_factory=list)
    dead: dict[int, Slot] = field(default_factory=dict)
    unused: list[UnusedWorker] = field(default_factory=list)
    user_errors: dict[int, str] = field(default_factory=dict)
    policy: FailurePolicy = field(default_factory=FailurePolicy)
    own_failure: GenerationLeft | None = None
    lost: dict[str, Lost] = field(default_factory=dict)
    last_death: str = ""
    share: int | None = None
    sharing: Sharing | None = None
    shared: bool = False
    gave_way: bool = False
    outcome: Outcome | None = None

    def __post_init__(self) -> None:
        self.counted = Ranks(self.ranks.values(), self.slots, self.generation)
        self.ranks = self.counted

    @property
    def ended(self) -> bool:
        """Whether the outcome is known."""
        return self.phase in (Phase.ENDING, Phase.ENDED)

    @property
    def in_loop(self) -> bool:
        """Whether the newest plan is one of an elastic loop."""
        return self.plan is not None and self.plan.loop > 0

    def members(self) -> list[Rank]:
        """Return the members of the newest plan that are left, by rank."""
        if self.plan is None:
            return []
        order = [self.ranks.get(member.start) for member in self.plan.members]
        return [rank for rank in order if rank is not None and rank.stage != Stage.ENDING]

    def any_in(self, *stages: Stage) -> bool:
        """Return whether any rank is in any of `stages`."""
        return any(map(self.counted.stages.__getitem__, stages))

    def in_stage(self, *stages: Stage) -> list[Rank]:
        """Return the ranks in any of `stages`, in the order of their starts."""
        ranks = [rank for stage in stages for rank in self.counted.stages[stage].values()]
        return sorted(ranks, key=_start) if len(ranks) > 1 else ranks

    def awaited(self) -> list[Rank]:
        """Return members that have not left the generation yet."""
        return self.in_stage(Stage.MEMBER, Stage.DONE)

    def staying(self) -> list[Rank]:
        """Return the ranks that are neither ending nor leaving."""
        return [r for r in self.ranks.values() if r.stage != Stage.ENDING and not r.leaving]

    def on_slot(self, slot: str) -> list[Rank]:
        """Return the ranks on a slot."""
        return list(self.counted.on_slot.get(slot, {}).values())

    @property
    def any_leaving(self) -> bool:
        """Whether any rank was asked to leave and was not ordered to end."""
        ending = len(self.counted.stages[Stage.ENDING])
        return self.counted.staying + ending < len(self.ranks)

    def find_slot(self, slot: Slot) -> None:
        """Note a slot, new or known."""
        self.slots[slot.id] = slot
        if slot.id not in self.counted.on_slot:
            self.counted.vacant[slot.id] = None

    def drop_slot(self, slot: str) -> None:
        """Forget a slot, if it is known."""
        self.slots.pop(slot, None)
        self.counted.vacant.pop(slot, None)

    def depart(self, slot: str) -> None:
        """Note that nothing can be started on a slot any more."""
        ranks = self.on_slot(slot)
        known = self.slots.get(slot) or (ranks[0].slot if ranks else None)
        if slot not in self.departing:
            self.departed[known.lasting if known else slot] = self.now
        self.drop_slot(slot)
        self.at_risk.pop(slot, None)
        self.departing.setdefault(slot, self.now)

    def enter(self, phase: Phase) -> None:
        """Begin a phase."""
        self.phase, self.phase_since = phase, self.now

    def excluded(self, slot: Slot) -> bool:
        """Return whether a slot's worker or host is excluded now."""
        return self.policy.excludes(slot, self.now)

    def hosts(self) -> set[str]:
        """Return the hosts on which the job has ranks, or could have them."""
        ranks = [rank.slot for rank in self.ranks.values()]
        return {slot.host for slot in [*self.slots.values(), *ranks]}

    def note_version(self, rank: Rank, version: float) -> None:
        """Note a rank's last commit, which never goes back."""
        if version > rank.version:
            if version > rank.version_at_join:
                self.policy.forgive(rank.slot)
            self.counted.note_version(rank, version)
            self.newest = max(self.newest, math.floor(version))

    def note_commits(self) -> None:
        """Note the newest commit that all members hold."""
        common = min(self.counted.versions, default=FRESH)
        if common >= self.version + 1:
            self.version = math.floor(common)

    def causes(self) -> tuple[Reason, ...]:
        """Return the different faults since the last reset."""
        return tuple(dict.fromkeys(self.reset_causes))

    def id(self, rank: Rank) -> RankId:
        """Return the identity of a rank in the newest plan."""
        number = self.plan.rank_of(rank.start) if self.plan else None
        return RankId(rank.start, number, rank.slot.worker)


def _start(rank: Rank) -> int:
    return rank.start
