"""One schedule: a cluster, a job and its faults, all from one seed, and what must hold.

Simulated are clocks, threads, processes and the network; the rest is the real code.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar
from unittest.mock import Mock

import pytest

from nbelastic.cluster.kernel import preflight
from nbelastic.cluster.payload import Modules
from nbelastic.cluster.scheduler import job_service
from nbelastic.cluster.worker import agent, hosted_rank
from nbelastic.driver.options import Options
from nbelastic.elastic.ranks import telemetry
from nbelastic.elastic.ranks.runtime import RankRuntime
from nbelastic.membership import unpack_machine
from nbelastic.messages import ShareSet, Sharing, StopRequested

from . import user
from .dask import SimScheduler
from .exchange import Exchange
from .invariants import Calm, WatchedMachine, check_outcome, is_endless, leftovers
from .kernels import Kernels
from .loop import Condition, Hub, Process, Stuck
from .network import Network, block_on
from .schedule import PLANNED, Fault, Script, make_faults, make_script
from .worker import SimLauncher, SimNanny, SimRank, SimWorker

if TYPE_CHECKING:
    from nbelastic.driver.thread import Driver

fit = importlib.import_module("nbelastic.driver.fit")  # the package gives this name to a function

VERSIONS = {"python": "3", "nbelastic": "1", "torch": "2", "cloudpickle": "3"}


def _process() -> Any:
    return asyncio.get_running_loop()


def _pid() -> int:
    process = _process()
    return int(process.owner.world.processes.index(process))


def _machine(data: str) -> Any:
    world = user._stage[-1]
    world.machine = WatchedMachine(world, unpack_machine(data))
    return world.machine


REPLACED: list[tuple[Any, str, Any]] = [  # what only a real process has
    (agent, "host_identity", lambda: _process().host),
    (agent, "after_shielding", lambda probe: probe),
    (agent, "versions", lambda: VERSIONS),
    (agent, "own_interface", lambda hosts: next(iter(hosts))),
    (agent, "getpid", _pid),
    (agent, "secede", lambda: None),
    (agent, "get_worker", lambda: _process().owner),
    (agent, "sync", block_on),
    (job_service, "unpack_machine", _machine),
    (fit, "own_versions", lambda: VERSIONS),
    (preflight, "collect", lambda names: Modules()),
    (agent, "NoticeWatcher", lambda *_: Mock()),  # a real one asks the machine that simulates
    (agent, "RankLauncher", SimLauncher),
    (hosted_rank, "RankProcess", SimRank),
    (telemetry, "user_line", lambda thread: None),
    (telemetry, "memory_in_use", lambda: (0, 0, 0)),
]

LONGEST = 240.0  # seconds of virtual time after the last fault in which a job must have ended
SETTLING = 45.0  # seconds of virtual time after the end in which all that was left must be gone
MOST_SHARED = 4  # slots of a cluster that the job shares with others, which it knows by its share


class World:
    """Everything in one schedule."""

    function: Callable[[], Any] = staticmethod(user.train)  # which is sent to the workers
    known_errors: tuple[str, ...] = ()  # beginnings of errors that ranks may raise
    hub_type: type[Hub] = Hub
    # Chances that a thread waits before it takes a lock, of which the seed chooses one.
    hesitations: tuple[float, ...] = (0.0, 0.1, 0.5)

    def __init__(
        self, seed: int, *, tracing: bool = False, planned: bool = False, shared: bool = False
    ) -> None:
        self.seed = seed
        self.random = chance = random.Random(seed)
        self.hub = self.hub_type(chance)
        if tracing:
            self.hub.trace = []
        self.god = Process(self.hub, "world", "W")
        again = chance.choice((0.0, 0.0, 0.02, 0.2))
        self.network = Network(self.hub, chance.choice((0.0005, 0.002, 0.01)), again)
        self.exchange = Exchange(self.network)
        self.processes: list[Process] = []
        self.busy: set[Process] = set()
        self.slow: dict[Process, float] = {}
        self.births = 0
        self.machine: WatchedMachine | None = None
        self.troubled = False
        self.struck: set[str] = set()
        self.actors: dict[int, user.Actor] = {}
        self.ledger: dict[tuple[int, int, int], Any] = {}
        self.beginnings: dict[int, Any] = {}
        self.stopped = False
        hesitation = chance.choice(self.hesitations)
        self.runtime = RankRuntime(
            connect=self.exchange.connect,
            open_store=self.exchange.open_store,
            condition=lambda: Condition(self.hub, hesitation),
            interrupt=lambda: user.SimInterrupt(self.hub),
        )
        self.scheduler = SimScheduler(self)
        self.crew: list[SimWorker] = []
        self.same_address = chance.random() < 0.2
        self.threads = 2 if chance.random() < 0.15 else 1
        self._build_cluster()
        self.script = self._make_script()
        self.options = self._make_options()
        self.faults = self._make_faults(planned)
        self.kernels = Kernels(self, self.options)
        self.calm = Calm(self)
        if shared:
            have_others(self)

    # -- building -----------------------------------------------------------------------------

    def _make_script(self) -> Script:
        return make_script(self.random)

    def _make_faults(self, planned: bool) -> list[Fault]:
        return make_faults(self.random, self.random.choice((0.3, 2.0, 6.0)), planned=planned)

    def _build_cluster(self) -> None:
        chance = self.random
        hosts = chance.choice((1, 2, 2, 3))
        nannies = chance.random() < 0.75
        for number in range(chance.choice((1, 2, 3, 3, 4, 5))):
            self.hire(f"w{number}", f"h{number % hosts}", nanny=nannies)

    def _make_options(self) -> Options:
        chance, there = self.random, len(self.crew)
        low = chance.randint(1, max(1, there - 1))
        start = chance.choice((None, low, min(there, low + 1)))
        high = chance.choice((None, None, max(there, start or 1)))
        return Options(
            np=start,
            min_np=low,
            max_np=None if high is None else max(high, low),
            slots_per_host=None if chance.random() < 0.85 else 2,
            reset_limit=None if chance.random() < 0.93 else 3,
            elastic_timeout=chance.choice((6.0, 15.0, 40.0)),
            stall_timeout=chance.choice((4.0, 8.0, 20.0)),
            heartbeat_timeout=chance.choice((1.5, 3.0, 10.0)),
            blacklist_cooldown=None if chance.random() < 0.7 else (1.0, 8.0),
        )

    def hire(self, name: str, host: str, *, nanny: bool) -> SimWorker:
        """Start a worker on a host."""
        self.births += 1
        keeper = SimNanny(self, name, host) if nanny else None
        return self._start(name, host, f"tcp://{host}:{self.births}", keeper)

    def restart(self, nanny: SimNanny, dead: SimWorker) -> None:
        """Have a nanny start its worker again; a new process, mostly under a new address."""
        if nanny.worker is dead and not nanny.closing:
            self.births += 1
            host = dead.process.host
            address = dead.address if self.same_address else f"tcp://{host}:{self.births}"
            self._start(dead.name, host, address, nanny)

    def _start(self, name: str, host: str, address: str, nanny: SimNanny | None) -> SimWorker:
        worker = SimWorker(self, name, host, address, nanny, self.threads)
        self.crew.append(worker)
        if self.hub.trace is not None:
            self.hub.say(worker.id, f"starts on {host} as {address}")
        return worker

    # -- for faults ---------------------------------------------------------------------------

    def later(self, seconds: float, action: Callable[[], object]) -> None:
        self.god.call_later(seconds, action)

    def living(self) -> list[SimWorker]:
        return [worker for worker in self.crew if worker.process.alive]

    def pick(self, which: int) -> SimWorker:
        """Return a worker, a living one if there is any."""
        crew = self.living() or self.crew
        worker = crew[which % len(crew)]
        self.struck.add(worker.id)
        return worker

    def reachable(self, slot: str) -> bool:
        """Whether a worker runs that can be talked to."""
        return any(w.id == slot and not w.process.frozen for w in self.living())

    @property
    def only_planned(self) -> bool:
        """Whether nothing but changes that everybody is told of happens in this schedule."""
        return self.script.harmless and all(fault.kind in PLANNED for fault in self.faults)

    def touched(self, slot: str) -> bool:
        """Whether anything has happened so far that a worker may suffer from."""
        return self.troubled or slot in self.struck

    def freeze(self, process: Process, seconds: float) -> None:
        process.freeze()
        self.later(seconds, lambda: self.thaw(process))

    def thaw(self, process: Process) -> None:
        if process.alive and process.frozen:
            self.hub.say(process.name, "goes on")
            self.busy.discard(process)
            process.thaw()

    def cut(self, source: str, target: str, seconds: float) -> None:
        if source != target:
            self.network.cut(source, target)
            self.later(seconds, self.network.heal)

    def slowness(self, process: Process) -> float:
        """Return how many times as long a process takes; a rank's is as slow as its worker's."""
        worker = process.owner.process if isinstance(process.owner, SimWorker) else process
        return self.slow.get(worker, 1.0)

    @property
    def driver(self) -> Driver:
        """The driver of the newest kernel."""
        return self.kernels.driver

    # -- running ------------------------------------------------------------------------------

    def run(self) -> None:
        """Play the schedule, and check what must hold at its end."""
        last = max((fault.at + fault.length for fault in self.faults), default=0.0)
        for fault in self.faults:
            self.later(fault.at, lambda f=fault: f.strike(self))
        self.kernels.start()
        self.calm.look()
        hub, has_ended = self.hub, self.kernels.has_ended
        ended = hub.run(has_ended, last + LONGEST)
        if not ended and is_endless(self):  # that is for its owner to end
            self.stopped = True
            self.driver.tell(StopRequested(now=True))
            ended = hub.run(has_ended, hub.now + SETTLING)
        assert ended, f"{LONGEST:g} s after the last fault the job is {self.driver.view()}"
        self.calm.over = True
        if not self.kernels.gone:
            future = self.driver.future
            hub.say("job", f"ended: {future.exception() or future.result()}")
            check_outcome(self)
        self.network.heal()
        with contextlib.suppress(Stuck):
            hub.run(lambda: False, hub.now + 1.0)  # what is still on its way arrives
            hub.run(lambda: not leftovers(self), max(hub.now, last) + SETTLING)
        left = leftovers(self)
        assert not left, f"left behind: {left}"
        if hub.errors:
            raise AssertionError(hub.errors[0])

    @property
    def end(self) -> str:
        """How the job ended, in a word."""
        if self.kernels.gone:
            return "given up before it began"
        error = self.driver.future.exception(timeout=0)
        return "finished" if error is None else type(error).__name__

    def close(self) -> None:
        """End everything."""
        kernels = [client.process for client in self.scheduler.everybody]
        for process in [*self.processes, *kernels, self.scheduler.process, self.god]:
            process.kill()


W = TypeVar("W", bound=World)


def play(make: Callable[[], W]) -> W:
    """Play one schedule; raise AssertionError, with the world, where something does not hold."""
    with pytest.MonkeyPatch.context() as patch:
        for module, name, replacement in REPLACED:
            patch.setattr(module, name, replacement)
        world = make()
        user._stage.append(world)
        try:
            world.run()
        except BaseException as error:
            error.world = world  # type: ignore[attr-defined]
            raise
        finally:
            user._stage.pop()
            world.close()
        return world


def simulate(
    seed: int, *, tracing: bool = False, planned: bool = False, shared: bool = False
) -> World:
    """Play a schedule: `planned` with announced changes alone, `shared` among other jobs."""
    return play(lambda: World(seed, tracing=tracing, planned=planned, shared=shared))


def have_others(world: World) -> None:
    """Have other jobs come and go: the job's share changes some times, and is lifted at last."""
    chance = random.Random(f"shares {world.seed}")  # the schedule is the same without them
    times = sorted(chance.random() * 6.0 for _ in range(chance.randint(1, 4)))
    least = world.options.limits().min_np
    for at in times:
        share = chance.randint(least, max(MOST_SHARED, least))
        world.later(at, lambda share=share: _set_share(world, share))
    world.later(times[-1] + 3.0 * chance.random(), lambda: _set_share(world, None))


def _set_share(world: World, share: int | None) -> None:
    def send() -> None:
        plugin: Any = world.scheduler.plugins.get("nbelastic")
        record = None if plugin is None else plugin.jobs.get("job")
        if record is not None and not record.opening:
            sharing = None if share is None else Sharing(share, MOST_SHARED, ("other",), 1)
            record.take_in(ShareSet(sharing))
            plugin.arbiter.announce(record, plugin.workers.values())

    world.hub.say("SHARE", f"{share}")
    world.scheduler.loop.call_soon(send)
