"""What a schedule draws: a training function, what goes wrong, and when; all from the seed."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from nbelastic.messages import LimitsChanged, StopRequested

if TYPE_CHECKING:
    from .world import World


@dataclass
class Mishap:
    """Something that user code does wrong at a step, on one rank or on all."""

    kind: str
    step: int
    rank: int | None
    times: int


@dataclass
class Script:
    """What a user's function does; with `samples`, it goes through them instead of `steps`."""

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
    samples: int = 0
    epochs: int = 1
    batch: int = 1
    mishaps: list[Mishap] = field(default_factory=list)

    @property
    def harmless(self) -> bool:
        """Whether the function itself never does anything wrong."""
        return not self.mishaps

    @property
    def commits_first(self) -> bool:
        """Whether each generation begins with a commit: one that leads nowhere."""
        return self.seed % 3 == 0

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
        samples=random.choice((7, 12, 24)) if random.random() < 0.25 else 0,
        epochs=random.choice((1, 1, 2, 3)),
        batch=random.choice((1, 2, 3)),
    )
    if random.random() < 0.22:
        kind = random.choice(("raise", "raise", "return", "hang", "deaf", "collective"))
        rank = None if random.random() < 0.3 else random.randrange(3)
        times = 1 if random.random() < 0.6 else 1_000
        script.mishaps.append(Mishap(kind, random.randrange(-1, script.steps), rank, times))
    return script


# -- faults ----------------------------------------------------------------------------------------

PLANNED = ("add", "retire", "scale")  # changes that everybody is told of before

LENGTHS = (0.05, 0.4, 1.2, 3.0, 8.0, 25.0)


@dataclass(frozen=True)
class Fault:
    """Something that happens to the cluster or the job."""

    at: float
    kind: str
    which: int
    length: float

    def strike(self, world: World) -> None:
        """Let it happen."""
        world.hub.say("FAULT", f"{self.kind} which={self.which} for {self.length:g} s")
        world.troubled |= self.kind.startswith(("cut", "pause", "lose"))
        KINDS[self.kind][1](world, self.which, self.length)


def _kill_host(world: World, which: int, _: float) -> None:
    host = world.pick(which).process.host
    for worker in [w for w in world.living() if w.process.host == host]:
        worker.process.kill()


def _stop(world: World, which: int, seconds: float) -> None:
    """Stop a worker and its ranks, as a machine that swaps does."""
    worker = world.pick(which)
    for process in [worker.process, *(rank.process for rank in worker.ranks)]:
        world.freeze(process, seconds)


def _hold(world: World, which: int, seconds: float) -> None:
    """Have a worker, or its ranks, hold the interpreter, so that no other thread runs."""
    worker = world.pick(which)
    processes = [rank.process for rank in worker.ranks] if which % 2 else []
    for process in processes or [worker.process]:
        world.busy.add(process)
        world.freeze(process, seconds)


def _slow(world: World, which: int, seconds: float) -> None:
    process = world.pick(which).process
    world.slow[process] = 4.0
    world.later(seconds, lambda: world.slow.pop(process, None))


def _close(world: World, which: int, _: float) -> None:
    worker = world.pick(which)
    worker.loop.call_soon(lambda: worker.close(leave_nanny=which % 2 == 0))


def _ask(world: World, handler: str, which: int) -> None:
    """Call a handler of the scheduler's for a worker."""
    loop, call = world.scheduler.loop, world.scheduler.handlers[handler]
    address = world.pick(which).address
    loop.call_soon(lambda: loop.create_task(call(workers=[address])))


def _cut(world: World, which: int, seconds: float, *, to: bool = True, back: bool = True) -> None:
    """Cut a worker's host off the scheduler, in one direction or both."""
    if to:
        world.cut(world.pick(which).process.host, "S", seconds)
    if back:
        world.cut("S", world.pick(which).process.host, seconds)


def _cut_peers(world: World, which: int, seconds: float) -> None:
    one, other = world.pick(which), world.pick(which + 1)
    world.cut(one.process.host, other.process.host, seconds)


def _scale(world: World, which: int, _: float) -> None:
    low, high = (1, which % 4 + 1) if which % 2 else (2, 5)
    world.driver.tell(LimitsChanged(min_np=low, max_np=high))


def _end(world: World, now: bool) -> None:
    world.driver.tell(StopRequested(now=now))
    world.stopped = True


KINDS: dict[str, tuple[int, Callable[[World, int, float], object]]] = {
    "kill": (10, lambda w, n, _: w.pick(n).process.kill()),
    "crash": (10, lambda w, n, _: [rank.process.kill() for rank in list(w.pick(n).ranks)]),
    "stop": (4, _stop),
    "stop_worker": (2, lambda w, n, s: w.freeze(w.pick(n).process, s)),
    "stop_rank": (3, lambda w, n, s: [w.freeze(rank.process, s) for rank in w.pick(n).ranks]),
    "hold": (3, _hold),
    "slow": (3, _slow),
    "retire": (5, lambda w, n, _: _ask(w, "retire_workers", n)),
    "close": (3, _close),
    "restart": (2, lambda w, n, _: _ask(w, "restart_workers", n)),
    "kill_host": (2, _kill_host),
    "cut_scheduler": (4, _cut),
    "cut_to_scheduler": (2, partial(_cut, back=False)),
    "cut_from_scheduler": (2, partial(_cut, to=False)),
    "cut_peers": (3, _cut_peers),
    "pause_scheduler": (3, lambda w, _, s: w.freeze(w.scheduler.process, s)),
    "pause_kernel": (3, lambda w, _, s: w.freeze(w.kernels.client.process, 2.4 * s)),
    "add": (4, lambda w, n, _: w.hire(f"extra{n}", f"h{n % 3}", nanny=n % 2 == 0)),
    "scale": (2, _scale),
    "stop_job": (1, lambda w, *_: _end(w, now=False)),
    "cancel_job": (1, lambda w, *_: _end(w, now=True)),
    "kill_kernel": (2, lambda w, _, s: w.kernels.kill(w.kernels.client, again=min(s, 8.0))),
    "attach": (1, lambda w, *_: w.kernels.driving and w.kernels.attach()),
    "lose_kernel": (4, lambda w, _, s: w.kernels.client.tear(s)),
    "lose_kernel_late": (2, lambda w, n, s: w.kernels.client.tear(min(s, 3.0), late=1.5 * n)),
    "kill_scheduler": (1, lambda w, *_: w.scheduler.process.kill()),
}
"""How often each is drawn, and what it does to a worker for some seconds."""


def make_faults(random: random.Random, window: float, *, planned: bool) -> list[Fault]:
    """Make up what goes wrong in the first `window` seconds."""
    weights = [weight for weight, _ in KINDS.values()]
    planned = random.random() < 0.12 or planned
    count = random.choice((0, 1, 1, 2, 2, 3, 4, 6))
    faults = []
    for _ in range(count):
        at = random.random() * window
        if faults and random.random() < 0.3:  # soon after the one before
            at = faults[-1].at + random.random() * 0.05
        kind = random.choice(PLANNED) if planned else random.choices(list(KINDS), weights)[0]
        faults.append(Fault(at, kind, random.randrange(8), random.choice(LENGTHS)))
    return sorted(faults, key=lambda fault: fault.at)
