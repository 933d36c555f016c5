"""Probe the process of a silent worker from its nanny, or from its host.

Nannies and workers have a handler of Dask's that runs a function, so nothing needs to be installed
there.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from distributed.protocol.pickle import dumps
from distributed.protocol.serialize import Serialize, Serialized, deserialize

from nbelastic.cluster.process_state import ProbeHistory, ProcessState, Verdict, read_state

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from distributed import Scheduler

    from .records import WorkerRecord

PAUSE = 5.0
"""Seconds for which an observer is not asked again that could not be asked."""


class ProcessProbe:
    """Has the states of processes read by their nannies, or by other workers of their hosts.

    Nothing here waits for an answer. No observer is asked again about a process while its answer
    is due: one that is stopped too leaves no more than one question open.
    `workers` are by slot; ``found(slot, verdict)`` takes each :class:`.Verdict`.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        workers: dict[str, WorkerRecord],
        found: Callable[[str, Verdict], None],
    ) -> None:
        self._scheduler = scheduler
        self._workers = workers
        self._found = found
        self._questions: set[asyncio.Task[None]] = set()

    def warm_up(self, slot: str) -> None:
        """Probe once through the nanny, in good time: the first probe makes it import modules."""
        worker = self._workers[slot]
        state = self._scheduler.workers.get(worker.address)
        if state is not None and state.nanny:
            self._send(worker, ProbeHistory(), (worker.address, True))

    def probe(self, slot: str) -> None:
        """Probe a worker's process soon, by an observer that owes no answer."""
        worker = self._workers[slot]
        if worker.probes is None:
            worker.probes = ProbeHistory()
        free = (each for each in self._observers(worker) if each not in worker.being_asked)
        observer = next(free, None)
        if observer is not None:
            self._send(worker, worker.probes, observer)

    def _send(self, worker: WorkerRecord, probes: ProbeHistory, observer: tuple[str, bool]) -> None:
        worker.being_asked.add(observer)
        task = asyncio.ensure_future(self._ask(worker, probes, *observer))
        self._questions.add(task)
        task.add_done_callback(self._questions.discard)

    def stop(self) -> None:
        """Wait for no more answers."""
        for task in self._questions:
            task.cancel()

    def _observers(self, worker: WorkerRecord) -> Iterator[tuple[str, bool]]:
        """Yield what may see a worker's process: its nanny, then workers of its host with a beat.

        Each is the address of a worker, and whether its nanny is meant.
        """
        state = self._scheduler.workers.get(worker.address)
        if state is not None and state.nanny:
            yield worker.address, True
        for other in self._workers.values():
            if other is not worker and other.host == worker.host and other.probes is None:
                yield other.address, False

    async def _ask(
        self, worker: WorkerRecord, probes: ProbeHistory, address: str, nanny: bool
    ) -> None:
        message = {"op": "run", "function": dumps(read_state), "args": dumps((worker.process,))}
        try:
            if address not in self._scheduler.workers:
                return
            answers = await self._scheduler.broadcast(
                msg=message, workers=[address], nanny=nanny, on_error="return"
            )
            state = _state_in(answers.get(address))
            if state is None:
                await asyncio.sleep(PAUSE)
            elif worker.probes is probes:  # else it has sent a heartbeat since
                verdict = probes.add(state)
                if verdict is not None:
                    self._found(worker.slot.id, verdict)
        finally:
            worker.being_asked.discard((address, nanny))


def _state_in(answer: Any) -> ProcessState | None:
    """Return the state in the answer of a ``run`` handler, None if there is none in it."""
    if not isinstance(answer, dict) or answer.get("status") != "OK":
        return None
    result = answer.get("result")
    if isinstance(result, Serialized):  # as the scheduler leaves what it only passes on
        result = deserialize(result.header, result.frames)
    elif isinstance(result, Serialize):  # came without being written down
        result = result.data
    return result if isinstance(result, ProcessState) else None
