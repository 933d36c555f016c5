"""What users run: training functions of all kinds, made from a seed, that watch themselves.

They check what a user relies on: after a change of membership all ranks have the same state, and
it is that of a commit which the source of the plan has reported; every step is done exactly once
in the history that counts; all ranks of a collective are in the same generation and step.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nbelastic.collectives import Op
from nbelastic.elastic import ObjectState, run
from nbelastic.elastic.context import current
from nbelastic.errors import CollectiveError
from nbelastic.membership import FRESH

from .invariants import watch_hang

if TYPE_CHECKING:
    import random

    from nbelastic.elastic.session import Session

    from .fibers import Fiber
    from .loop import Hub
    from .world import World

__all__ = ["Actor", "Mishap", "Script", "SimInterrupt", "Trouble", "make_script", "train"]

_stage: list[World] = []
"""The world that is being simulated: functions travel by name, so they find it here."""


class Trouble(Exception):
    """Raised by user code."""


@dataclass
class Mishap:
    """Something that user code does wrong at a step, on one rank or on all."""

    kind: str
    step: int
    rank: int | None
    times: int


@dataclass
class Script:
    """What a user's function does."""

    seed: int
    elastic: bool = True
    setup: float = 0.1
    steps: int = 8
    step_time: float = 0.05
    commit_every: float = 0.5
    rides: bool = True
    tail: float = 0.0
    after: float = 0.0
    loops: int = 1
    mishaps: list[Mishap] = field(default_factory=list)

    @property
    def harmless(self) -> bool:
        """Whether the function itself never does anything wrong."""
        return not self.mishaps

    def commits(self, loop: int, step: int) -> bool:
        """Whether all ranks commit after this step."""
        number = (self.seed * 1_000_003 + loop * 7919 + step * 104_729) & 0xFFFFFF
        return (number * 2_654_435_761 >> 8) % 1000 < 1000 * self.commit_every


def make_script(random: random.Random) -> Script:
    """Make up a function."""
    script = Script(
        seed=random.randrange(1 << 20),
        elastic=random.random() > 0.1,
        setup=random.choice((0.0, 0.02, 0.3, 1.0)) * random.random(),
        steps=random.randint(2, 12),
        step_time=random.choice((0.005, 0.03, 0.2, 0.6)) * (0.5 + random.random()),
        commit_every=random.choice((0.2, 0.5, 1.0)),
        rides=random.random() < 0.6,
        tail=random.choice((0.0, 0.0, 0.0, 2.0)) * random.random(),
        after=random.choice((0.0, 0.0, 0.5)) * random.random(),
        loops=2 if random.random() < 0.1 else 1,
    )
    if random.random() < 0.22:
        kind = random.choice(("raise", "raise", "return", "hang", "deaf", "collective"))
        rank = None if random.random() < 0.3 else random.randrange(3)
        times = 1 if random.random() < 0.6 else 1_000
        script.mishaps.append(Mishap(kind, random.randrange(-1, script.steps), rank, times))
    return script


class SimInterrupt:
    """The way to interrupt a fiber: where it computes, and nowhere else."""

    def __init__(self, hub: Hub) -> None:
        assert hub.current is not None
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
        assert self.hub.current is not None
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
        assert plan is not None
        self.say(f"enters generation {plan.generation} as rank {session.rank} at step {state.step}")
        self.require(session.version == max(plan.version, 0), "has another version than the plan")
        here = (state.step, state.value)
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

    def exchange(self, state: Any) -> None:
        """One step's collective; what comes out must come from this generation's ranks, all in
        the same step."""
        import torch

        session = self.session
        communicator = session.communicator()  # where there is no loop, this makes it a member
        flag = session.change_flag() if self.script.rides else False
        sent = [1.0, state.step, session.generation, session.rank + 1, flag]
        tensor = torch.tensor(sent, dtype=torch.float64)
        communicator.allreduce(tensor, Op.SUM)
        count, step, generation, ranks, flags = tensor.tolist()
        size = session.size
        self.require(
            (count, step, generation, ranks)
            == (size, size * state.step, size * session.generation, size * (size + 1) / 2),
            f"a collective of generation {session.generation} gave {tensor.tolist()}",
        )
        if self.script.rides:
            session.agree(flags > 0)
        state.value = (state.value * 31 + size) % 1_000_003


class WatchedState(ObjectState):
    """A state that tells its actor what it saves."""

    def save(self) -> None:
        super().save()
        actor = self.__dict__.get("_actor")
        if actor is not None:
            actor.saved = (self.step, self.value)

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
        state = WatchedState(step=0, value=0, trail=()).watched(actor)
        result = _train(state, actor)
    actor.compute(script.after)
    return result


def _plain(actor: Actor) -> Any:
    """A function without an elastic loop: a member from its first collective on."""
    state = WatchedState(step=0, value=0, trail=())
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
    while state.step < script.steps:
        actor.compute(script.step_time)
        if actor.stumble(state.step):
            return "early"
        actor.exchange(state)
        state.trail = (*state.trail, state.step)
        state.step += 1
        if script.commits(actor.loop, state.step):
            state.commit()
        elif state.step % 3 == 0:
            state.check_host_updates()
    actor.compute(script.tail * (actor.session.rank + 1) / actor.session.size)
    actor.require(state.trail == tuple(range(script.steps)), f"steps done: {state.trail}")
    return (state.step, state.value)
