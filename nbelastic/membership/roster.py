"""Memory of the membership machine. It decides nothing."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from operator import attrgetter

from nbelastic import messages as m

from .failure_policy import FailurePolicy
from .ranks import Phase, Rank, Ranks, Stage


@dataclass
class Roster:
    """The machine's memory of a job."""

    limits: m.Limits
    now: float = 0.0  # time of the newest event
    advanced: float = 0.0  # when all rules were applied last
    phase: Phase = Phase.GATHERING
    phase_since: float = 0.0
    generation: int = 0  # number of the newest plan
    plan: m.Plan | None = None  # the newest; in force in FORMING, RUNNING and FINISHING
    aborted: bool = False  # its members were ordered to end their generation
    pending: bool = False  # a change was announced to its members
    all_waited: bool = False  # its members were freed, because all waited for each other
    stopping: bool = False  # the job ends at the next commit
    launched: bool = False  # enough slots were there once
    ran: bool = False  # a generation has formed in an elastic loop, so there was a state to lose
    first_starts: int = 0  # lower starts were started together, when the job had no other ranks
    closed: bool = False  # the function turned out to be one that newcomers cannot join
    backend: str = ""  # communicator of the plan's members, once the first has reported it
    remark: str = ""  # newest report on why there is no faster communicator
    version: int = 0  # newest commit that every member holds
    restarted: bool = False  # `version` is of before, until ranks report that of the checkpoint
    newest: int = 0  # newest known commit of any rank since the job last started over
    starts: int = 0  # number of starts of the function
    # Starts that have to return for the job to finish, by rank: the members of the newest plan;
    # without a plan, the ranks that were there when the first of them returned.
    expected: list[int] = field(default_factory=list)
    short_since: float | None = None  # no training since then, because there are too few slots
    reset_causes: list[m.AnyReason] = field(default_factory=list)  # faults since the last reset
    ranks: dict[int, Rank] = field(default_factory=dict)  # by start
    slots: dict[str, m.Slot] = field(default_factory=dict)  # by identity
    # Slots that are leaving or gone, each with its worker's lasting name, and since when; nothing
    # is ever started on them again.
    departing: dict[str, tuple[str, float]] = field(default_factory=dict)
    # Notices of workers with a rank, by slot, each with the moment in the place of `seconds`.
    notices: dict[str, m.Notice] = field(default_factory=dict)
    # Notices without a time, by slot: a newcomer on another worker should replace the rank.
    at_risk: dict[str, m.Notice] = field(default_factory=dict)
    isolated: list[int] = field(default_factory=list)  # starts that returned without an exchange
    # The first sample of parameters of each moment of this generation.
    samples: dict[int, m.WeightsSampled] = field(default_factory=dict)
    warnings: list[m.AnyReason] = field(default_factory=list)
    # Starts whose processes have ended, as neighbours report; their workers report the cause later.
    dead: dict[int, m.Slot] = field(default_factory=dict)
    # Workers that the cluster does not offer to the job.
    unused: list[m.UnusedWorker] = field(default_factory=list)
    # Raised by user code since the newest plan, by start.
    user_errors: dict[int, str] = field(default_factory=dict)
    # Limits on failures, and their counts.
    policy: FailurePolicy = field(default_factory=FailurePolicy)
    # First report of the failure by which members ended the plan.
    own_failure: m.GenerationLeft | None = None
    # Lost members of the newest plan, by their workers' lasting names.
    lost: dict[str, m.Lost] = field(default_factory=dict)
    last_death: str = ""  # cause of the last known death of a process
    sharing: m.Sharing | None = None  # its share, while the job shares its cluster
    outcome: m.Outcome | None = None

    def __post_init__(self) -> None:
        self.counted = Ranks(self.ranks.values(), self.slots)
        self.ranks = self.counted

    @property
    def ended(self) -> bool:
        """Whether the outcome is known."""
        return self.phase in (Phase.ENDING, Phase.ENDED)

    @property
    def size(self) -> int:
        """Number of members for the history; 0 from the outcome on."""
        return 0 if self.ended else self.present

    @property
    def present(self) -> int:
        """Number of members of the newest plan that are left."""
        return sum(number for _, number in self.counted.members(self.generation))

    @property
    def share(self) -> int | None:
        """Most ranks besides max_np; None while the job does not share its cluster."""
        return None if self.sharing is None else self.sharing.share

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
        return sorted(ranks, key=attrgetter("start")) if len(ranks) > 1 else ranks

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

    def find_slot(self, slot: m.Slot) -> None:
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
        known = self.slots.get(slot) or next((rank.slot for rank in self.on_slot(slot)), None)
        self.departing.setdefault(slot, (known.lasting if known else slot, self.now))
        self.drop_slot(slot)
        self.at_risk.pop(slot, None)

    def enter(self, phase: Phase) -> None:
        """Begin a phase."""
        self.phase, self.phase_since = phase, self.now

    def excluded(self, slot: m.Slot) -> bool:
        """Return whether a slot's worker or host is excluded now."""
        return self.policy.excludes(slot, self.now)

    def hosts(self) -> set[str]:
        """Return the hosts with ranks of the job, or with room for them."""
        ranks = [rank.slot for rank in self.ranks.values()]
        return {slot.host for slot in [*self.slots.values(), *ranks]}

    def note_version(self, rank: Rank, version: float) -> None:
        """Note a rank's last commit, which never goes back."""
        if version > rank.version:
            if self.restarted and rank.version == m.FRESH:
                rank.version_at_join = version  # the checkpoint's: it has made no commit
            if version > rank.version_at_join:
                self.policy.forgive(rank.slot)
            rank.version, rank.synced = version, True
            self.newest = max(self.newest, math.floor(version))

    def note_commits(self) -> None:
        """Note the newest commit that all members hold."""
        common = min((rank.version for rank in self.members()), default=m.FRESH)
        if common >= self.version + 1 or (self.restarted and common != m.FRESH):
            self.version, self.restarted = math.floor(common), False

    def causes(self) -> tuple[m.AnyReason, ...]:
        """Return the different faults since the last reset."""
        causes = dict.fromkeys(self.reset_causes)
        # Where a rank was lost, the failed operations of others are its consequence.
        first = [each for each in causes if not isinstance(each, m.GenerationLeft)]
        return tuple(first or causes)

    def id(self, rank: Rank) -> m.RankId:
        """Return the identity of a rank in the newest plan."""
        number = self.plan.rank_of(rank.start) if self.plan else None
        return m.RankId(rank.start, number, rank.slot.worker)
