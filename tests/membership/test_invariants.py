"""The machine in a world where everything goes wrong: its invariants hold, and it comes to an end.

Faults are of two kinds. Those of workers, ranks and the network come from the world, which stays
faithful: its ranks answer as real ones would. Then there are messages that nobody sent: forged,
repeated and long out of date.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from msgspec.structs import replace

from nbelastic import messages as ev

from .ranks import Script
from .world import Worker, World


@pytest.fixture(autouse=True, scope="module")
def _nothing_else_to_collect() -> Iterator[None]:
    """Keep what other tests have left in memory out of collections: there are thousands."""
    gc.freeze()
    yield
    gc.unfreeze()


numbers = st.integers(0, 50)
flags = st.booleans()
NOTICE = ev.Notice(ev.NoticeSource.AWS, "terminate", 120.0, "A0")
RISK = ev.Notice(ev.NoticeSource.AWS, "rebalance", name="A0", soft=True)
HARM = ["kill", "kill", "freeze", "thaw", "retire", "cut", "raise", "collective"]
HARM += ["crash", "crash", "hang", "deafen", "stick"]
names = st.builds("{}{}".format, st.sampled_from("ABC"), st.integers(0, 2))


def limits_of(least: int, more: int | None, **others: Any) -> ev.Limits:
    return ev.Limits(
        np=least,
        min_np=least,
        max_np=None if more is None else least + more,
        elastic_timeout=60.0,
        stall_timeout=8.0,
        forming_timeout=6.0,
        ending_timeout=3.0,
        **others,
    )


class FaultyWorld(RuleBasedStateMachine):
    """A job, its world, and whatever may happen to them."""

    @initialize(
        world=st.builds(
            World,
            st.builds(
                limits_of,
                st.integers(1, 3),
                st.none() | st.integers(0, 3),
                cooldown=st.none() | st.sampled_from([(1.0, 8.0), (5.0, 5.0)]),
                slots_per_host=st.none() | st.integers(1, 2),
                reset_limit=st.none() | st.integers(0, 4),
                check_every=st.sampled_from([1, 1, 4, 1000]),
                preemptible=flags,
                checkpoint=flags,
            ),
            st.builds(
                Script,
                setup=st.sampled_from([0.0, 0.2, 3.0]),
                before=st.sampled_from([0, 0, 0, 0, 2]),
                loops=st.sampled_from([1, 1, 1, 1, 1, 2, 0]),
                batches=st.sampled_from([5, 5, 60, 400, 400]),
                commit_every=st.sampled_from([1, 3]),
                after=st.sampled_from([0.0, 0.3, 3.0]),
                ahead=st.sampled_from([0.0, 0.0, 0.5]),
            ),
            seed=numbers,
            jitter=st.sampled_from([0.0, 0.0, 0.05]),
        ),
        slow=st.sampled_from([False, False, False, True]),
        early=st.sampled_from([0, 20, 100]),
        hosts=st.lists(names, min_size=2, max_size=6, unique=True),
    )
    def open(self, world: World, slow: bool, early: int, hosts: list[str]) -> None:
        self.world = world
        if slow:
            world.script.step, world.script.batches = 10.0, 5
        world.add(*hosts, nanny=True)
        for _ in range(early):
            self.world.step()

    # -- time ----------------------------------------------------------------------------------

    @rule(steps=numbers)
    def play(self, steps: int) -> None:
        for _ in range(steps):
            self.world.step()

    @rule(seconds=st.sampled_from([0.01, 0.1, 1.0, 1.0, 3.0, 10.0]))
    def wait(self, seconds: float) -> None:
        self.world.run_for(seconds)

    @rule(seconds=st.floats(0.0, 12.0))
    def jump(self, seconds: float) -> None:
        """Let time pass in which nobody listens."""
        self.world.honest = False
        self.world.now += seconds
        self.world.tell(ev.Tick())

    # -- workers -------------------------------------------------------------------------------

    def alive(self) -> list[Worker]:
        return [worker for worker in self.world.workers.values() if worker.alive]

    @rule(name=names, nanny=flags)
    def add(self, name: str, nanny: bool) -> None:
        if name not in [worker.slot.name for worker in self.alive()]:
            self.world.add(name, nanny=nanny)

    @precondition(lambda self: self.alive())
    @rule(
        which=numbers,
        what=st.sampled_from(HARM),
        seconds=st.sampled_from([0.0, 0.02, 1.0, 8.0]),
        then=st.sampled_from([0, 0, 1, 2, 4, 8, 16]),
    )
    def harm(self, which: int, what: str, seconds: float, then: int) -> None:
        workers = self.alive()
        worker = workers[which % len(workers)]
        rank = self.world.ranks.get(-1 if worker.holder is None else worker.holder)
        if what in ("kill", "freeze", "thaw"):
            getattr(self.world, what)(worker.slot.id)
        elif what in ("retire", "cut"):
            getattr(self.world, what)(worker.slot.id, seconds)
        elif rank is not None and not worker.frozen:
            if what in ("hang", "deafen", "stick"):
                rank.hung = True  # it stays deaf: it has missed orders already
                rank.deaf, rank.stuck = rank.deaf or what != "hang", rank.stuck or what == "stick"
            elif what == "crash":
                rank.crash(f"its process was killed by signal {which}")
            else:
                rank.raise_error(f"KeyError: {which}", collective=what == "collective")
        self.play(then)

    @precondition(lambda self: self.alive())
    @rule(which=numbers, over=flags)
    def risk(self, which: int, over: bool) -> None:
        """A machine is at risk, or is not any more."""
        workers = self.alive()
        slot = workers[which % len(workers)].slot.id
        self.world.tell(ev.SlotStays(slot) if over else ev.SlotLeaving(slot, notice=RISK))

    @rule(rarely=st.integers(0, 4))
    def kill_all(self, rarely: int) -> None:
        for worker in self.alive() if rarely == 0 else []:
            self.world.kill(worker.slot.id)

    # -- the owner -----------------------------------------------------------------------------

    @rule(low=st.none() | st.integers(1, 3), high=st.none() | st.integers(3, 6))
    def scale(self, low: int | None, high: int | None) -> None:
        self.world.tell(ev.LimitsChanged(min_np=low, max_np=high))

    @rule(share=st.none() | st.integers(0, 5), offered=flags, name=names, reclaims=flags)
    def share(self, share: int | None, offered: bool, name: str, reclaims: bool) -> None:
        """Have other jobs come and go."""
        workers = [w for w in self.alive() if w.holder is None and not w.leaving]
        slots = [worker.slot for worker in workers]
        reclaimed = [worker.slot.id for worker in self.alive() if worker.slot.name == name]
        sharing = None if share is None else ev.Sharing(share, 6, ("other",), 1)
        self.world.tell(ev.ShareSet(sharing, tuple(reclaimed if reclaims else ())))
        if offered or share is None:
            self.world.tell(ev.SlotsFound(tuple(slots)))

    @rule(now=flags, rarely=st.integers(0, 20))
    def stop(self, now: bool, rarely: int) -> None:
        if rarely < 3:
            self.world.tell(ev.StopRequested(now=now))
        elif rarely == 3:
            self.world.tell(ev.ClusterGone("the scheduler is gone"))

    @rule()
    def restart_driver(self) -> None:
        self.world.machine.restore()

    # -- messages that nobody sent -------------------------------------------------------------

    @rule(back=st.integers(1, 200))
    def repeat(self, back: int) -> None:
        log = self.world.machine.log
        if log:
            self.world.tell(log[-min(back, len(log))][0])

    @rule(kind=st.integers(0, 30), start=numbers, back=st.integers(-2, 3), number=numbers)
    def forge(self, kind: int, start: int, back: int, number: int) -> None:
        self.world.honest = False
        self.world.tell(self.forged(kind, start, back, number))

    def forged(self, kind: int, start: int, back: int, number: int) -> ev.Event:
        roster: Any = self.world.machine.roster
        start %= roster.starts + 2
        generation = max(0, roster.generation - back)
        rank = self.world.ranks.get(start)
        version = ev.FRESH if rank is None else rank.version
        slots = [*self.world.workers, "X0#0"]
        slot = slots[number % len(slots)]
        unknown = ev.Slot(f"X{number % 3}#0", "tcp://X0", "X0", "X")
        loop, failed = number % 3, number % 2 == 0
        ready = ev.RankReady(start, generation, min(version, 0), loop, ("X", start), failed)
        forgeries = [
            lambda: ready,
            lambda: ev.RankReady(start, generation, ev.FRESH, 1, ("X", start), failed),
            lambda: replace(ready, gone=(number % (roster.starts + 1),)),
            lambda: ev.RankFormed(start, generation),
            lambda: ev.LoopDone(start, generation, version),
            lambda: ev.RankReturned(start, exits=failed),
            lambda: ev.RankExited(start, "was killed"),
            lambda: ev.RankRaised(start, "OSError: forged", failed, version),
            lambda: ev.RankLeft(start),
            lambda: ev.RankDied(start, "was killed"),
            lambda: ev.Beats((ev.Beat(start, 1, number, failed, version),)),
            lambda: ev.SlotGone(slot),
            lambda: ev.SlotLeaving(slot),
            lambda: ev.SlotLeaving(slot, notice=NOTICE),
            lambda: ev.SlotLeaving(slot, notice=RISK),
            lambda: ev.SlotStays(slot),
            lambda: ev.SlotBusy(slot),
            lambda: ev.SlotSilent(slot),
            lambda: ev.SlotsFound((unknown,)),
        ]
        return forgeries[kind % len(forgeries)]()

    # -- the end -------------------------------------------------------------------------------

    def teardown(self) -> None:
        """Once the faults stop, the job runs, finishes, fails or stops, in bounded time."""
        if not hasattr(self, "world"):
            return
        world = self.world
        world.jitter = 0.0
        world.tell(ev.ShareSet(None))
        free = [w.slot for w in self.alive() if w.holder is None and not w.leaving]
        world.tell(ev.SlotsFound(tuple(free)))
        for rank in list(world.ranks.values()):
            if rank.hung:
                world.on(rank.worker, 0.0, rank.recover)
        world.run(seconds=600.0)
        assert world.outcome is not None
        world.machine.replay()


TestFaultyWorld = FaultyWorld.TestCase
TestFaultyWorld.settings = settings(
    max_examples=300,
    stateful_step_count=50,
    deadline=None,
    # An example that fails is printed as it is: to shrink it takes longer than a test may.
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
    print_blob=True,
    suppress_health_check=list(HealthCheck),
)
