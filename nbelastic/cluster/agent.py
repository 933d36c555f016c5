"""The agent: the part of nbelastic that lives in a worker's event loop and speaks for its ranks.

Threads: everything but :meth:`Agent.report`, :meth:`Agent.output` and :meth:`Agent.payload` runs
in the worker's event loop. Those three are called by ranks' threads and only hand over to the
loop. What ranks' threads hand over is sent in the order in which they did so.

A rank is known from :meth:`attach` to :meth:`detach`. An order to end that comes for a rank that
is not there yet (its task still waits for a thread) is kept, and obeyed when it comes.
"""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
from typing import TYPE_CHECKING, Any

from distributed.comm.addressing import get_address_host
from distributed.core import Status
from distributed.diagnostics.plugin import WorkerPlugin
from distributed.utils import sync

from nbelastic.elastic.port import REAL
from nbelastic.membership import RankLeft, pack_event, unpack_plan

from .environment import host_identity, versions
from .harm import Harm
from .haste import hasten
from .look import own_process
from .profiler import Profiler
from .protocol import BEAT_INTERVAL, PLUGIN, Message
from .tether import Tether
from .timer import Every

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from distributed import Worker

    from nbelastic.elastic.session import Session
    from nbelastic.membership import Event

__all__ = ["Agent"]

Key = tuple[str, int]

CUT_OFF = "its worker is cut off from the scheduler"
"""Why a rank leaves its generation by itself: the others may have gone on without it.

It goes back to its last commit and waits for what the scheduler says, when that is back, or for
the end of the worker, which Dask gives up after ``distributed.comm.timeouts.tcp``.
"""

LEAVE_GRACE = 5.0
"""Seconds that a closing worker gives its ranks to reach their next commit."""


class Agent(WorkerPlugin):
    """Worker plugin; made by the scheduler plugin when a job wants the worker."""

    name = PLUGIN
    means = REAL

    def setup(self, worker: Worker) -> None:
        """Take up work: listen to the scheduler and say hello."""
        self._worker = worker
        self._sessions: dict[Key, Session] = {}
        self._ended_early: set[Key] = set()
        self._payloads: dict[str, bytes] = {}
        self._output: dict[Key, list[str]] = {}
        self._tether = Tether()
        self._profiler = Profiler(worker)
        self._beats = Every(BEAT_INTERVAL, self._send_beats)
        worker.stream_handlers[PLUGIN] = self._handle
        slot = {
            "id": worker.id,
            "worker": worker.address,
            "name": str(worker.name),
            "host": host_identity(),
        }
        hasten(worker.batched_stream)
        self._send("nbelastic-hello", slot=slot, versions=versions(), process=own_process())

    async def teardown(self, worker: Worker) -> None:
        """Let ranks leave at their next commit, then end them: the worker is closing."""
        self._beats.stop()
        for (job, start), session in list(self._sessions.items()):
            self._send("nbelastic-leaving", job=job, start=start)
            session.on_end("leave", "its worker is closing")
        for _ in range(int(LEAVE_GRACE / 0.05)):
            if not self._sessions:
                break
            await asyncio.sleep(0.05)
        for session in self._sessions.values():
            session.on_end("evict", "its worker is closing")
        if worker.status is Status.closing and _ends_with(worker):
            gc.freeze()  # a last search for garbage through all of torch would take it a second

    # -- for the rank's thread -------------------------------------------------------------------

    def report(self, key: Key, event: Event, attachment: object = None) -> None:
        """Send an event of a rank to the job's driver, after what it has printed before."""
        self._worker.loop.add_callback(self._report, key, pack_event(event), attachment)

    def output(self, key: Key, text: str) -> None:
        """Send what a rank has printed, soon."""
        self._worker.loop.add_callback(self._collect_output, key, text)

    def payload(self, job: str) -> bytes:
        """Return the pickled function of a job."""
        if job not in self._payloads:
            self._wait_for(self._fetch, job)
        return self._payloads[job]

    async def _fetch(self, job: str) -> None:
        self._payloads[job] = await self._worker.scheduler.nbelastic_payload(job=job)

    def attach(self, key: Key, session: Session) -> bool:
        """Make a rank known; False if it was told to end before it began."""
        return bool(self._wait_for(self._attach, key, session))

    async def _attach(self, key: Key, session: Session) -> bool:
        if key in self._ended_early:
            self._ended_early.discard(key)
            return False
        self._sessions[key] = session
        self._profiler.rest()
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
        self._flush_output(key)
        self._send("nbelastic-ended", job=key[0], start=key[1])
        if not self._sessions:
            self._beats.stop()
            self._profiler.go_on()

    @property
    def bind(self) -> str:
        """Address of the interface that Dask uses."""
        address = self._worker.address
        if address.startswith("inproc"):
            return "127.0.0.1"
        return str(get_address_host(address))

    @property
    def threads(self) -> int:
        """How many threads the worker has."""
        return int(self._worker.state.nthreads)

    # -- in the event loop -----------------------------------------------------------------------

    def _send(self, op: str, **fields: Any) -> None:
        try:
            self._worker.batched_stream.send({"op": op, **fields})
        except OSError:
            pass  # the scheduler is gone; the worker is about to close for that reason

    def _send_beats(self) -> None:
        cut_off = self._tether.lost(getattr(self._worker.batched_stream, "comm", None))
        for session in self._sessions.values():
            session.nudge()
            if cut_off and session.plan is not None and session.plan.loop:
                session.on_abort(session.generation, CUT_OFF)
        beats = [[job, pack_event_beat(s)] for (job, _), s in self._sessions.items()]
        self._send("nbelastic-beats", beats=beats)
        for key in self._sessions:
            self._send_vitals(key)

    def _send_vitals(self, key: Key) -> None:
        session = self._sessions.get(key)
        if session is not None:
            figures, rows = session.vitals.take()
            self._send("nbelastic-vitals", job=key[0], start=key[1], figures=figures, rows=rows)

    def _report(self, key: Key, event: Message, attachment: object) -> None:
        try:
            self._flush_output(key)
            self._send_vitals(key)
        finally:  # others wait for it, whatever was wrong with what people are told beside it
            self._send("nbelastic-report", job=key[0], event=event, attachment=attachment)

    def _collect_output(self, key: Key, text: str) -> None:
        pending = self._output.setdefault(key, [])
        pending.append(text)
        if len(pending) == 1:
            self._worker.loop.call_later(0.1, self._flush_output, key)

    def _flush_output(self, key: Key) -> None:
        pending = self._output.pop(key, None)
        if pending:
            self._send("nbelastic-output", job=key[0], start=key[1], text="".join(pending))

    def _handle(self, job: str, do: str, start: int = -1, **fields: Any) -> None:
        """Take in a message from the scheduler."""
        if do == "forget":
            self._payloads.pop(job, None)
            self._ended_early = {key for key in self._ended_early if key[0] != job}
            return
        session = self._sessions.get((job, start))
        if session is not None and do == "harm":
            self._harm_of((job, start), session).take(**fields)
        elif session is not None:
            deliver(session, do, fields)
        elif do == "end" and (job, start) not in self._ended_early:
            self._ended_early.add((job, start))
            self.report((job, start), RankLeft(start))
            self._worker.loop.add_callback(self._send, "nbelastic-ended", job=job, start=start)

    def _harm_of(self, key: Key, session: Session) -> Harm:
        """Return what does harm to a rank on order; make it with the first order."""
        passer = session.vitals.passer
        if isinstance(passer, Harm):
            return passer

        def tell(what: str, **fields: Any) -> None:
            self._send("nbelastic-harm", job=key[0], start=key[1], what=what, **fields)

        session.vitals.passer = harm = Harm(self._worker, session, tell)
        return harm


def _ends_with(worker: Worker) -> bool:
    """Return whether this process is there for a worker alone."""
    return worker.nanny is not None and multiprocessing.parent_process() is not None


def deliver(session: Session, do: str, fields: Message) -> None:
    """Hand a message over to a rank."""
    if do == "plan":
        session.on_plan(unpack_plan(fields["plan"]))
        if session.vitals.passer is not None:
            session.vitals.passer.plan()
    elif do == "abort":
        session.on_abort(fields["generation"], fields["reason"])
    elif do == "notice":
        session.on_notice(fields["generation"])
    elif do == "release":
        session.on_release(fields["generation"])
    elif do == "end":
        session.on_end(fields["how"], fields["reason"])


def pack_event_beat(session: Session) -> list[Any]:
    """Write a rank's heartbeat as ``[start, progress, waiting, version]``."""
    beat = session.beat()
    return [beat.start, beat.progress, beat.waiting, beat.version]
