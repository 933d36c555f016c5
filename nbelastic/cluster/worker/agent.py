"""Represent the ranks of a worker to the scheduler.

Runs in the worker, in its event loop, but for :meth:`Agent.report`, :meth:`Agent.output` and
:meth:`Agent.payload`: the threads of ranks call these, which hand over to the loop. Messages of a
rank's thread are sent in the order of its calls.

A rank is known from :meth:`Agent.attach` to :meth:`Agent.detach`. An order to end that comes before
(its task still waits for a thread) is kept, and obeyed when the rank attaches.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import multiprocessing
import pickle
from typing import TYPE_CHECKING, Any

from distributed.comm.addressing import get_address_host
from distributed.core import Status
from distributed.diagnostics.plugin import WorkerPlugin
from distributed.utils import sync

from nbelastic.cluster.dask_compat import (
    ConnectionCheck,
    PeriodicCall,
    resume,
    shorten_batching,
    unsent_bytes,
)
from nbelastic.cluster.process_state import own_process_id
from nbelastic.cluster.sendable import sendable
from nbelastic.cluster.wire import (
    FROM_AGENTS,
    HEARTBEAT_INTERVAL_S,
    PLUGIN,
    AbortOrder,
    ChangeOrder,
    EndRankOrder,
    FaultReport,
    FaultsOrder,
    ForgetOrder,
    Heartbeats,
    Hello,
    JobPayload,
    NoticeReport,
    PlanOrder,
    RankBeat,
    RankEnded,
    RankEvent,
    RankLeaving,
    RankOrder,
    RankOutput,
    RankTelemetry,
    ReleaseOrder,
    SaveOrder,
    WatchOrder,
    pack,
    unpack,
)
from nbelastic.collectives.topology import host_identity
from nbelastic.elastic.runtime import DEFAULT_RUNTIME
from nbelastic.membership import NoticeSource, RankLeft, RankRaised, Slot

from .environment import own_interface, versions
from .fault_injector import FaultInjector
from .notice_watcher import NoticeWatcher
from .output_buffer import OutputBuffer
from .signals import ignore_interrupts, leave_on_termination, pass_on_user_signals

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

    from distributed import Worker

    from nbelastic.cluster.rank_error import PackedError
    from nbelastic.cluster.wire import Message
    from nbelastic.elastic.session import Session
    from nbelastic.membership import Event

__all__ = ["Agent"]

logger = logging.getLogger(__name__)

Key = tuple[str, int]

CUT_OFF = "its worker is cut off from the scheduler"
"""Reason for a rank to leave its generation by itself: the others may have gone on without it.

It goes back to its last commit and waits for the scheduler's next order, or for the end of the
worker, which Dask gives up after ``distributed.comm.timeouts.tcp``.
"""

COLLECT_AFTER = 1.0
"""Seconds without a rank after which garbage is searched for, which stops a process for 0.2 s."""

LEAVE_GRACE = 5.0
"""Seconds that a closing worker gives its ranks to reach their next commit."""


class Agent(WorkerPlugin):
    """Worker plugin; made by the scheduler plugin when a job wants the worker."""

    name = PLUGIN
    runtime = DEFAULT_RUNTIME

    def setup(self, worker: Worker) -> None:
        """Take up work: listen to the scheduler and say hello."""
        self._worker = worker
        self._heed_interrupts = ignore_interrupts()
        self._heed_termination = leave_on_termination(self._terminate)
        self._sessions: dict[Key, Session] = {}
        self._ended_early: set[Key] = set()
        self._payloads: dict[str, JobPayload] = {}
        self._output = OutputBuffer(worker.loop, self._send_output, self._bytes_waiting)
        self._connection = ConnectionCheck()
        self._beats = PeriodicCall(HEARTBEAT_INTERVAL_S, self._send_beats)
        self._notices = NoticeWatcher(worker.loop, self._send, self._shield_nanny)
        worker.stream_handlers[PLUGIN] = self._handle
        shorten_batching(worker.batched_stream)
        slot = Slot(worker.id, worker.address, str(worker.name), host_identity())
        self._send(Hello(slot, versions(), own_process_id()))

    async def teardown(self, worker: Worker) -> None:
        """Let ranks leave at their next commit, then end them: the worker is closing."""
        self._beats.stop()
        self._heed_termination()
        self._notices.close()
        await self._leave("its worker is closing")
        await self._notices.stopped()
        if self._sessions:
            for session in self._sessions.values():
                session.on_end("evict", "its worker is closing")
            await self._wait_for_ranks()  # Dask waits for its pool's threads only
        if worker.status is not Status.closing:
            self._heed_interrupts()
        elif _ends_with(worker):
            gc.freeze()  # a last search for garbage through all of torch would take it a second

    def _shield_nanny(self, on: bool) -> None:
        """Have the nanny pass on signals that would end it, or not any more."""
        nanny: Any = self._worker.nanny  # its address, whatever Dask declares

        async def tell() -> None:
            function, values = pickle.dumps(pass_on_user_signals), pickle.dumps({"on": on})
            try:
                await self._worker.rpc(nanny).run(function=function, kwargs=values)
            except OSError:
                pass  # it is gone, and the worker with it

        if nanny is not None and self._worker.status is not Status.closing:
            self._worker.loop.add_callback(tell)

    def _terminate(self, go_on: Callable[[], None]) -> None:
        """Have ranks leave before the process ends; called in a signal handler."""

        async def leave() -> None:
            try:
                await self._leave("its worker was terminated")
            finally:
                go_on()

        self._worker.loop.add_callback(leave)

    async def _leave(self, reason: str) -> None:
        """Have ranks leave at their next commit, as far as they reach it in time."""
        for (job, start), session in list(self._sessions.items()):
            self._send(RankLeaving(job, start))
            session.on_end("leave", reason)
        await self._wait_for_ranks()

    async def _wait_for_ranks(self) -> None:
        """Wait until no rank is left, for as long as a closing worker gives them."""
        for _ in range(int(LEAVE_GRACE / 0.05)):
            if not self._sessions:
                break
            await asyncio.sleep(0.05)

    # -- for the rank's thread -------------------------------------------------------------------

    def report(
        self,
        key: Key,
        event: Event,
        result: bytes | None = None,
        error: PackedError | None = None,
    ) -> None:
        """Send an event of a rank to the job's driver, after what it has printed before."""
        message = RankEvent(key[0], event, result, error)
        self._worker.loop.add_callback(self._report, key, message)

    def output(self, key: Key, text: str) -> None:
        """Send what a rank has printed, soon."""
        self._output.write(key, text)

    def payload(self, job: str) -> JobPayload:
        """Return the payload of a job."""
        if job not in self._payloads:
            self._wait_for(self._fetch, job)
        return self._payloads[job]

    async def _fetch(self, job: str) -> None:
        payload = unpack(await self._worker.scheduler.nbelastic_payload(job=job))
        assert isinstance(payload, JobPayload)
        self._payloads[job] = payload

    def attach(self, key: Key, session: Session) -> bool:
        """Attach a rank; return False if it had an order to end before."""
        return bool(self._wait_for(self._attach, key, session))

    async def _attach(self, key: Key, session: Session) -> bool:
        if key in self._ended_early:
            self._ended_early.discard(key)
            return False
        self._sessions[key] = session
        self._beats.start()
        self._send_beats()
        return True

    def _wait_for(self, function: Callable[..., Awaitable[Any]], *args: Any) -> Any:
        """Have a coroutine run in the event loop and return what it returns."""
        return sync(self._worker.loop, function, *args)

    def detach(self, key: Key) -> None:
        """Forget a rank: its task is over."""
        self._worker.loop.add_callback(self._detach, key)

    def _detach(self, key: Key) -> None:
        self._sessions.pop(key, None)
        self._output.flush(key)
        self._send(RankEnded(*key))
        if not self._sessions:
            self._beats.stop()
            self._worker.loop.call_later(COLLECT_AFTER, self._collect)

    def bind(self, address: str) -> str:
        """Return the address of the interface on which a rank is reached by others.

        Parameters
        ----------
        address : str
            The scheduler's address of the worker, by which others reach it.
        """
        if address.startswith("inproc"):
            return "127.0.0.1"
        comm = getattr(self._worker.batched_stream, "comm", None)
        addresses = (address, self._worker.address, getattr(comm, "local_address", ""))
        return own_interface([str(get_address_host(each)) for each in addresses if each])

    def _collect(self) -> None:
        """Free what the last rank has left in cycles: its model, its memory shared with others."""
        if not self._sessions and self._worker.status is Status.running:
            gc.collect()

    @property
    def threads(self) -> int:
        """How many threads the worker has."""
        return int(self._worker.state.nthreads)

    # -- in the event loop -----------------------------------------------------------------------

    def _send(self, message: Message) -> None:
        try:
            packed = sendable(pack(message))
            self._worker.batched_stream.send({"op": FROM_AGENTS, "message": packed})
        except OSError:
            pass  # the scheduler is gone; the worker is about to close for that reason

    def _send_beats(self) -> None:
        resume(self._worker.batched_stream)
        cut_off = self._connection.lost(getattr(self._worker.batched_stream, "comm", None))
        for session in self._sessions.values():
            session.nudge()
            if cut_off and session.plan is not None and session.plan.loop:
                session.on_abort(session.generation, CUT_OFF)
        beats = (RankBeat(job, session.beat()) for (job, _), session in self._sessions.items())
        self._send(Heartbeats(tuple(beats)))
        for key in self._sessions:
            self._send_telemetry(key)

    def _send_telemetry(self, key: Key) -> None:
        session = self._sessions.get(key)
        if session is not None:
            self._send(RankTelemetry(*key, *session.telemetry.take()))

    def _report(self, key: Key, message: RankEvent) -> None:
        try:
            self._output.flush(key)
            self._send_telemetry(key)
        finally:  # other ranks wait for the event, whatever is wrong with output and telemetry
            self._send(message)

    def _send_output(self, key: Key, text: str) -> None:
        self._send(RankOutput(*key, text))

    def _bytes_waiting(self) -> int:
        """Return how many bytes wait for the scheduler to read."""
        return unsent_bytes(self._worker.batched_stream)

    def _handle(self, message: Any = None, **_: Any) -> None:
        """Take a message from the scheduler; one that cannot be read costs the rank alone."""
        try:
            self._take(unpack(message))
        except Exception as error:  # the stream, and the worker with it, would close
            logger.exception("a message from the scheduler cannot be read")
            problem = f"its worker cannot read a message: {error!r}"
            for key in _meant(message, self._sessions):
                self._sessions[key].on_end("evict", problem)
                self.report(key, RankRaised(key[1], problem))

    def _take(self, message: Message) -> None:
        if isinstance(message, ForgetOrder):
            self._payloads.pop(message.job, None)
            self._ended_early = {key for key in self._ended_early if key[0] != message.job}
        elif isinstance(message, WatchOrder):
            self._notices.heed(message)
        elif isinstance(message, RankOrder):
            self._obey((message.job, message.start), message)
        else:
            raise TypeError(f"an agent does not expect {type(message).__name__}")

    def _obey(self, key: Key, order: RankOrder) -> None:
        session = self._sessions.get(key)
        if session is not None and isinstance(order, FaultsOrder):
            self._injector_of(key, session).take(order.faults, order.drop)
        elif session is not None:
            deliver(session, order)
        elif isinstance(order, EndRankOrder) and key not in self._ended_early:
            self._ended_early.add(key)
            self.report(key, RankLeft(key[1]))
            self._worker.loop.add_callback(self._send, RankEnded(*key))

    def _injector_of(self, key: Key, session: Session) -> FaultInjector:
        """Return a rank's fault injector; make it with the first order."""
        observer = session.telemetry.observer
        if isinstance(observer, FaultInjector):
            return observer

        def tell(what: str, **fields: Any) -> None:
            self._send(FaultReport(*key, what, **fields))

        def give_notice(seconds: float) -> None:
            self._send(NoticeReport(NoticeSource.CHAOS, "", seconds, host=False))

        injector = FaultInjector(self._worker, session, tell, give_notice)
        session.telemetry.observer = injector
        return injector


def _meant(message: Any, keys: Iterable[Key]) -> list[Key]:
    """Return the ranks here that a message which cannot be read was meant for."""
    body = message.get("body") if isinstance(message, dict) else None
    if not isinstance(body, dict):
        return []
    return [key for key in keys if key == (body.get("job"), body.get("start"))]


def _ends_with(worker: Worker) -> bool:
    """Return whether this process is there for a worker alone."""
    return worker.nanny is not None and multiprocessing.parent_process() is not None


def deliver(session: Session, order: RankOrder) -> None:
    """Hand an order over to a rank."""
    if isinstance(order, PlanOrder):
        session.on_plan(order.plan)
        if session.telemetry.observer is not None:
            session.telemetry.observer.plan()
    elif isinstance(order, AbortOrder):
        session.on_abort(order.generation, order.reason)
    elif isinstance(order, ChangeOrder):
        session.on_notice(order.generation)
    elif isinstance(order, ReleaseOrder):
        session.on_release(order.generation)
    elif isinstance(order, SaveOrder):
        session.on_save()
    elif isinstance(order, EndRankOrder):
        session.on_end(order.how, order.reason, order.save)
