"""Simulated ranks, which report and obey as real ones do, and train in lockstep."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nbelastic import messages as ev

if TYPE_CHECKING:
    from .world import Worker, World


CONNECT = 0.005
NEIGHBOUR_NOTICES = 0.015
NOTICED = 0.003  # seconds until a worker knows that its rank's process has ended

KILLED_AFTER = {"evict": 4.0}
"""Seconds after which a worker kills a rank that does not end; eight for other orders."""


@dataclass
class Script:
    """The user's function: `before` steps with collectives, then loops of `batches` each.

    With a chance of `ahead`, a rank whose collective fails holds something newer than its commit.
    """

    setup: float = 0.2
    step: float = 0.05
    before: int = 0
    loops: int = 1
    batches: int = 30
    commit_every: int = 1
    after: float = 0.01
    ahead: float = 0.0


class FakeRank:
    """One start of the function, a process of its own.

    `where` it is: setup, waiting, forming, training, parked, outside (a generation, in user code)
    or ended. A rank that is `hung` ends when it is told to; one that is `deaf` is killed by its
    worker; one that is `stuck` in the kernel cannot be.
    """

    def __init__(self, world: World, start: int, worker: Worker, place: ev.Place) -> None:
        self.world, self.start, self.worker, self.place = world, start, worker, place
        self.where = "setup"
        self.loop = self.steps = self.batch = self.saved = 0
        self.version: float = ev.FRESH
        self.generation = self.heard = self.aborted = self.released = self.noticed = 0
        self.reported = -1
        self.plan: ev.Plan | None = None
        self.leaving = self.hung = self.deaf = self.stuck = False
        self.gone: tuple[int, ...] = ()
        world.on(worker, world.script.setup, self.enter)

    @property
    def member(self) -> bool:
        return self.where in ("forming", "training", "parked")

    @property
    def busy(self) -> bool:
        """Whether it does not take part in the next step."""
        return self.worker.frozen or self.hung

    @property
    def ring(self) -> Ring:
        return self.world.rings[self.generation]

    def beat(self) -> ev.Beat:
        waits = self.where == "parked" or (self.where == "training" and self.ring.stuck)
        waiting = waits and not self.hung
        progress = self.generation * 1000 + self.steps
        return ev.Beat(self.start, self.generation, progress, waiting, math.floor(self.version))

    # -- the function --------------------------------------------------------------------------

    def enter(self) -> None:
        """Come out of user code, to the first collective, the next loop, or the end."""
        if self.worker.busy:
            self.worker.postponed.append(self.enter)
            return
        script = self.world.script
        if self.where not in ("setup", "outside") or self.hung:
            return
        if self.where == "setup" and script.before:
            self.await_plan()
        elif self.loop < script.loops:
            self.loop += 1
            self.batch = self.saved = 0
            self.await_plan()
        else:
            self.end(ev.RankReturned(self.start))

    def await_plan(self, *, failed: bool = False, own: str = "") -> None:
        self.where, self.plan, self.reported = "waiting", None, -1
        self.failed, self.own = failed, own
        if not failed:
            self.gone = ()
        if self.leaving:
            self.end(ev.RankLeft(self.start))
        else:
            self.report_ready()

    def report_ready(self) -> None:
        self.reported = self.heard
        store = (self.worker.slot.host, self.start)
        self.world.send(
            self.worker,
            ev.RankReady(
                self.start,
                self.heard,
                self.version,
                self.loop,
                store,
                self.failed,
                self.own,
                gone=self.gone,
                own=bool(self.own),
            ),
        )

    def formed(self) -> None:
        self.where = "training"
        self.steps += 1
        self.world.send(self.worker, ev.RankFormed(self.start, self.generation))

    def advance(self) -> None:
        """Train a batch, and commit if it is time to."""
        script = self.world.script
        self.steps += 1
        self.batch += 1
        if self.loop and self.batch % script.commit_every == 0:
            self.version, self.saved = self.version + 1, self.batch

    def leave(self) -> None:
        """Leave the generation where all have agreed to."""
        self.version, self.saved = self.version + 1, self.batch
        self.await_plan()

    def park(self) -> None:
        self.where = "parked"
        self.world.send(self.worker, ev.LoopDone(self.start, self.generation, self.version))
        self.go_out()

    def go_out(self) -> None:
        """Go on after the loop, once all have come to its end."""
        if self.where == "parked" and self.released >= self.generation:
            self.where = "outside"
            self.world.on(self.worker, self.world.script.after, self.enter)

    def collective_failed(self) -> None:
        if not self.member or self.hung:
            return
        if self.loop == 0:
            self.end(ev.RankRaised(self.start, "a collective failed", collective=True))
        else:
            if self.version > 0 and self.version % 1 == 0 and self._is_ahead():
                self.saved += 1
                self.version += 0.5
            self.batch = self.saved
            self.await_plan(failed=True)

    def give_up(self, cause: str) -> None:
        """Have user code raise what makes the ranks go back to their last commit."""
        self.batch = self.saved
        self.await_plan(failed=True, own=cause)

    def _is_ahead(self) -> bool:
        ahead = self.world.script.ahead
        return ahead > 0 and self.batch > self.saved and self.world.random.random() < ahead

    def raise_error(self, error: str = "ValueError: bad", *, collective: bool = False) -> None:
        """Have user code raise."""
        if self.where != "ended" and self.worker.alive:
            self.end(ev.RankRaised(self.start, error, collective, self.version))

    def recover(self) -> None:
        """Come back from where it hangs."""
        self.hung = False
        if self.member and self.aborted >= self.generation:
            self.collective_failed()
        elif self.member:
            self.ring.go_on()
        else:
            self.enter()

    def die(self, *, abruptly: bool = True) -> None:
        member, self.where = self.member, "ended"
        if member:
            self.ring.lose(self, abruptly)

    def crash(self, detail: str) -> None:
        """Have the process end without a word; its worker says so."""
        if self.where != "ended":
            self.die()
            self.world.on(self.worker, NOTICED, lambda: self._died(detail))

    def _died(self, detail: str) -> None:
        self.world.send(self.worker, ev.RankDied(self.start, detail, math.floor(self.version)))
        self.world.freed(self.worker, self.start)

    def end(self, event: ev.RankRaised | ev.RankLeft | ev.RankReturned) -> None:
        if self.where == "ended":
            return
        self.die(abruptly=False)
        self.world.send(self.worker, event)
        self.world.freed(self.worker, self.start)

    # -- orders --------------------------------------------------------------------------------

    def on_plan(self, plan: ev.Plan) -> None:
        if plan.generation <= self.heard:
            return
        self.heard = plan.generation
        if self.where == "waiting":
            self.plan, self.generation, self.where = plan, plan.generation, "forming"
            self.ring.join(self)

    def on_abort(self, generation: int) -> None:
        self.heard = max(self.heard, generation)
        self.aborted = max(self.aborted, generation)
        if self.member and self.generation <= generation:
            self.collective_failed()
        elif self.where == "waiting" and self.heard != self.reported:
            self.report_ready()

    def on_notify(self, generation: int) -> None:
        self.noticed = max(self.noticed, generation)

    def on_release(self, generation: int) -> None:
        self.released = max(self.released, generation)
        self.go_out()

    def on_end(self, how: str) -> None:
        if self.where == "ended":
            return
        if self.deaf:
            if how != "leave" and not self.stuck:
                self.world.on(self.worker, KILLED_AFTER.get(how, 8.0), lambda: self.crash("killed"))
            return
        self.leaving = self.leaving or how == "leave"
        if how != "leave" or not (self.member or self.where == "outside"):
            self.end(ev.RankLeft(self.start))


class Ring:
    """The members of a generation, connected. If one is lost, only its two neighbours notice."""

    def __init__(self, world: World, plan: ev.Plan) -> None:
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
