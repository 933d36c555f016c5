"""A stream of jobs that come and go on one cluster: the promises of sharing hold after each."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace

import pytest

from nbelastic.sharing import SharePolicy, SharingRules, SlotGroup, Want, shares

RULES = SharingRules(settle=2.0, protect=30.0, patience=60.0)
SLOTS = 12
TICK = 0.5
LONGEST = 40.0  # seconds that a job of the stream trains, at most


@dataclass
class Job:
    """A job, and what has become of it."""

    terms: Want
    seconds: float
    held: int = 0
    share: int | None = 0
    running: bool = False
    waiting_since: float | None = 0.0
    ends: float = math.inf
    changes: int = 0
    seen: int = 0

    @property
    def suspended(self) -> bool:
        terms = self.terms
        return terms.preemptible and self.share is not None and self.share < terms.least

    @property
    def has_its_floor(self) -> bool:
        return self.held >= self.terms.least

    def want(self) -> Want:
        floor = 1 if self.terms.preemptible else self.terms.least
        return replace(
            self.terms,
            kept=min(self.held, floor) if self.running else 0,
            has=self.held,
            running=self.running,
            waiting_since=self.waiting_since,
        )


class Cluster:
    """Jobs on slots that are alike; who gives slots up does so some ticks later, at a commit."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.policy = SharePolicy(RULES)
        self.jobs: list[Job] = []
        self.now = 0.0
        self.quiet_since = 0.0
        self.number = self.started = 0

    def arrive(self) -> None:
        chance, self.number = self.random, self.number + 1
        least = chance.choice((1, 1, 2, 3, 5, SLOTS if chance.random() < 0.1 else 4))
        terms = Want(
            f"job{self.number}",
            since=self.now,
            least=least,
            most=chance.choice((math.inf, least, least + 2)),
            priority=chance.choice((0, 0, 0, 1, 2)),
            weight=chance.choice((1.0, 1.0, 2.0)),
            preemptible=chance.random() < 0.2,
        )
        self.jobs.append(Job(terms, chance.random() * LONGEST, waiting_since=self.now))
        self._happened()

    def depart(self) -> None:
        over = [job for job in self.jobs if self.now >= job.ends and job.has_its_floor]
        if over:
            self.jobs = [job for job in self.jobs if job not in over]
            self._happened(len(over))

    def _happened(self, times: int = 1) -> None:
        self.quiet_since = self.now
        for job in self.jobs:
            job.seen += times

    def wait(self) -> None:
        """Let a tick pass."""
        self.now += TICK
        self.depart()
        self.act()

    def act(self) -> None:
        """Have shares decided, and jobs follow them."""
        wants = [job.want() for job in self.jobs]
        given = self.policy.decide(wants, [SlotGroup(SLOTS)], self.now)
        for job in self.jobs:
            self._follow(job, given[job.terms.job])
        self.check(wants)

    def _follow(self, job: Job, share: int | None) -> None:
        if share != job.share:
            job.share, job.changes = share, job.changes + 1
            self.quiet_since = self.now
        aim = min(SLOTS if share is None else share, job.terms.most)
        free = SLOTS - sum(each.held for each in self.jobs)
        if job.held > aim and self.random.random() < 0.7:
            job.held = int(aim)
        elif aim >= job.terms.least and job.held < aim and job.held + free >= job.terms.least:
            job.held = int(min(job.held + free, aim))
        was, job.running = job.running, job.running or job.has_its_floor
        if job.has_its_floor:
            job.waiting_since = None
        elif job.waiting_since is None:
            job.waiting_since = self.now
        if job.running and not was:
            self.started += 1
            job.ends = self.now + job.seconds
            self.check_door(job)

    def drain(self) -> None:
        """Let all jobs end."""
        limit = self.now + 1000.0
        while self.jobs and self.now < limit:
            self.wait()
        assert not self.jobs, f"starvation: {self.jobs}"
        assert self.started == self.number

    # -- promises ------------------------------------------------------------------------------

    def check(self, wants: list[Want]) -> None:
        assert sum(job.held for job in self.jobs) <= SLOTS
        for job in self.jobs:
            assert job.running or job.held == 0, f"gang: {job}"
            floor = 1 if job.terms.preemptible else job.terms.least
            assert not job.running or job.held >= floor, f"floor: {job}"
            assert not job.running or job.share is None or job.share >= floor, f"floor: {job}"
            assert job.changes <= job.seen + 1, f"quiet: {job}"
        settled = self.now - self.quiet_since > RULES.protect + RULES.settle + TICK
        if settled and len(self.jobs) > 1:
            aims = shares(wants, [SlotGroup(SLOTS)], self.now, RULES.patience)
            assert {job.terms.job: job.share for job in self.jobs} == aims, "fair"
            used = sum(job.held for job in self.jobs)
            wanting = [job for job in self.jobs if job.running and job.held < job.terms.most]
            assert used == SLOTS or not [j for j in wanting if not j.suspended], "work conserving"

    def check_door(self, job: Job) -> None:
        """No job starts before one that was submitted earlier and has waited for its patience."""
        for other in self.jobs:
            since = other.waiting_since
            admitted = other.running or other.share is None or other.share >= other.terms.least
            earlier = (
                other.terms.since < job.terms.since and not admitted and not other.terms.preemptible
            )
            if earlier and since is not None:
                assert self.now < since + RULES.patience + TICK, f"{job} starts before {other}"


def play(seed: int, jobs: int) -> Cluster:
    """Have so many jobs come and go; each must have had its turn."""
    cluster = Cluster(seed)
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
