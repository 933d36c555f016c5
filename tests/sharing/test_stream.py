"""A stream of jobs that come and go on one cluster: the promises of sharing hold after each."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import pytest

from nbelastic.sharing import SharePolicy, SharingRules, SlotGroup, Want, shares

RULES = SharingRules(settle=2.0, protect=30.0, patience=60.0)
SLOTS = 12
TICK = 0.5
LONGEST = 40.0
"""Seconds that a job of the stream trains, at most."""
FEWEST = 5
"""Slots that are never lost."""
TIMEOUT = 200.0
"""Seconds that a job waits for workers that it lacks."""


@dataclass
class Job:
    """A job, and what has become of it."""

    name: str
    since: float
    least: int
    most: float
    priority: int
    weight: float
    preemptible: bool
    seconds: float
    resumable: bool = False
    held: int = 0
    share: int | None = 0
    running: bool = False
    waiting_since: float | None = 0.0
    ends: float = math.inf
    changes: int = 0
    seen: int = 0
    short_since: float | None = None

    @property
    def suspended(self) -> bool:
        return self.preemptible and self.share is not None and self.share < self.least

    def want(self) -> Want:
        return Want(
            self.name,
            since=self.since,
            least=self.least,
            most=self.most,
            kept=min(self.held, 1 if self.preemptible else self.least) if self.running else 0,
            has=self.held,
            running=self.running,
            waiting_since=self.waiting_since,
            priority=self.priority,
            weight=self.weight,
            preemptible=self.preemptible,
            resumable=self.resumable,
        )


class Cluster:
    """Jobs on slots that are alike; who gives slots up does so some ticks later, at a commit.

    With `losses`, workers are lost, and come back or do not; a job that lacks them for too long
    fails. What is lost moves jobs behind others, so fewer promises hold then.
    """

    def __init__(self, seed: int, *, losses: bool = False) -> None:
        self.slots = SLOTS
        self.losses = self.changes = losses
        self.random = random.Random(seed)
        self.policy = SharePolicy(RULES)
        self.jobs: list[Job] = []
        self.now = 0.0
        self.quiet_since = 0.0
        self.number = self.started = self.failed = 0

    def arrive(self) -> None:
        chance, self.number = self.random, self.number + 1
        least = chance.choice((1, 1, 2, 3, 5, SLOTS if chance.random() < 0.1 else 4))
        self.jobs.append(
            Job(
                f"job{self.number}",
                since=self.now,
                least=least,
                most=chance.choice((math.inf, least, least + 2)),
                priority=chance.choice((0, 0, 0, 1, 2)),
                weight=chance.choice((1.0, 1.0, 2.0)),
                preemptible=chance.random() < (0.7 if self.losses else 0.2),
                resumable=self.losses and chance.random() < 0.7,
                seconds=chance.random() * LONGEST,
                waiting_since=self.now,
            )
        )
        self._happened()

    def depart(self) -> None:
        late = [job for job in self.jobs if self.losses and self._is_late(job)]
        over = [job for job in self.jobs if self.now >= job.ends and job.held >= job.least]
        self.failed += sum(not job.running for job in late)
        if late or over:
            self.jobs = [job for job in self.jobs if job not in late and job not in over]
            self._happened(len(over))

    def _is_late(self, job: Job) -> bool:
        """Return whether a job's time is over; it stands still while the job is suspended."""
        waits = job.suspended and job.running and (job.share != 0 or job.resumable)
        if job.held >= job.least or (waits and self.slots >= job.least):
            job.short_since = None
            return False
        if job.short_since is None:
            job.short_since = self.now
        return self.now >= job.short_since + TIMEOUT

    def lose(self, number: int) -> None:
        for _ in range(min(number, self.slots - FEWEST)):
            holders = [job for job in self.jobs for _ in range(job.held)]
            which = self.random.randrange(self.slots)
            self.slots -= 1
            if which < len(holders):
                holders[which].held -= 1

    def _happened(self, times: int = 1) -> None:
        self.quiet_since = self.now
        for job in self.jobs:
            job.seen += times

    def wait(self) -> None:
        """Let a tick pass."""
        if self.changes and self.random.random() < 0.02:
            self.lose(self.random.randint(1, SLOTS))
        elif self.changes and self.random.random() < 0.02:
            self.slots = SLOTS
        self.now += TICK
        self.depart()
        self.act()

    def act(self) -> None:
        """Have shares decided, and jobs follow them."""
        wants = [job.want() for job in self.jobs]
        given = self.policy.decide(wants, [SlotGroup(self.slots)], self.now)
        for job in self.jobs:
            self._follow(job, given[job.name])
        self.check(wants)

    def _follow(self, job: Job, share: int | None) -> None:
        if share != job.share:
            job.share, job.changes = share, job.changes + 1
            self.quiet_since = self.now
        aim = min(self.slots if share is None else share, job.most)
        free = self.slots - sum(each.held for each in self.jobs)
        if job.held > aim and self.random.random() < 0.7:
            job.held = int(aim) if aim or job.resumable else 1  # its state is nowhere else
        elif aim >= job.least and job.held < aim and job.held + free >= job.least:
            job.held = int(min(job.held + free, aim))
        was, job.running = job.running, job.running or job.held >= job.least
        if job.held >= job.least:
            job.waiting_since = None
        elif job.waiting_since is None:
            job.waiting_since = self.now
        if job.running and not was:
            self.started += 1
            job.ends = self.now + job.seconds
            self.check_door(job)

    def drain(self) -> None:
        """Let all jobs end."""
        if self.losses:
            self.lose(SLOTS)
        self.changes = False
        limit = self.now + 1000.0
        while self.jobs and self.now < limit:
            self.wait()
        assert not self.jobs, f"starvation: {self.jobs}"
        assert self.started == self.number - self.failed

    # -- promises ------------------------------------------------------------------------------

    def check(self, wants: list[Want]) -> None:
        assert sum(job.held for job in self.jobs) <= self.slots
        for job in self.jobs:
            assert job.running or job.held == 0, f"gang: {job}"
            if self.losses:
                continue
            floor = 1 if job.preemptible else job.least
            assert not job.running or job.held >= floor, f"floor: {job}"
            assert not job.running or job.share is None or job.share >= floor, f"floor: {job}"
            assert job.changes <= job.seen + 1, f"quiet: {job}"
        settled = self.now - self.quiet_since > RULES.protect + RULES.settle + TICK
        if settled and len(self.jobs) > 1 and not self.losses:
            aims = shares(wants, [SlotGroup(SLOTS)], self.now, RULES.patience)
            assert {job.name: job.share for job in self.jobs} == aims, "fair"
            used = sum(job.held for job in self.jobs)
            wanting = [job for job in self.jobs if job.running and job.held < job.most]
            assert used == SLOTS or not [j for j in wanting if not j.suspended], "work conserving"

    def check_door(self, job: Job) -> None:
        """No job starts before one that was submitted earlier and has waited for its patience."""
        for other in self.jobs:
            since = other.waiting_since
            admitted = other.running or other.share is None or other.share >= other.least
            earlier = other.since < job.since and not admitted and not other.preemptible
            earlier &= not self.losses
            if earlier and since is not None:
                assert self.now < since + RULES.patience + TICK, f"{job} starts before {other}"


def play(seed: int, jobs: int, *, losses: bool = False) -> Cluster:
    """Have so many jobs come and go; each must have had its turn."""
    cluster = Cluster(seed, losses=losses)
    chance = cluster.random
    while cluster.number < jobs:
        for _ in range(chance.choice((1, 1, 2, 3))):
            cluster.arrive()
            cluster.act()
        pause = chance.choice((0.5, 2.0, 5.0, 40.0, 100.0))
        end = cluster.now + (pause if len(cluster.jobs) < 8 else max(pause, LONGEST))
        while cluster.now < end:
            cluster.wait()
    cluster.drain()
    return cluster


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_promises_hold_after_each_arrival_and_departure(seed: int) -> None:
    play(seed, 1000)


@pytest.mark.slow
def test_no_job_waits_for_ever_when_workers_are_lost() -> None:
    """Not even suspended jobs, whose time stands still."""
    for seed in range(20):
        play(seed, 25, losses=True)
