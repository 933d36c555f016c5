"""Workers with their agents and nannies, and the processes of ranks, which run the real program."""

from __future__ import annotations

import asyncio
import pickle
import signal
from collections import deque
from typing import TYPE_CHECKING, Any

from distributed.core import Status

from nbelastic.cluster.process_state import ProcessState
from nbelastic.cluster.wire import HEARTBEAT_INTERVAL_S
from nbelastic.cluster.worker.rank.program import RankProgram
from nbelastic.cluster.worker.rank_process import ProcessExit
from nbelastic.messages import LoopDone, RankEvent, RankReady
from tests.membership.ranks import NOTICED

from .loop import Fiber, Process
from .network import Pipe, Remote, may_come_twice

if TYPE_CHECKING:
    from .dask import SimTask
    from .world import World


HOP = 0.0002  # seconds that a message takes between a worker and its rank


class SimRank:
    """The process of a rank; what the agent knows of it is as of a real one."""

    pid = None
    waits = False  # for a template

    def __init__(self, setup: Any, take: Any, *_: Any) -> None:
        worker: SimWorker = asyncio.get_running_loop().owner  # type: ignore[attr-defined]
        spec = setup.spec
        self._worker, self._take = worker, take
        self._args = (spec, setup.payload)
        self._reason = ""
        self._program: RankProgram | None = None
        self._early: list[Any] = []
        self._exit = worker.process.create_future()
        self.process = Process(worker.world.hub, f"{worker.id}.{spec.start}", worker.process.host)
        self.process.owner = worker
        worker.ranks.add(self)
        worker.process.mourners.append(self.process.kill)
        self.process.mourners.append(self._end)
        Fiber(self.process, f"{self.process.name}/main", self._main)

    def _main(self) -> None:
        spec, payload = self._args
        self._program = RankProgram(spec, payload, self._to_worker, self._worker.world.runtime)
        for order in self._early:
            self._program.take(order)
        self._beat()
        self._program.run()
        self.process.call_later(HOP, self.process.kill)

    def _beat(self) -> None:
        self._program.beat()
        self.process.call_later(HEARTBEAT_INTERVAL_S, self._beat)

    def _end(self) -> None:
        self._worker.ranks.discard(self)
        self._worker.process.call_later(NOTICED, self._noticed)

    def _noticed(self) -> None:
        if not self._exit.done():
            self._exit.set_result(ProcessExit(reason=self._reason))

    # -- what an agent does with it ----------------------------------------------------------------

    async def wait(self) -> ProcessExit:
        return await self._exit

    def send(self, order: Any) -> None:
        self.process.call_later(HOP, self._deliver, order)

    def _deliver(self, order: Any) -> None:
        if self._program is None:
            self._early.append(order)
        else:
            self._program.take(order)

    def send_signal(self, number: int, reason: str = "") -> None:
        ordered = self._program is not None and self._program.session.ordered_to_end
        if number == signal.SIGKILL or ordered:
            self._reason = reason or self._reason
            # Not from within the process that is ended.
            self._worker.world.god.call_soon(self.process.kill)

    def state(self) -> ProcessState:
        world = self._worker.world
        busy = self.process in world.busy
        state = "stopped" if self.process.frozen and not busy else "alive"
        return ProcessState(state, cpu=world.hub.now if busy else 0.0, at=world.hub.now)

    def memory(self) -> int:
        return 0

    def _to_worker(self, message: Any) -> None:
        """Carry a message of the rank's to its worker."""
        world = self._worker.world
        if isinstance(message, RankEvent) and isinstance(message.event, (RankReady, LoopDone)):
            actor = world.actors.get(message.event.start)
            if actor is not None:
                actor.reported(message.event.version)
        if self.process.alive:
            self._worker.process.call_later(HOP, self._take, message)


class SimLauncher:
    """Launches nothing: a simulated rank begins by itself, and needs no template."""

    def start(self, *_: Any) -> None:
        pass

    launch = start

    async def close(self) -> None:
        pass


class SimNanny:
    """The process that starts a worker again when it has died."""

    def __init__(self, world: World, name: str, host: str) -> None:
        self.world, self.name = world, f"nanny-{name}"
        self.process = Process(world.hub, self.name, host)
        self.worker: SimWorker | None = None
        self.closing = False

    async def kill(self) -> None:
        worker = self.worker
        if worker is None:
            return
        # a worker that does not answer is asked for a while, then killed
        await asyncio.sleep(1.6 if worker.process.frozen else 0.02)
        worker.process.kill()

    def answer(self, message: Any) -> Any:
        return look_around(self.world, message)


class SimWorker:
    """A worker process."""

    def __init__(
        self, world: World, name: str, host: str, address: str, nanny: SimNanny | None, threads: int
    ) -> None:
        self.world, self.name, self.address, self.nanny = world, name, address, nanny
        self.nthreads = threads
        self.local_directory, self.security = "", None
        world.births += 1
        self.id = f"{name}#{world.births}"
        self.process = self.loop = Process(world.hub, self.id, host)
        self.process.owner = self
        world.processes.append(self.process)
        scheduler = world.scheduler
        self.inbound = Pipe(world.network, scheduler.process, self.process, self._receive)
        self.outbound = Pipe(
            world.network,
            self.process,
            scheduler.process,
            lambda message: scheduler.from_worker(self, message),
        )
        self.batched_stream = _Stream(self.outbound)
        self.scheduler = Remote(world.network, self.process, scheduler)
        self.stream_handlers: dict[str, Any] = {}
        self.plugins: dict[str, Any] = {}
        self.state = self
        self.status = Status.running
        self.running: dict[str, Fiber] = {}
        self.ranks: set[SimRank] = set()
        self._waiting: deque[SimTask] = deque()
        if nanny is not None:
            nanny.worker = self
            self.process.mourners.append(self._tell_nanny)
        self._lost = lambda: world.network.post(
            scheduler.process, self.process, self._lose_scheduler
        )
        if scheduler.process.alive:
            scheduler.process.mourners.append(self._lost)
        else:
            self._lost()
        world.network.post(self.process, scheduler.process, lambda: scheduler.add_worker(self))

    def _tell_nanny(self) -> None:
        nanny = self.nanny
        if nanny.worker is self and not nanny.closing:
            delay = 0.7 + self.world.hub.random.random() * 0.6
            nanny.process.call_later(delay, self.world.restart, nanny, self)

    def _receive(self, message: dict[str, Any]) -> None:
        op = message["op"]
        if op == "compute-task":
            self._waiting.append(message["task"])
            self._run_next()
        elif op == "free-keys":
            self._waiting = deque(t for t in self._waiting if t.key != message["key"])
        elif op == "close":
            self.close(leave_nanny=False)
        elif op in self.stream_handlers:
            self.stream_handlers[op](**{k: v for k, v in message.items() if k != "op"})

    def _run_next(self) -> None:
        while self._waiting and len(self.running) < self.nthreads:
            task = self._waiting.popleft()
            if task.key not in self.running:
                self.running[task.key] = Fiber(
                    self.process, f"{self.id}/{task.key}", lambda t=task: self._execute(t)
                )

    def _execute(self, task: SimTask) -> None:
        try:
            task.call()
        finally:
            self.process.call_soon(self._finished, task)

    def _finished(self, task: SimTask) -> None:
        self.running.pop(task.key, None)
        try:
            self.outbound.send({"op": "task-finished", "key": task.key})
        except OSError:
            pass  # the scheduler is gone
        self._run_next()

    def answer(self, message: Any) -> Any:
        """Answer a question of the scheduler's, as Dask's handlers do."""
        if message["op"] == "plugin-add":
            plugin = pickle.loads(message["plugin"])
            self.plugins[message["name"]] = plugin
            plugin.setup(self)
            return {"status": "OK"}
        return look_around(self.world, message)

    def _lose_scheduler(self) -> None:
        """Its connection breaks: without a scheduler, Dask's workers close."""
        self.inbound.close()
        self.outbound.close()
        self.close(leave_nanny=False)

    def close(self, *, leave_nanny: bool) -> None:
        """Close in good order: what has been told to, or a signal with notice."""
        if self.status is not Status.closing:
            self.status = Status.closing
            if self.nanny is not None and not leave_nanny:
                self.nanny.closing = True
            self.process.create_task(self._close())

    async def _close(self) -> None:
        for plugin in list(self.plugins.values()):
            await plugin.teardown(self)
        await asyncio.sleep(0.02)
        self.loop.hub.push(self.loop.time(), asyncio.Handle(self.process.kill, (), self.world.god))


class _Stream:
    """A worker's batched stream."""

    def __init__(self, pipe: Pipe) -> None:
        self._pipe = pipe

    def send(self, message: dict[str, Any]) -> None:
        self._pipe.send(message, again=may_come_twice(message))


def look_around(world: World, message: Any) -> Any:
    """What ``read_state`` returns of a process, from another one."""
    assert message["op"] == "run"
    (pid,) = pickle.loads(message["args"])
    process = world.processes[pid]
    if not process.alive:
        state = "gone"
    elif process.frozen:
        state = "alive" if process in world.busy else "stopped"
    else:
        state = "alive"
    cpu = world.hub.now if process in world.busy else 0.0
    return {"status": "OK", "result": ProcessState(state, cpu=cpu, at=world.hub.now)}
