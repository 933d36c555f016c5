"""Share the slots of a cluster among its jobs.

A *free* slot is *reserved* for one job, by the arbiter; a claim makes it *held*, until the plugin
sees the end of the rank's task. The slot of a rank that was asked to end is *vacating*: it counts,
but is no job's. That of a frozen worker, or of a rank that has outlived its job, does not count.
Between a decision and the driver's step, a job acts by its former share; so each claim is checked
against the newest decision, and a refused slot is offered again. A job without a kernel, or whose
driver is silent, keeps what it has and gets no more. A job is *admitted* once it has held its
floor: until then all its slots can be taken back.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

import dask.config
from dask.utils import parse_timedelta
from distributed import Scheduler
from distributed.scheduler import WorkerState

from nbelastic import messages as m
from nbelastic.errors import OptionError
from nbelastic.membership import Phase, Stage, rules
from nbelastic.sharing import (
    Assignment,
    SharedSlot,
    SharePolicy,
    SharingRules,
    SlotGroup,
    Want,
    assign,
)

from .job import ScheduledJob
from .records import WorkerRecord

logger = logging.getLogger(__name__)

SILENCE = 10.0  # seconds without a step of its driver after which a job gets no more slots
MOST_NAMES = 3  # jobs that a share names; of the others it has the number


def read_rules() -> SharingRules:
    """Return the rules in Dask's configuration of this process; raise OptionError for odd ones."""
    values = {**asdict(SharingRules()), **(dask.config.get("nbelastic.sharing", None) or {})}
    policy = values["policy"]
    if policy not in ("fair", "first"):
        raise OptionError(f"nbelastic.sharing.policy={policy!r}: must be 'fair' or 'first'")
    times = [_seconds(name, values[name]) for name in ("settle", "protect", "patience")]
    return SharingRules(policy, *times)


def _seconds(name: str, value: Any) -> float:
    try:
        seconds = float(parse_timedelta(value, default="seconds"))
    except (ValueError, KeyError, TypeError, IndexError, OverflowError):
        seconds = math.nan
    if not seconds >= 0:
        raise OptionError(
            f"nbelastic.sharing.{name}={value!r}: must be a duration, such as '2 s' or '5 minutes'"
        )
    return seconds


@dataclass
class _Entry:
    """What the arbiter remembers of a job."""

    stepped_at: float
    driver: tuple[int, int] = (0, 0)  # its epoch and newest step, seen at `stepped_at`
    admitted: bool = False
    waiting_since: float | None = None
    sent: m.ShareSet = field(default_factory=lambda: m.ShareSet(None))
    offered: set[str] = field(default_factory=set)


class Arbiter:
    """Decides how many slots each job may have, and which; gives them, and takes them back."""

    def __init__(
        self,
        scheduler: Scheduler,
        jobs: dict[str, ScheduledJob],
        workers: dict[str, WorkerRecord],
    ) -> None:
        self.scheduler, self.jobs, self.workers = scheduler, jobs, workers  # by name, by address
        self._policy: SharePolicy | None = None
        self._entries: dict[str, _Entry] = {}
        self.reserved: dict[str, str] = {}  # jobs by slot
        self._next: asyncio.Handle | None = None

    def open(self) -> None:
        """Read the rules, before the first job; raise the errors of :func:`read_rules`."""
        if not self.jobs or self._policy is None:
            self._policy = SharePolicy(read_rules())
            self._entries.clear()
            self.reserved.clear()

    def stop(self) -> None:
        """Decide nothing any more."""
        if self._next is not None:
            self._next.cancel()
            self._next = None

    def schedule(self) -> None:
        """Decide anew in the next turn of the event loop: something has changed."""
        if self._next is None:
            self._next = asyncio.get_running_loop().call_soon(self.decide)

    # -- claims and offers -----------------------------------------------------------------------

    def offers(self, job: ScheduledJob, worker: WorkerRecord) -> bool:
        """Return whether a free slot is for a job."""
        return self._share(job) is None or self.reserved.get(worker.slot.id) == job.name

    def has_its_share(self, job: ScheduledJob) -> bool:
        """Return whether a job has all slots of its share."""
        share = self._share(job)
        return share is not None and len(_staying(job)) >= share

    def announce(self, job: ScheduledJob, hosts: Iterable[WorkerRecord]) -> None:
        """Announce usable free slots to a job's driver."""
        if job.client is None or job.opening:
            return
        there = self.scheduler.workers
        offered = (each for each in hosts if self.offers(job, each))
        known = ((each, there.get(each.address)) for each in offered)
        found = [each.slot for each, at in known if at and job.obstacle(at, each) is None]
        if found:
            job.take_in(m.SlotsFound(tuple(found)))

    def claim(self, job: ScheduledJob, effect: m.StartRank) -> m.Event | None:
        """Claim a slot for a rank; return the event of its refusal, or None."""
        slot, host = effect.slot.id, self.at(effect.slot)
        if host is None:
            return m.SlotGone(slot)
        if host.holder is not None or host.leaving or job.client is None:
            return m.SlotBusy(slot)  # only a kernel can start a rank on it
        share = self._share(job)
        if share is not None:
            if self.reserved.get(slot, job.name) != job.name or len(_staying(job)) >= share:
                logger.info("job %r: %s is beyond its share by now", job.name, host.address)
                self._entries[job.name].offered.discard(slot)
                self.schedule()
                return m.SlotBusy(slot)
            self.reserved.pop(slot, None)
        host.holder, host.has_beaten, host.silence = (job.name, effect.start), False, 0.0
        job.ranks[effect.start] = host
        job.places[effect.start] = effect.place
        self.grant(job, effect.start)
        return None

    def at(self, slot: m.Slot) -> WorkerRecord | None:
        """Return the worker of a slot, if still there."""
        host = self.workers.get(slot.worker)
        return host if host is not None and host.slot.id == slot.id else None

    def grant(self, job: ScheduledJob, start: int) -> None:
        """Make the driver start a rank on a granted slot."""
        job.send(m.SlotGranted(start, job.ranks[start].slot, job.places[start]))

    def free(self, name: str, start: int, host: WorkerRecord | None) -> None:
        """Take a slot back from a rank, and offer it to the job of its reservation, or to all."""
        job = self.jobs.get(name)
        if job is not None:
            job.ranks.pop(start, None)
            job.beats.pop(start, None)
            job.places.pop(start, None)
        if host is not None:
            if host.holder == (name, start):
                logger.info("job %r: start %d holds %s no more", name, start, host.address)
                host.holder, host.frozen = None, False  # if it falls silent again, that is news
            for each in self.jobs.values():
                self.announce(each, [host])
        self.schedule()

    def _share(self, job: ScheduledJob) -> int | None:
        entry = self._entries.get(job.name)
        sharing = None if entry is None else entry.sent.sharing
        return None if sharing is None else sharing.share

    # -- decisions -------------------------------------------------------------------------------

    def decide(self) -> None:
        """Decide on shares, tell the jobs, and offer their reserved slots."""
        self.stop()
        policy = self._policy
        if policy is None or policy.rules.policy == "first":
            return
        jobs = {
            name: record
            for name, record in self.jobs.items()
            if not (record.opening or record.closing or record.machine.roster.ended)
        }
        now = asyncio.get_running_loop().time()
        self._entries = {name: self._entries.get(name) or _Entry(now) for name in jobs}
        wants = [self._want(job, now) for job in jobs.values()]
        slots = self._slots(jobs) if len(jobs) > 1 else []
        groups = Counter((slot.host, slot.jobs) for slot in slots)
        capacity = [SlotGroup(size, host, able) for (host, able), size in groups.items()]
        given = policy.decide(wants, capacity, now)
        shares = {job: share for job, share in given.items() if share is not None}
        wants.sort(key=lambda want: (not want.running, -want.priority, want.since))
        found = assign(wants, shares, slots) if shares and len(jobs) > 1 else Assignment()
        self.reserved = found.reserved
        kept = 0  # by suspended jobs that come before
        for want in wants:
            name, job, sharing = want.job, jobs[want.job], None
            if name in shares:
                others = [each.job for each in wants if each.job != name]
                usable = sum(slot.jobs is None or name in slot.jobs for slot in slots)
                names = tuple(others[:MOST_NAMES])
                sharing = m.Sharing(shares[name], usable - kept, names, len(others))
            kept += want.kept if want.preemptible and want.has < want.least else 0
            self._tell(job, sharing, tuple(found.reclaimed.get(name, ())))
            if sharing is not None:
                self._offer(job)

    def _want(self, job: ScheduledJob, now: float) -> Want:
        roster, entry = job.machine.roster, self._entries[job.name]
        limits, held = roster.limits, len(_staying(job))
        if entry.driver != (job.epoch, job.steps):
            entry.driver, entry.stepped_at = (job.epoch, job.steps), now
        silent = now > entry.stepped_at + SILENCE
        fixed = job.client is None or silent or not rules.can_start(roster)
        entry.admitted |= held >= limits.min_np
        running = entry.admitted or roster.plan is not None
        if held >= limits.min_np:
            entry.waiting_since = None
        elif entry.waiting_since is None:
            entry.waiting_since = now
        soft = limits.preemptible and not fixed
        kept = min(held, 1 if soft else limits.min_np) if running else 0
        most = math.inf if limits.max_np is None else limits.max_np
        return Want(
            job.name,
            since=job.started,
            least=min(limits.min_np, held) if fixed else limits.min_np,
            most=held if fixed else most,
            kept=held if roster.phase == Phase.FINISHING else kept,
            has=held,
            running=running,
            waiting_since=entry.waiting_since,
            priority=limits.priority,
            weight=limits.weight,
            preemptible=soft,
            per_host=limits.slots_per_host,
        )

    def _slots(self, jobs: dict[str, ScheduledJob]) -> list[SharedSlot]:
        """Return all slots, the held ones first, by the age of their ranks."""
        staying = {
            slot: (start, name)
            for name, job in jobs.items()
            for start, slot in _staying(job).items()
        }
        hosts_matter = any(job.machine.roster.limits.slots_per_host for job in jobs.values())
        everyone = frozenset(jobs)
        found = []
        for address, worker in self.workers.items():
            slot, state = worker.slot.id, self.scheduler.workers.get(address)
            start, holder = staying.get(slot, (0, None))
            # A slot is lost whose worker is frozen, or whose rank has outlived its job.
            gone = worker.holder is not None and worker.holder[0] not in self.jobs
            if state is None or worker.leaving or worker.frozen or gone:
                continue
            able = {name for name, job in jobs.items() if _usable(job, worker, state)}
            able |= set() if holder is None else {holder}
            if able:
                host = worker.slot.host if hosts_matter else ""
                usable = None if able == everyone else frozenset(able)
                free = worker.holder is None
                found.append((holder is None, start, SharedSlot(slot, host, usable, holder, free)))
        found.sort(key=lambda each: each[:2])
        return [slot for _, _, slot in found]

    def _tell(
        self, job: ScheduledJob, sharing: m.Sharing | None, reclaimed: tuple[str, ...]
    ) -> None:
        """Send a job its share, if new to the job."""
        entry, name = self._entries[job.name], job.name
        if entry.sent.sharing == sharing and set(reclaimed) <= set(entry.sent.reclaimed):
            return
        entry.sent = m.ShareSet(sharing, reclaimed)
        entry.offered.clear()
        job.take_in(entry.sent)
        if sharing is None:
            logger.info("job %r: no bound any more, the cluster is its own", name)
            self.announce(job, self.workers.values())
            return
        logger.info(
            "job %r: share %d of %d slots with %d other jobs; it holds %d and gives %d back",
            *(name, sharing.share, sharing.slots, sharing.number),
            *(len(_staying(job)), len(reclaimed)),
        )

    def _offer(self, job: ScheduledJob) -> None:
        entry = self._entries[job.name]
        mine = {slot for slot, owner in self.reserved.items() if owner == job.name}
        new = mine - entry.offered
        entry.offered = mine
        if new:
            self.announce(job, [each for each in self.workers.values() if each.slot.id in new])


def _staying(job: ScheduledJob) -> dict[int, str]:
    """Return the slots of a job's ranks that were not asked to end, by their starts."""
    ranks = job.machine.roster.ranks
    return {
        start: host.slot.id
        for start, host in job.ranks.items()
        if start in ranks and not ranks[start].leaving and ranks[start].stage != Stage.ENDING
    }


def _usable(job: ScheduledJob, worker: WorkerRecord, state: WorkerState) -> bool:
    """Return whether a job can use a worker, and has not given it up."""
    roster, slot = job.machine.roster, worker.slot
    given_up = slot.id in roster.departing or roster.excluded(slot)
    return not given_up and job.misfit(state) is None and not job.differing(worker)
