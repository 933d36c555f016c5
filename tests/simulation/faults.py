"""What goes wrong in a schedule, and when; all from the seed."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nbelastic.messages import LimitsChanged, StopRequested

if TYPE_CHECKING:
    from .world import World

KINDS = (
    ("kill", 10),
    ("crash", 10),
    ("stop", 4),
    ("stop_worker", 2),
    ("stop_rank", 3),
    ("hold", 3),
    ("slow", 3),
    ("retire", 5),
    ("close", 3),
    ("restart", 2),
    ("kill_host", 2),
    ("cut_scheduler", 4),
    ("cut_to_scheduler", 2),
    ("cut_from_scheduler", 2),
    ("cut_peers", 3),
    ("pause_scheduler", 3),
    ("pause_kernel", 3),
    ("add", 4),
    ("scale", 2),
    ("stop_job", 1),
    ("cancel_job", 1),
    ("kill_kernel", 2),
    ("attach", 1),
    ("lose_kernel", 4),
    ("lose_kernel_late", 2),
    ("kill_scheduler", 1),
)

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
        getattr(self, f"_{self.kind}")(world)

    # -- workers ------------------------------------------------------------------------------

    def _kill(self, world: World) -> None:
        world.pick(self.which).process.kill()

    def _kill_host(self, world: World) -> None:
        host = world.pick(self.which).process.host
        for worker in [w for w in world.living() if w.process.host == host]:
            worker.process.kill()

    def _crash(self, world: World) -> None:
        for rank in list(world.pick(self.which).ranks):
            rank.process.kill()

    def _stop(self, world: World) -> None:
        """Stop a worker and its ranks, as a machine that swaps does."""
        worker = world.pick(self.which)
        for process in [worker.process, *(rank.process for rank in worker.ranks)]:
            world.freeze(process, self.length)

    def _stop_worker(self, world: World) -> None:
        world.freeze(world.pick(self.which).process, self.length)

    def _stop_rank(self, world: World) -> None:
        for rank in world.pick(self.which).ranks:
            world.freeze(rank.process, self.length)

    def _hold(self, world: World) -> None:
        """Have a worker, or its ranks, hold the interpreter, so that no other thread runs."""
        worker = world.pick(self.which)
        processes = [rank.process for rank in worker.ranks] if self.which % 2 else []
        for process in processes or [worker.process]:
            world.busy.add(process)
            world.freeze(process, self.length)

    def _slow(self, world: World) -> None:
        process = world.pick(self.which).process
        world.slow[process] = 4.0
        world.later(self.length, lambda: world.slow.pop(process, None))

    def _retire(self, world: World) -> None:
        address = world.pick(self.which).address
        handler = world.scheduler.handlers["retire_workers"]
        world.scheduler.loop.call_soon(
            lambda: world.scheduler.loop.create_task(handler(workers=[address]))
        )

    def _close(self, world: World) -> None:
        worker = world.pick(self.which)
        worker.loop.call_soon(lambda: worker.close(leave_nanny=self.which % 2 == 0))

    def _restart(self, world: World) -> None:
        address = world.pick(self.which).address
        world.scheduler.loop.call_soon(
            lambda: world.scheduler.loop.create_task(
                world.scheduler.restart_workers(workers=[address])
            )
        )

    def _add(self, world: World) -> None:
        world.hire(f"extra{self.which}", f"h{self.which % 3}", nanny=self.which % 2 == 0)

    # -- the network --------------------------------------------------------------------------

    def _cut_scheduler(self, world: World) -> None:
        self._cut_to_scheduler(world)
        self._cut_from_scheduler(world)

    def _cut_to_scheduler(self, world: World) -> None:
        world.cut(world.pick(self.which).process.host, "S", self.length)

    def _cut_from_scheduler(self, world: World) -> None:
        world.cut("S", world.pick(self.which).process.host, self.length)

    def _cut_peers(self, world: World) -> None:
        one, other = world.pick(self.which), world.pick(self.which + 1)
        world.cut(one.process.host, other.process.host, self.length)

    # -- the scheduler, the kernel, and the owner ---------------------------------------------

    def _pause_scheduler(self, world: World) -> None:
        world.freeze(world.scheduler.process, self.length)

    def _kill_scheduler(self, world: World) -> None:
        world.scheduler.process.kill()

    def _pause_kernel(self, world: World) -> None:
        world.freeze(world.kernels.client.process, self.length * 2.4)

    def _lose_kernel(self, world: World) -> None:
        world.kernels.client.tear(self.length)

    def _lose_kernel_late(self, world: World) -> None:
        world.kernels.client.tear(min(self.length, 3.0), late=self.which * 1.5)

    def _kill_kernel(self, world: World) -> None:
        world.kernels.kill(world.kernels.client, again=min(self.length, 8.0))

    def _attach(self, world: World) -> None:
        if world.kernels.driving:
            world.kernels.attach()

    def _scale(self, world: World) -> None:
        low, high = (1, self.which % 4 + 1) if self.which % 2 else (2, 5)
        world.driver.tell(LimitsChanged(min_np=low, max_np=high))

    def _stop_job(self, world: World) -> None:
        world.driver.tell(StopRequested())
        world.stopped = True

    def _cancel_job(self, world: World) -> None:
        world.driver.tell(StopRequested(now=True))
        world.stopped = True


def make_faults(random: random.Random, window: float, *, planned: bool) -> list[Fault]:
    """Make up what goes wrong in the first `window` seconds."""
    kinds = [kind for kind, _ in KINDS]
    weights = [weight for _, weight in KINDS]
    planned = random.random() < 0.12 or planned
    count = random.choice((0, 1, 1, 2, 2, 3, 4, 6))
    faults = []
    for _ in range(count):
        at = random.random() * window
        if faults and random.random() < 0.3:  # soon after the one before
            at = faults[-1].at + random.random() * 0.05
        kind = random.choice(PLANNED) if planned else random.choices(kinds, weights)[0]
        faults.append(Fault(at, kind, random.randrange(8), random.choice(LENGTHS)))
    return sorted(faults, key=lambda fault: fault.at)
