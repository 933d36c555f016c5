"""State that the members of a generation share: they train in lockstep."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from nbelastic.messages import Plan

if TYPE_CHECKING:
    from .ranks import FakeRank
    from .world import World

CONNECT = 0.005
NEIGHBOUR_NOTICES = 0.015


class Ring:
    """The members of a generation, connected. If one is lost, only its two neighbours notice."""

    def __init__(self, world: World, plan: Plan) -> None:
        self.world, self.plan = world, plan
        self.starts = [member.start for member in plan.members]
        self.joined: set[int] = set()
        self.connected = self.broken = self.stalled = False

    @property
    def stuck(self) -> bool:
        return self.broken or self.stalled

    def members(self) -> list[FakeRank]:
        return [self.world.ranks[start] for start in self.starts]

    def join(self, rank: FakeRank) -> None:
        self.joined.add(rank.start)
        if len(self.joined) == len(self.starts):
            self.world.later(CONNECT, self.connect)

    def complete(self, where: str) -> bool:
        """Whether all members are there and take part."""
        generation = self.plan.generation
        there = [r for r in self.members() if r.where == where and r.generation == generation]
        self.stalled = len(there) == len(self.starts) and any(rank.busy for rank in there)
        return not self.stuck and len(there) == len(self.starts)

    def go_on(self) -> None:
        """Take up again what a member had held up."""
        if self.stalled:
            self.world.later(0.0, self.step if self.connected else self.connect)

    def connect(self) -> None:
        if self.connected or not self.complete("forming"):
            return
        self.connected = True
        self.synchronize()
        for rank in self.members():
            rank.formed()
        self.world.later(self.world.script.step, self.step)

    def synchronize(self) -> None:
        """Bring those behind to the newest state; afterwards all must have the same."""
        if self.plan.loop == 0:
            return
        ranks = self.members()
        source = ranks[self.plan.source]
        for number, rank in enumerate(ranks):
            if number in self.plan.behind:
                rank.saved = source.saved
            rank.version, rank.batch = max(math.ceil(self.plan.version), 0), rank.saved
        states = {(rank.loop, rank.version, rank.saved) for rank in ranks}
        assert len(states) == 1 or not self.world.honest, f"after a reset, ranks differ: {states}"

    def step(self) -> None:
        """Complete a step, if all take part."""
        if not self.complete("training"):
            return
        ranks, loop = self.members(), self.plan.loop
        if loop and ranks[0].batch >= self.world.script.batches:
            for rank in ranks:
                rank.park()
            return
        for rank in ranks:
            rank.advance()
        batch = ranks[0].batch
        self.world.trail.append((batch, self.plan.generation))
        agreed = any(rank.leaving or rank.noticed >= self.plan.generation for rank in ranks)
        if loop == 0:
            if batch >= self.world.script.before:
                self.finish_before(ranks)
        elif agreed and batch % self.world.script.commit_every == 0:
            for rank in ranks:
                rank.leave()
        self.world.later(self.world.script.step, self.step)
        for action in self.world.milestones.pop(batch, []):
            action()

    def finish_before(self, ranks: list[FakeRank]) -> None:
        for rank in ranks:
            rank.where = "outside"
            rank.enter()

    def lose(self, rank: FakeRank, abruptly: bool) -> None:
        """Have a member be lost in the middle of a step: some have done it, some have not.

        Of a process that ends abruptly the system tells those on its host.
        """
        if self.broken or rank.start not in self.starts:
            return
        self.broken = True
        for other in self.members() if self.connected and self.plan.loop else []:
            here = other.where == "training" and other.generation == self.plan.generation
            if here and self.world.random.random() < 0.3:
                other.advance()
        place, size = self.starts.index(rank.start), len(self.starts)
        for step in (-1, 1):
            other = self.world.ranks.get(self.starts[(place + step) % size])
            if other is None:  # a forged message had said that it was ready
                continue
            told = abruptly and other.worker.slot.host == rank.worker.slot.host
            gone = (rank.start,) if told else ()
            self.world.on(
                other.worker, NEIGHBOUR_NOTICES, lambda o=other, g=gone: self.notice(o, g)
            )

    def notice(self, rank: FakeRank, gone: tuple[int, ...] = ()) -> None:
        if rank.generation == self.plan.generation:
            rank.gone = gone
            rank.collective_failed()
