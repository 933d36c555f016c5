"""What users run: training functions of all kinds, which watch themselves.

They check what a user relies on: after a change of membership all ranks have the same state, and
it is that of a commit which the source of the plan has reported; every step is done exactly once
in the history that counts, every sample once in each epoch; all ranks of a collective are in the
same generation and step.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from nbelastic.collectives import Op
from nbelastic.elastic import ObjectState, run
from nbelastic.elastic.ranks.context import current
from nbelastic.elastic.ranks.runtime import Interrupt
from nbelastic.elastic.sampler import ShardSampler
from nbelastic.errors import CollectiveError
from nbelastic.messages import FRESH

from .invariants import watch_early, watch_hang

if TYPE_CHECKING:
    from nbelastic.elastic.ranks.session import Session

    from .loop import Fiber, Hub
    from .schedule import Script
    from .world import World

_stage: list[World] = []
"""The world that is being simulated: functions travel by name, so they find it here."""


class Trouble(Exception):
    """Raised by user code."""


class SimInterrupt(Interrupt):
    """The way to interrupt a fiber: where it computes, and nowhere else."""

    def __init__(self, hub: Hub) -> None:
        self.fiber: Fiber = hub.current
        self.exposed = False
        self._reachable = False
        self._wanted: type[BaseException] | None = None

    def reachable(self) -> SimInterrupt:
        return self

    def __enter__(self) -> None:
        self._reachable = True

    def __exit__(self, *_: object) -> None:
        self._reachable = False
        self.fiber.unthrow()

    def request(self, kind: type[BaseException]) -> None:
        self._wanted = kind
        self.nudge()

    def drop(self) -> None:
        self._wanted = None
        self.fiber.unthrow()

    def nudge(self) -> None:
        if self._wanted is not None and self._reachable and self.exposed:
            kind, self._wanted = self._wanted, None
            self.fiber.throw(kind)

    def check(self) -> None:
        """Be interrupted here, if that is wanted."""
        if self._wanted is not None and self._reachable:
            kind, self._wanted = self._wanted, None
            raise kind


class Actor:
    """One run of the user's function."""

    def __init__(self, world: World) -> None:
        self.world, self.hub, self.script = world, world.hub, world.script
        self.session: Session = current()  # type: ignore[assignment]
        self.start = self.session.spec.start
        self.saved: tuple[Any, ...] | None = None
        self.fiber = self.hub.current
        self.loop = 0
        self.hanging = False
        world.actors[self.start] = self

    def say(self, what: str) -> None:
        if self.hub.trace is not None:
            self.hub.say(self.fiber.process.name, f"start {self.start}: {what}")

    def compute(self, seconds: float, *, deaf: bool = False) -> None:
        """Compute for a while; interruptible unless it sits in some C code."""
        interrupt: SimInterrupt = self.session._interrupt  # type: ignore[assignment]
        if not deaf:
            interrupt.check()
        interrupt.exposed = not deaf
        try:
            self.fiber.sleep(seconds * self.world.slowness(self.fiber.process))
        finally:
            interrupt.exposed = False
        if not deaf:
            interrupt.check()

    def stumble(self, step: int) -> bool:
        """Do what the script says goes wrong here; return whether to return early."""
        for mishap in self.script.mishaps:
            here = mishap.step == step and mishap.rank in (None, self.session.rank)
            if here and mishap.times > 0:
                mishap.times -= 1
                self.say(f"{mishap.kind} at step {step}")
                if mishap.kind == "raise":
                    raise Trouble(f"at step {step}")
                if mishap.kind == "collective":
                    raise CollectiveError("the user's own")
                if mishap.kind == "return":
                    watch_early(self.world, self.start, self.session.generation)
                    return True
                self.hanging = True
                watch_hang(self.world, self.start)
                self.compute(1e6, deaf=mishap.kind == "deaf")
        return False

    # -- checks -------------------------------------------------------------------------------

    def require(self, condition: object, message: str) -> None:
        self.hub.require(
            condition or not self.fiber.process.alive, f"start {self.start}: {message}"
        )

    def entered(self, state: Any) -> None:
        """A generation begins: the state must be that of a commit which the source has reported."""
        session, plan = self.session, self.session.plan
        self.say(f"enters generation {plan.generation} as rank {session.rank} at step {state.step}")
        self.require(session.version == max(plan.version, 0), "has another version than the plan")
        here = (state.step, state.value, state.counts)
        others = self.world.beginnings.setdefault(plan.generation, here)
        self.require(others == here, f"begins at {here}, others of the generation at {others}")
        source = plan.members[plan.source]
        if source.version != FRESH:
            known = self.world.ledger.get((source.start, plan.loop, source.version))
            self.require(known == here, f"begins at {here}, the source's commit was {known}")

    def reported(self, version: int) -> None:
        """It has told its driver of a version: what belongs to it must never change."""
        if version >= 0 and self.saved is not None:
            key = (self.start, self.loop, version)
            known = self.world.ledger.setdefault(key, self.saved)
            self.require(known == self.saved, f"commit {version} was {known}, is {self.saved}")

    def exchange(self, state: Any, more: tuple[int, ...] = ()) -> tuple[int, ...]:
        """One step's collective; what comes out must come from this generation's ranks, all in
        the same step. Returns the sum of what each rank has brought `more`."""
        import torch

        session = self.session
        communicator = session.communicator()  # where there is no loop, this makes it a member
        flag = session.change_flag() if self.script.rides else False
        sent = [1.0, state.step, session.generation, session.rank + 1, flag, *more]
        tensor = torch.tensor(sent, dtype=torch.float64)
        communicator.allreduce(tensor, Op.SUM)
        count, step, generation, ranks, flags, *total = tensor.tolist()
        size = session.size
        self.require(
            (count, step, generation, ranks)
            == (size, size * state.step, size * session.generation, size * (size + 1) / 2),
            f"a collective of generation {session.generation} gave {tensor.tolist()}",
        )
        if self.script.rides:
            session.agree(flags > 0)
        state.value = (state.value * 31 + size) % 1_000_003
        return tuple(int(each) for each in total)

    def check_counts(self, counts: tuple[int, ...]) -> None:
        """At the end of an epoch: each sample was used once, but for what fills up shares."""
        samples = self.script.samples
        used, proper = counts[:samples], counts[samples:]
        self.require(min(used) >= 1, f"samples were left out: {used}")
        self.require(max(proper) <= 1, f"samples were used again: {proper}")


class WatchedState(ObjectState):
    """A state that tells its actor what it saves."""

    def save(self) -> None:
        super().save()
        actor = self.__dict__.get("_actor")
        if actor is not None:
            actor.saved = (self.step, self.value, self.counts)

    def watched(self, actor: Actor) -> WatchedState:
        self._actor = actor
        self.save()
        return self


def train() -> Any:
    """Train: the function that is sent to the workers."""
    actor = Actor(_stage[-1])
    script = actor.script
    actor.compute(script.setup)
    if actor.stumble(-1):
        return "early"
    if not script.elastic:
        return _plain(actor)
    result = None
    for loop in range(1, script.loops + 1):
        actor.loop = loop
        state = _state(script).watched(actor)
        result = _train_epochs(state, actor) if script.samples else _train(state, actor)
    actor.compute(script.after)
    return result


def _state(script: Script) -> WatchedState:
    more: dict[str, Any] = {}
    if script.samples:
        more = {"epoch": 0, "sampler": ShardSampler(range(script.samples), seed=script.seed)}
    return WatchedState(step=0, value=0, trail=(), counts=(0,) * 2 * script.samples, **more)


def _plain(actor: Actor) -> Any:
    """A function without an elastic loop: a member from its first collective on."""
    state = _state(actor.script)
    for step in range(actor.script.steps):
        actor.compute(actor.script.step_time)
        if actor.stumble(step):
            return "early"
        actor.exchange(state)
        state.step += 1
    return (state.step, state.value)


@run
def _train(state: Any, actor: Actor) -> Any:
    script = actor.script
    actor.entered(state)
    if script.commits_first:
        state.commit()
    while state.step < script.steps:
        actor.compute(script.step_time)
        if actor.stumble(state.step):
            return "early"
        actor.exchange(state)
        _count_step(state, actor)
    return _finish(state, actor, script.steps)


@run
def _train_epochs(state: Any, actor: Actor) -> Any:
    """Train on the samples that a sampler deals."""
    script, sampler, batch = actor.script, state.sampler, actor.script.batch
    actor.entered(state)
    for state.epoch in range(state.epoch, script.epochs):
        share, used = list(sampler), list(_proper(sampler))
        for index in range(-(-len(share) // batch)):
            actor.compute(script.step_time)
            if actor.stumble(state.step):
                return "early"
            part = slice(index * batch, (index + 1) * batch)
            more = [0] * len(state.counts)
            for sample, proper in zip(share[part], used[part], strict=True):
                more[sample] += 1
                more[script.samples + sample] += proper
            total = actor.exchange(state, tuple(more))
            sampler.record_batch(index, batch)
            state.counts = tuple(map(sum, zip(state.counts, total, strict=True)))
            _count_step(state, actor)
        actor.check_counts(state.counts)
        state.counts = (0,) * len(state.counts)
        sampler.set_epoch(state.epoch + 1)
    return _finish(state, actor, state.step)


def _proper(sampler: ShardSampler) -> Iterator[bool]:
    """Tell of each sample of a share whether it is there for itself, and not to fill it up."""
    deal = sampler._deal
    for number in range(deal.per_rank):
        yield sampler.rank + number * deal.size < deal.left


def _count_step(state: Any, actor: Actor) -> None:
    """A step is done: commit it, or not."""
    state.trail = (*state.trail, state.step)
    state.step += 1
    if actor.script.commits(actor.loop, state.step):
        state.commit()
    elif state.step % 3 == 0:
        state.check_host_updates()


def _finish(state: Any, actor: Actor, steps: int) -> Any:
    actor.compute(actor.script.tail * (actor.session.rank + 1) / actor.session.size)
    actor.require(state.trail == tuple(range(steps)), f"steps done: {state.trail}")
    return (state.step, state.value)
