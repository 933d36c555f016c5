"""Processes of ranks, which run the real program of a rank."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any

from nbelastic.cluster.process_state import ProcessState
from nbelastic.cluster.wire import HEARTBEAT_INTERVAL_S
from nbelastic.cluster.worker.rank.program import RankProgram
from nbelastic.cluster.worker.rank_process import ProcessExit
from nbelastic.messages import LoopDone, RankEvent, RankReady
from tests.membership.ranks import NOTICED

from .fibers import Fiber
from .loop import Process

if TYPE_CHECKING:
    from .worker import SimWorker

HOP = 0.0002
"""Seconds that a message takes between a worker and its rank."""


class SimRank:
    """The process of a rank; what the agent knows of it is as of a real one."""

    pid = None
    waits = False  # for a template

    def __init__(self, worker: SimWorker, spec: Any, payload: Any, take: Any) -> None:
        self._worker, self._take = worker, take
        self._args = (spec, payload)
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
        assert self._program is not None
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
