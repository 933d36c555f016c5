"""The real scheduler plugin on a made-up cluster: several jobs, and ranks that do as they are told.

Everything that takes time in a real cluster waits in a list until a test lets it happen: steps of
drivers, and actions of ranks. So any order can be tried.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

from nbelastic import messages as m
from nbelastic.cluster.scheduler.plugin import ElasticPlugin
from nbelastic.cluster.wire import PLUGIN, pack, unpack
from nbelastic.membership import Machine, Phase, Stage, pack_machine
from tests.simulation.dask import FakeScheduler, WorkerState
from tests.support.records import some_terms

VERSIONS = {"python": "3", "nbelastic": "1", "torch": "2"}


@dataclass
class FakeRank:
    """A rank, as its agent would have it."""

    job: str
    start: int
    worker: str
    state: str = "starting"
    generation: int = 0
    version: int = m.FRESH
    leaving: bool = False
    noticed: int = 0
    aborted: int = 0


@dataclass
class Driven:
    """A job as its kernel has it."""

    name: str
    client: str
    own: list[m.Event] = field(default_factory=list)


class SharedCluster(FakeScheduler):
    """A scheduler with the plugin, workers and jobs."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.random = random.Random(seed)
        self.jobs: dict[str, Driven] = {}
        self.ranks: dict[tuple[str, int], FakeRank] = {}
        self.plugin = self.plugins[PLUGIN] = ElasticPlugin()
        self.now = 0.0
        self._born = 0

    async def start(self) -> SharedCluster:
        await self.plugin.start(self)  # type: ignore[arg-type]
        return self

    # -- the scheduler's face --------------------------------------------------------------------

    def client_send(self, client: str, message: dict[str, Any]) -> None:
        packed = message.get("event", (0.0, None))[1]
        granted = packed and unpack(packed, m.ToDriver).message
        if isinstance(granted, m.SlotGranted):
            name = next(each.name for each in self.jobs.values() if each.client == client)
            rank = FakeRank(name, granted.start, granted.slot.worker)
            self.ranks.setdefault((name, granted.start), rank)
            self._submit(client, self.plugin.jobs[name].key(granted.start), rank.worker, list)

    def worker_send(self, address: str, message: dict[str, Any]) -> None:
        if message["op"] == PLUGIN:
            self.take_order(address, unpack(message["message"]))

    def take_order(self, address: str, order: Any) -> None:
        rank = self.ranks.get((getattr(order, "job", ""), getattr(order, "start", -1)))
        if rank is None or rank.worker != address:
            return
        effect = order.effect
        if isinstance(effect, m.Publish):
            if rank.state == "ready":
                rank.state, rank.generation = "forming", effect.plan.generation
                rank.version = max(effect.plan.version, 0)
        elif isinstance(effect, m.Notify):
            rank.noticed = effect.generation
        elif isinstance(effect, m.Abort):
            rank.aborted = effect.generation
        elif isinstance(effect, m.EndRank):
            rank.leaving = True
            if effect.how != "leave":
                rank.state = "over"

    async def broadcast(self, **_: Any) -> dict[str, Any]:
        return {}

    # -- what happens ----------------------------------------------------------------------------

    def hire(self, name: str, host: str = "h", **resources: float) -> str:
        self._born += 1
        address = f"tcp://{name}:{self._born}"
        self.workers[address] = WorkerState(address, name, resources=resources)
        self.stream_comms[address] = SimpleNamespace()
        contact = f"tcp://{host}.example:{self._born}"  # that the agent knows of
        slot = m.Slot(f"{name}#{self._born}", contact, name, host)
        self.plugin._hello(address, m.Hello(slot, VERSIONS, self._born))
        return address

    def kill_worker(self, address: str) -> None:
        for key in [key for key, rank in self.ranks.items() if rank.worker == address]:
            self.ranks.pop(key)
        self._remove(address)

    async def open(self, name: str, resources: Any = None, **limits: Any) -> str:
        job = self.jobs[name] = Driven(name, f"kernel of {name}")
        self.clients[job.client] = None
        self.now += 1.0
        machine = Machine(m.Limits(elastic_timeout=1e9, stall_timeout=1e9, **limits))
        terms = some_terms(
            resources=resources or {},
            versions=VERSIONS,
            heartbeat_timeout=1e9,
            lease=1e9,
            machine=pack_machine(machine),
        )
        request = m.OpenRequest(name, name, job.client, f"topic {name}", terms)
        problem = await self.handlers["nbelastic_open"](message=pack(request))
        self.plugin.jobs[name].started = self.now
        return str(problem)

    def tell(self, name: str, event: m.Event) -> None:
        """Have the owner of a job say something."""
        self.jobs[name].own.append(event)

    def kill_kernel(self, name: str) -> None:
        self.remove_client(self.jobs[name].client)

    async def attach(self, name: str) -> None:
        job = self.jobs[name]
        job.client += "'"
        job.own.clear()
        self.clients[job.client] = None
        await self.handlers["nbelastic_attach"](
            message=pack(m.AttachRequest(name, job.client, f"topic {job.client}", again=False))
        )

    # -- one thing after the other ---------------------------------------------------------------

    def actions(self) -> list[Any]:
        """Return what could happen next: a step of a driver, or of a rank."""
        found: list[Any] = []
        for name, job in self.jobs.items():
            record = self.plugin.jobs.get(name)
            driven = record is not None and record.client == job.client
            if driven and (record.backlog or job.own):
                found.append(lambda job=job: self._step(job))
        acts = [(rank, self._next(rank)) for rank in self.ranks.values()]
        return found + [partial(act, rank) for rank, act in acts if act is not None]

    def step_all(self) -> None:
        """Have all drivers do all that they have to do, and look at the clock."""
        for name, job in self.jobs.items():
            record = self.plugin.jobs.get(name)
            if record is None or record.client != job.client:
                continue
            while record.backlog:
                self._step(job)
            job.own.append(m.Tick())
            self._step(job)

    def _step(self, job: Driven) -> None:
        record = self.plugin.jobs[job.name]
        self.now += 0.001
        own = job.own.pop(0) if job.own else None
        seq = 0 if own is not None else next(iter(record.backlog))
        head = (job.name, record.topic, record.epoch, record.steps + 1)
        assert record.step(m.JournalStep(*head, self.now, 0.5, seq, own))

    def _next(self, rank: FakeRank) -> Callable[[FakeRank], None] | None:
        """Return what a rank does next, if there is something to do."""
        member = rank.state in ("member", "forming")
        if rank.state == "over" or (rank.leaving and not member):
            return self._end
        if rank.state == "starting":
            return self._leave
        if member and rank.aborted >= rank.generation:
            return partial(self._leave, failed=True)
        if rank.state == "member" and rank.noticed == rank.generation:
            return self._end if rank.leaving else self._commit
        return self._form if rank.state == "forming" else None

    def _form(self, rank: FakeRank) -> None:
        rank.state = "member"
        self._say(rank, m.RankFormed(rank.start, rank.generation))

    def _commit(self, rank: FakeRank) -> None:
        rank.version = rank.generation
        self._leave(rank)

    def _leave(self, rank: FakeRank, failed: bool = False) -> None:
        rank.state = "ready"
        version = float(max(rank.version, m.FRESH))
        self._say(rank, m.RankReady(rank.start, rank.generation, version, 1, ("h", 1), failed))

    def _end(self, rank: FakeRank) -> None:
        self.ranks.pop((rank.job, rank.start))
        self._say(rank, m.RankLeft(rank.start))
        if rank.worker in self.workers:
            self.plugin._ended(rank.worker, m.RankEnded(rank.job, rank.start))
        record = self.plugin.jobs.get(rank.job)
        if record is not None:
            self._task_finished(rank.worker, record.key(rank.start))

    def _say(self, rank: FakeRank, event: m.Event) -> None:
        self.plugin._report(rank.worker, m.RankEvent(rank.job, event))

    def beat(self) -> None:
        """Have all members send a heartbeat."""
        for rank in self.ranks.values():
            if rank.state == "member" and rank.job in self.plugin.jobs:
                beat = m.Beat(rank.start, 1, 0, waiting=False, version=int(rank.version))
                self.plugin.jobs[rank.job].take_in(m.Beats((beat,)))

    # -- questions -------------------------------------------------------------------------------

    def roster(self, name: str) -> Any:
        return self.plugin.jobs[name].machine.roster

    def held(self) -> dict[str, int]:
        """Return how many slots each job has."""
        return {name: len(record.ranks) for name, record in self.plugin.jobs.items()}

    def sizes(self) -> dict[str, int]:
        """Return with how many ranks each job trains."""
        rosters = {name: record.machine.roster for name, record in self.plugin.jobs.items()}
        return {
            name: len(roster.in_stage(Stage.MEMBER)) * (roster.phase == Phase.RUNNING)
            for name, roster in rosters.items()
        }

    def stop(self, name: str) -> None:
        self.tell(name, m.StopRequested(now=True))
