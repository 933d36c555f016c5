"""Dask as nbelastic knows it: the scheduler.

Behaves as the design's measured facts say: a killed worker's connection breaks and the scheduler
removes it after some milliseconds; one that is stopped is not noticed; a pinned task runs when its
worker has a thread free. Workers and nannies are in :mod:`.worker`, clients in :mod:`.kernels`; in
``tests/cluster/shared_cluster.py`` the same books stand without processes between.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from distributed.core import Status

from nbelastic.cluster.scheduler import job

from .loop import Process
from .network import Pipe, may_come_twice

if TYPE_CHECKING:
    from .worker import SimWorker
    from .world import World

KEEPER = "fire-and-forget"  # Dask's own client of tasks that nobody waits for


@dataclass(eq=False)
class WorkerState:
    """What the scheduler knows of a worker."""

    address: str
    name: str
    nanny: str | None = None
    nthreads: int = 1
    resources: dict[str, float] = field(default_factory=dict)
    worker: Any = None
    status: Status = Status.running
    processing: dict[SimTask, float] = field(default_factory=dict)
    long_running: set[SimTask] = field(default_factory=set)


@dataclass(eq=False)
class SimTask:
    """A task pinned to an address."""

    key: str
    address: str
    call: Callable[[], object]
    state: str = "no-worker"
    wanted: set[str] = field(default_factory=set)


class FakeScheduler:
    """Books of workers, tasks and clients; a subclass says how messages travel."""

    loop: Any
    worker_send: Any
    client_send: Any
    retire_workers: Any = None

    def __init__(self) -> None:
        self.workers: dict[str, WorkerState] = {}
        self.stream_comms: dict[str, Any] = {}
        self.client_comms: dict[str, Any] = {}
        self.tasks: dict[str, SimTask] = {}
        self.clients: dict[str, Any] = {KEEPER: None}  # as Dask has it
        self.plugins: dict[str, Any] = {}
        self.handlers: dict[str, Any] = {
            "retire_workers": self.retire_workers,
            "adaptive_target": lambda target_duration=None: len(self.workers),
        }
        self.stream_handlers: dict[str, Any] = {}

    def workers_to_close(self, **_: Any) -> list[str]:
        return []

    def _hook(self, name: str, **kwargs: Any) -> None:
        for plugin in list(self.plugins.values()):
            result = getattr(plugin, name)(scheduler=self, **kwargs)
            if hasattr(result, "__await__"):
                self.loop.create_task(result)

    def _remove(self, address: str) -> None:
        state = self.workers.pop(address)
        state.status = Status.closed
        self.stream_comms.pop(address, None)
        for task in list(state.processing):
            task.state = "no-worker"
        state.processing.clear()
        self._hook("remove_worker", worker=address, stimulus_id="simulated")

    def remove_client(self, client: str) -> None:
        if client in self.clients:
            del self.clients[client]
            for task in list(self.tasks.values()):
                if client in task.wanted:
                    self.client_releases_keys([task.key], client)
            self._hook("remove_client", client=client)

    # -- tasks --------------------------------------------------------------------------------

    def _submit(self, client: str, key: str, address: str, call: Callable[[], object]) -> None:
        new = key not in self.tasks
        task = self.tasks.setdefault(key, SimTask(key, address, call))
        task.wanted.add(client)
        if new:
            if address in self.workers:
                self._assign(task, self.workers[address])
            self._hook("update_graph", client=client, tasks=[key], keys={key})

    def _assign(self, task: SimTask, state: WorkerState) -> None:
        task.state = "processing"
        state.processing[task] = 0.5
        self.worker_send(state.address, {"op": "compute-task", "task": task})

    def _task_finished(self, worker: str, key: str) -> None:
        task = self.tasks.get(key)
        state = self.workers.get(worker)
        if task is None or state is None or task not in state.processing:
            return
        del state.processing[task]
        task.state = "memory"
        for client in list(task.wanted):
            if client == KEEPER:
                task.wanted.discard(client)
            else:
                self.client_send(client, {"op": "key-in-memory", "key": key})
        self._forget_unwanted(task)

    def client_desires_keys(self, keys: Any, client: str) -> None:
        for key in keys:
            if key in self.tasks:
                self.tasks[key].wanted.add(client)

    def client_releases_keys(self, keys: Any, client: str) -> None:
        for key in keys:
            if key in self.tasks:
                self.tasks[key].wanted.discard(client)
                self._forget_unwanted(self.tasks[key])

    def _forget_unwanted(self, task: SimTask) -> None:
        if not task.wanted and self.tasks.get(task.key) is task:
            del self.tasks[task.key]
            state = self.workers.get(task.address)
            if state is not None and state.processing.pop(task, None) is not None:
                self.worker_send(task.address, {"op": "free-keys", "key": task.key})
            task.state = "forgotten"


class SimScheduler(FakeScheduler):
    """The scheduler in its process, with streams to workers and clients."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self.world, self.network = world, world.network
        self.process = self.loop = Process(world.hub, "scheduler", "S")
        self.everybody: list[Any] = []
        self._client_pipes: dict[str, Pipe] = {}
        self.handlers |= {
            "restart_workers": self.restart_workers,
            "register_plugin": self.register_plugin,
        }
        self.stream_handlers |= {
            "task-finished": self._task_finished,
            "submit": self._submit,
            "client-releases-keys": self.client_releases_keys,
            "close-client": self.remove_client,
        }

    async def register_plugin(self, plugin: Any) -> None:
        if plugin.name not in self.plugins:
            self.plugins[plugin.name] = plugin
            job.draw_chance = self.world.random.random
            await plugin.start(self)

    # -- workers ------------------------------------------------------------------------------

    def add_worker(self, worker: SimWorker) -> None:
        """Take in a worker that registers."""
        if not worker.process.alive:
            return
        if worker.address in self.workers:  # not noticed yet that its predecessor is gone
            self.loop.call_later(0.2, self.add_worker, worker)
            return
        nanny = worker.nanny.name if worker.nanny is not None else None
        state = self.workers[worker.address] = WorkerState(
            worker.address, worker.name, nanny, worker.nthreads, worker=worker
        )
        self.stream_comms[worker.address] = worker.inbound
        worker.process.mourners.append(lambda: self._hear_of(worker))
        for task in self.tasks.values():
            if task.state == "no-worker" and task.address == worker.address:
                self._assign(task, state)
        self._hook("add_worker", worker=worker.address)

    def _hear_of(self, worker: SimWorker) -> None:
        """Its connection breaks: the scheduler sees that some milliseconds later."""
        self.world.network.post(
            worker.process, self.process, lambda: self.loop.call_later(0.004, self._lost, worker)
        )

    def _lost(self, worker: SimWorker) -> None:
        worker.inbound.close()
        worker.outbound.close()
        state = self.workers.get(worker.address)
        if state is not None and state.worker is worker:
            self._remove(worker.address)

    async def remove_worker(self, address: str, *, stimulus_id: str, **_: Any) -> str:
        if address not in self.workers:
            return "already-removed"
        self.worker_send(address, {"op": "close", "reason": stimulus_id})
        self._remove(address)
        return "OK"

    async def restart_workers(self, workers: list[str], **_: Any) -> dict[str, str]:
        """Have nannies kill their workers; part with those that have none."""
        for address in workers:
            state = self.workers.get(address)
            if state is None:
                continue
            nanny = state.worker.nanny
            if nanny is None:
                await self.remove_worker(address, stimulus_id="restart")
                continue
            try:
                kill = self.network.call(self.process, nanny.process, nanny.kill, {})
                await asyncio.wait_for(kill, 30.0)
            except (OSError, asyncio.TimeoutError):
                await self.remove_worker(address, stimulus_id="restart")
        return {}

    async def retire_workers(self, workers: Any = None, names: Any = None, **_: Any) -> None:
        addresses = [
            address
            for address, state in self.workers.items()
            if address in (workers or ()) or state.name in (names or ())
        ]
        for address in addresses:
            self.workers[address].status = Status.closing_gracefully
        await asyncio.sleep(0.012)
        for address in addresses:
            await self.remove_worker(address, stimulus_id="retire")

    async def broadcast(
        self, *, msg: Any, workers: Any, nanny: bool = False, on_error: str = "raise", **_: Any
    ) -> dict[str, Any]:
        """Ask workers, or their nannies, and collect the answers."""
        answers: dict[str, Any] = {}
        for address in workers:
            if address not in self.workers and not nanny:
                answers[address] = OSError("no worker listens there")
                continue
            state = self.workers[address]
            target = state.worker.nanny if nanny else state.worker
            if target is None:
                continue
            try:
                answers[address] = await self.network.call(
                    self.process, target.process, target.answer, {"message": msg}
                )
            except Exception as error:  # as in Dask, whatever it is
                if on_error != "return":
                    raise
                answers[address] = error
        return answers

    def worker_send(self, address: str, message: dict[str, Any]) -> None:
        try:
            again = may_come_twice(message)
            self.stream_comms[address].send(message, again=again)
        except OSError:
            pass  # about to be noticed

    def from_worker(self, worker: SimWorker, message: dict[str, Any]) -> None:
        op = message["op"]
        if op in self.stream_handlers:
            fields = {key: value for key, value in message.items() if key != "op"}
            self.stream_handlers[op](worker=worker.address, **fields)

    # -- clients ------------------------------------------------------------------------------

    def add_client(self, client: Any) -> None:
        """Take in a client that registers, also if it does so again."""
        self.clients[client.id] = client
        if client not in self.everybody:
            self.everybody.append(client)
        self._hook("add_client", client=client.id)
        self._client_pipes[client.id] = client.inbound

    def knows(self, pipe: Pipe) -> bool:
        """Return whether a client is connected by this stream."""
        return pipe in self._client_pipes.values()

    def client_send(self, client: str, message: dict[str, Any]) -> None:
        pipe = self._client_pipes.get(client)
        if pipe is not None:
            try:
                pipe.send(message, again=may_come_twice(message))
            except OSError:
                pass  # about to be noticed

    def from_client(self, client: str, message: dict[str, Any]) -> None:
        fields = {key: value for key, value in message.items() if key != "op"}
        handler = self.stream_handlers.get(message["op"])
        self.world.hub.require(
            handler, f"the scheduler does not know {message['op']}: Dask breaks the connection"
        )
        if client in self.clients and handler is not None:
            result = handler(client=client, **fields)
            if hasattr(result, "__await__"):
                self.loop.create_task(result)

    def remove_client(self, client: str) -> None:
        if client in self.clients:
            self._client_pipes.pop(client).close()
        super().remove_client(client)
