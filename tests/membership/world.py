"""Simulated world of a job: workers, messages and time, with faults on request.

:class:`World` is the machine's counterpart. It does the work of the driver, the scheduler plugin
and the agents: it carries out effects, delivers messages after a short while, and sends heartbeats.
The ranks on the workers, and their common training, are in :mod:`.ranks`.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nbelastic import messages as ev
from nbelastic.membership import TICK, Phase, places_of, reasons, view
from nbelastic.status import JobStatus

from .invariants import Checked
from .ranks import FakeRank, Ring, Script

if TYPE_CHECKING:
    from typing_extensions import Self

LATENCY = 0.003
BEAT = 0.5
RESPAWN = 1.0


@dataclass
class Worker:
    """A worker process with one slot."""

    slot: ev.Slot
    nanny: bool = False
    alive: bool = True
    frozen: bool = False
    busy: bool = False
    leaving: bool = False
    cut: bool = False
    holder: int | None = None
    silence: float = 0.0
    postponed: list[Callable[[], None]] = field(default_factory=list)


class World:
    """A machine, and everything around it; and a tick now and then."""

    def __init__(
        self, limits: ev.Limits, script: Script | None = None, *, seed: int = 0, jitter: float = 0.0
    ) -> None:
        self.machine = Checked(limits)
        self.now = 0.0  # simulated: it jumps from one event to the next
        self.outcome: ev.Outcome | None = None
        self.milestones: dict[int, list[Callable[[], None]]] = {}
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self.script = script or Script()
        self.random = random.Random(seed)
        self.jitter = jitter
        self.heartbeat_timeout = 10.0
        self.workers: dict[str, Worker] = {}
        self.ranks: dict[int, FakeRank] = {}
        self.rings: dict[int, Ring] = {}
        self.plans: list[ev.Plan] = []
        self.effects: list[ev.Effect] = []
        self.trail: list[tuple[int, int]] = []
        self.honest = True  # until a message is forged, or time passes without heartbeats
        self.later(BEAT, self._beat)
        self.later(TICK, self._tick)

    # -- time ----------------------------------------------------------------------------------

    def phase(self) -> Phase:
        return self.machine.roster.phase

    def later(self, delay: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (self.now + delay, next(self._numbers), action))

    def step(self) -> None:
        """Let the next thing happen: a message, or a timer."""
        self.now = self.next_time()
        heapq.heappop(self._queue)[2]()

    def next_time(self) -> float:
        """Return when the next thing happens."""
        return max(self.now, self._queue[0][0])

    def run(self, until: Callable[[], bool] = lambda: False, seconds: float = 7200.0) -> Self:
        """Let things happen until the job ends or `until` says so; it must, within `seconds`."""
        limit = self.now + seconds
        while self.outcome is None and not until():
            assert self.now < limit, f"still {self.machine.roster.phase} after {seconds} s"
            self.step()
        return self

    def run_for(self, seconds: float) -> Self:
        end = self.now + seconds
        while self.next_time() <= end:
            self.step()
        self.now = end
        return self

    def at(self, batch: int, action: Callable[[], object]) -> None:
        """Do something as soon as that many batches have been trained."""
        self.milestones.setdefault(batch, []).append(lambda: action() and None)

    # -- messages ------------------------------------------------------------------------------

    def tell(self, event: ev.Event, chance: float | None = None) -> None:
        """Hand an event to the machine and carry out its effects."""
        chance = self.random.random() if chance is None else chance
        effects = self.machine.handle(event, self.now, chance)
        self.effects += effects
        for effect in effects:
            self._carry_out(effect)

    def send(self, worker: Worker, event: ev.Event) -> None:
        """Send an event from a worker to the machine."""
        if not worker.cut:
            self.later(LATENCY + self.jitter * self.random.random(), lambda: self.tell(event))

    def on(self, worker: Worker, delay: float, action: Callable[[], None]) -> None:
        """Have something happen on a worker, once it gets to it, unless it is gone."""

        def act() -> None:
            if worker.frozen:
                worker.postponed.append(act)
            elif worker.alive:
                action()

        self.later(delay, act)

    def _to_rank(self, start: int, order: str, *args: object) -> None:
        def deliver() -> None:
            rank = self.ranks.get(start)
            if rank is not None and not rank.worker.cut:
                self.on(rank.worker, 0.0, lambda: getattr(rank, order)(*args))

        self.later(LATENCY + self.jitter * self.random.random(), deliver)

    def _tick(self) -> None:
        self.tell(ev.Tick(), 0.5)  # without a random number: those of others do not depend on it
        self.later(TICK, self._tick)

    def _beat(self) -> None:
        beats = []
        for worker in self.workers.values():
            rank = self.ranks.get(worker.holder)
            if not worker.alive or worker.cut or rank is None:
                continue
            if not worker.frozen:
                worker.silence = 0.0
                if rank.where != "ended":
                    beats.append(rank.beat())
                continue
            worker.silence += BEAT
            if self.heartbeat_timeout <= worker.silence < self.heartbeat_timeout + BEAT:
                self.tell(ev.SlotSilent(worker.slot.id))
        if beats:
            self.tell(ev.Beats(tuple(beats)))
        self.later(BEAT, self._beat)

    # -- effects -------------------------------------------------------------------------------

    def _carry_out(self, effect: ev.Effect) -> None:
        match effect:
            case ev.StartRank():
                self.later(LATENCY, lambda: self._claim(effect))
            case ev.Publish(plan=plan):
                self.plans.append(plan)
                self.rings[plan.generation] = Ring(self, plan)
                for member in plan.members:
                    self._to_rank(member.start, "on_plan", plan)
            case ev.Abort() | ev.Notify() | ev.Release():
                for start in effect.starts:
                    self._to_rank(start, f"on_{type(effect).__name__.lower()}", effect.generation)
            case ev.EndRank(start=start, how=how):
                self._to_rank(start, "on_end", how)
            case ev.RestartWorker():
                self._restart(effect)
            case ev.End(outcome=outcome):
                self.outcome = outcome

    def _claim(self, effect: ev.StartRank) -> None:
        worker = self.workers.get(effect.slot.id)
        if worker is None or not worker.alive:
            self.tell(ev.SlotGone(effect.slot.id))
        elif worker.holder is not None or worker.leaving:
            self.tell(ev.SlotBusy(effect.slot.id))
        elif not worker.cut:
            worker.holder = effect.start
            self.ranks[effect.start] = FakeRank(self, effect.start, worker, effect.place)

    def _restart(self, effect: ev.RestartWorker) -> None:
        worker = self.workers.get(effect.slot.id)
        if worker is None:
            return
        rank = self.ranks.get(worker.holder)
        faulty = worker.frozen or worker.cut or rank is None or rank.deaf
        assert faulty or not worker.alive or not self.honest, f"{effect}: there is no fault"
        self.later(0.1, lambda: self.kill(worker.slot.id))

    # -- what happens to workers ---------------------------------------------------------------

    def add(self, *names: str, nanny: bool = False) -> None:
        """Have workers appear, all at once; ``A0`` is a worker on host ``A``."""
        slots = []
        for name in names:
            number = next(self._numbers)
            slot = ev.Slot(id=f"{name}#{number}", worker=f"tcp://{name}", name=name, host=name[0])
            self.workers[slot.id] = Worker(slot, nanny)
            slots.append(slot)
        self.tell(ev.SlotsFound(tuple(slots)))

    def worker(self, name: str) -> Worker:
        """Return the newest worker of that name or slot."""
        return [w for w in self.workers.values() if name in (w.slot.name, w.slot.id)][-1]

    def kill(self, name: str) -> None:
        """End a worker's process at once; its nanny, if it has one, starts another."""
        worker = self.worker(name)
        if not worker.alive:
            return
        worker.alive, worker.frozen = False, False
        if worker.holder in self.ranks:
            self.ranks[worker.holder].die()
        if not worker.cut:
            self.later(2 * LATENCY, lambda: self.tell(ev.SlotGone(worker.slot.id)))
        if worker.nanny:
            self.later(RESPAWN, lambda: self.add(worker.slot.name, nanny=True))

    def crash(self, name: str, detail: str = "its process was killed by signal 11") -> None:
        """End the process of a worker's rank; the worker lives."""
        self.rank_on(name).crash(detail)

    def retire(self, name: str, grace: float = 5.0) -> None:
        """Ask a worker to leave; it is gone after `grace` seconds."""
        worker = self.worker(name)
        worker.leaving, worker.nanny = True, False
        self.tell(ev.SlotLeaving(worker.slot.id))
        self.later(grace, lambda: self.kill(worker.slot.id))

    def freeze(self, name: str) -> None:
        """Stop a worker's process, so that it does nothing at all."""
        self.worker(name).frozen = True

    def occupy(self, name: str) -> None:
        """Have a rank wait for other tasks of a worker, from its start on."""
        self.worker(name).busy = True

    def thaw(self, name: str) -> None:
        """Let a stopped process go on."""
        worker = self.worker(name)
        worker.frozen, worker.busy, worker.silence = False, False, 0.0
        postponed, worker.postponed = worker.postponed, []
        for action in postponed:
            self.later(0.0, action)
        for ring in self.rings.values():
            ring.go_on()

    def cut(self, name: str, after: float) -> None:
        """Take a worker off the network: nothing reaches it, and it is given up after a while."""
        worker = self.worker(name)
        worker.cut = True
        self.later(after, lambda: self.tell(ev.SlotGone(worker.slot.id)))

    def freed(self, worker: Worker, start: int) -> None:
        """Announce the slot of a rank that has ended."""
        if worker.holder == start:
            worker.holder = None
            if worker.alive and not worker.leaving:
                self.send(worker, ev.SlotsFound((worker.slot,)))

    # -- what came out -------------------------------------------------------------------------

    def rank_on(self, name: str) -> FakeRank:
        """Return the rank that runs on a worker."""
        holder = self.worker(name).holder
        assert holder is not None
        return self.ranks[holder]

    def sizes(self) -> list[int]:
        """Return the sizes at which batches were trained, one after the other."""
        return [len(members) for members in self._generations()]

    def leaders(self) -> list[int]:
        """Return which start of the function was rank 0 at each of these sizes."""
        return [members[0] for members in self._generations()]

    def _generations(self) -> list[list[int]]:
        generations = [generation for generation, _ in itertools.groupby(g for _, g in self.trail)]
        plans = {plan.generation: plan for plan in self.plans}
        return [[m.start for m in plans[g].members] for g in generations]

    def records(self, kind: str) -> list[ev.Record]:
        return [e for e in self.effects if isinstance(e, ev.Record) and e.kind == kind]

    def reasons(self, kind: str) -> list:
        return [record.reason for record in self.records(kind)]

    def words(self, kind: str) -> list[str]:
        return list(map(str, self.reasons(kind)))

    @property
    def why(self) -> str:
        """Why the job has ended."""
        return str(self.outcome.reason)

    def view(self) -> JobStatus:
        return view(self.machine.machine)

    def present_reasons(self) -> list[ev.Reason]:
        return reasons(self.machine.machine, self.now)

    def reason(self) -> str:
        """Return what the job waits for, or why it ended, in words."""
        return "; ".join(map(str, self.present_reasons()))

    def evicted(self) -> list:
        """Return the slots of ranks that were evicted."""
        slots = {effect.start: effect.slot for effect in self.of(ev.StartRank)}
        return [slots[effect.start] for effect in self.of(ev.EndRank) if effect.how == "evict"]

    def of(self, kind: type) -> list:
        return [effect for effect in self.effects if isinstance(effect, kind)]


# -- stories ---------------------------------------------------------------------------------------


def job(*workers: str, script: Script | None = None, nanny: bool = False, **limits: Any) -> World:
    """Return a job on workers that are there from the beginning; ``A0`` is one on host ``A``."""
    world = World(ev.Limits(**limits), script)
    world.add(*workers, nanny=nanny)
    return world


def reached(phase: Phase, world: World) -> World:
    """Let a job run until it has come to a phase."""
    return world.run(until=lambda: world.phase() == phase)


def trained(world: World, batch: int = 2) -> World:
    """Let a job run until it has trained that many batches."""
    done: list[bool] = []
    world.at(batch, lambda: done.append(True))
    return world.run(until=lambda: bool(done))


def starts(plan: ev.Plan) -> list[int]:
    return [member.start for member in plan.members]


def workers(plan: ev.Plan) -> list[str]:
    return [member.slot.name for member in plan.members]


def places(plan: ev.Plan) -> list[ev.Place]:
    slots = [member.slot for member in plan.members]
    return places_of(slots)


def when(world: World, what: Callable[[ev.Effect], bool]) -> list[float]:
    """Return the times of the effects that `what` is true of."""
    return [now for _, now, _, effects in world.machine.log for effect in effects if what(effect)]


def starts_on(world: World, name: str) -> list[float]:
    """Return the times at which ranks were started on a worker."""
    return when(world, lambda e: isinstance(e, ev.StartRank) and e.slot.name == name)


def times(world: World, what: Callable[[ev.Event], bool]) -> list[float]:
    """Return the times of the events that `what` is true of."""
    return [now for event, now, _, _ in world.machine.log if what(event)]


def batches(world: World) -> list[int]:
    """Return the numbers of the batches in the order in which they were trained."""
    return [batch for batch, _ in world.trail]
