"""Represent the ranks of a worker to the scheduler.

A rank is known from :meth:`Agent.run` until its process has ended. An order to end that comes
before (its task still waits for a thread) is kept, and obeyed when the rank is to start.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import pickle
import shutil
import socket
import sys
from collections.abc import Callable, Iterable
from os import getpid
from typing import Any, cast

import dask.config
import psutil
from distributed import Worker, get_worker, secede
from distributed.comm.addressing import get_address_host
from distributed.diagnostics.plugin import WorkerPlugin
from distributed.utils import sync

from nbelastic import messages as m
from nbelastic.cluster.dask_compat import (
    LIMIT_S,
    PeriodicCall,
    after_shielding,
    hold_nothing_back,
    leave_on_termination,
    memory_limit,
    unacknowledged_s,
    until,
)
from nbelastic.cluster.wire import (
    FROM_AGENTS,
    HEARTBEAT_INTERVAL_S,
    PLUGIN,
    pack,
    unpack,
    versions,
)
from nbelastic.collectives.topology import host_identity
from nbelastic.elastic.ranks.runtime import DASK_CUDA, RankSpec

from .hosted_rank import HostedRank, Key
from .notices import NoticeWatcher
from .rank.channel import RankSetup
from .rank_process import RankLauncher

logger = logging.getLogger(__name__)

CUT_OFF = "its worker is cut off from the scheduler"
"""Reason for a rank to leave its generation by itself: the others may have gone on without it.

It goes back to its last commit and waits for the scheduler's next order, or for the end of the
worker, which Dask gives up after ``distributed.comm.timeouts.tcp``.
"""

LEAVE_GRACE = 5.0  # that a closing worker gives its ranks to reach their next commit, in seconds
ENDING_GRACE = 1.0  # that it then gives them to end after SIGTERM
POLL = 0.05


class Agent(WorkerPlugin):
    """Worker plugin; made by the scheduler plugin when a job wants the worker."""

    name = PLUGIN

    def setup(self, worker: Worker) -> None:
        """Take up work: listen to the scheduler and say hello."""
        self._worker = worker
        after_shielding(bool)()
        self._undo_termination = leave_on_termination(self._terminate)
        self._ranks: dict[Key, HostedRank] = {}
        self._early: dict[Key, list[m.RankOrder]] = {}  # that came before Dask's task of the rank
        self._payloads: dict[str, m.JobPayload] = {}
        self._unheard = False  # what it had sent was not acknowledged at the last heartbeat
        self._beats = PeriodicCall(HEARTBEAT_INTERVAL_S, self._send_beats)
        self._notices = NoticeWatcher(worker.loop, lambda each: self._send(m.NoticeReport(each)))
        worker.stream_handlers[PLUGIN] = self._handle
        hold_nothing_back(worker.batched_stream)
        slot = m.Slot(worker.id, worker.address, str(worker.name), host_identity())
        self._launcher = RankLauncher()
        with contextlib.suppress(OSError):  # of processes; the next rank tries again
            self._launcher.start()  # the host's rank template imports torch meanwhile
        self._send(m.Hello(slot, versions(), getpid()))

    async def teardown(self, worker: Worker) -> None:
        """Make ranks leave at their next commit, then end them: the worker is closing."""
        self._beats.stop()
        self._undo_termination()
        self._notices.close()
        await self._leave("its worker is closing")
        for rank in self._ranks.values():
            rank.end("its worker is closing", ENDING_GRACE)
        await until(lambda: not self._ranks, LEAVE_GRACE, POLL)
        await self._launcher.close()

    def _terminate(self, go_on: Callable[[], None]) -> None:
        """Make ranks leave before the process ends; called in a signal handler."""

        async def leave() -> None:
            try:
                await self._leave("its worker was terminated")
            finally:
                go_on()

        self._worker.loop.add_callback(leave)

    async def _leave(self, reason: str) -> None:
        """Make ranks leave at their next commit, as far as they reach it in time."""
        for (job, start), rank in list(self._ranks.items()):
            self._send(m.RankLeaving(job, start))
            rank.obey(m.RankOrder(job, start, m.EndRank(start, "leave", m.Text(reason))))
        await until(lambda: not self._ranks, LEAVE_GRACE, POLL)

    # -- ranks -------------------------------------------------------------------------------------

    async def run(self, spec: RankSpec, address: str) -> None:
        """Run a rank until its process has ended; its `spec` lacks its interface so far."""
        key = (spec.job, spec.start)
        spec = dataclasses.replace(spec, bind=self.bind(address))
        try:
            if not self._ends(key) and spec.job not in self._payloads:
                packed = await self._worker.scheduler.nbelastic_payload(job=spec.job)
                self._payloads[spec.job] = unpack(packed, m.JobPayload)
            if self._ends(key):
                del self._early[key]
                return
            setup = self._setup_of(spec, self._payloads[spec.job])
            rank = HostedRank(setup, self._launcher, self._worker, self._send)
        except Exception as error:
            problem = f"its process cannot be started: {error!r}"
            self._send(m.RankEvent(spec.job, m.RankRaised(spec.start, problem)))
            self._send(m.RankEnded(*key))
            return
        self._ranks[key] = rank
        for order in self._early.pop(key, ()):
            rank.obey(order)
        self._beats.start()
        self._send_beats()
        try:
            await rank.wait()
            if os.path.isdir(setup.scratch):
                await asyncio.to_thread(shutil.rmtree, setup.scratch, ignore_errors=True)
        finally:
            self._ranks.pop(key)
            self._send(m.RankEnded(*key))
            if not self._ranks:
                self._beats.stop()

    def _setup_of(self, spec: RankSpec, payload: m.JobPayload) -> RankSetup:
        dask_config = b""
        with contextlib.suppress(Exception):  # of any class
            # A client in the worker, of any task, has set `scheduler`; the rank has its own client.
            config = {k: each for k, each in dask.config.config.items() if k != "scheduler"}
            dask_config = pickle.dumps(config)
        return RankSetup(
            spec,
            payload,
            environment={**os.environ, **({DASK_CUDA: "1"} if "dask_cuda" in sys.modules else {})},
            directory=os.getcwd(),
            scratch=f"{self._worker.local_directory}/nbelastic-{spec.job}-{spec.start}",
            path=tuple(sys.path),
            threads=int(self._worker.state.nthreads),
            scheduler=str(self._worker.scheduler.address),
            security=self._worker.security,
            dask_config=dask_config,
        )

    def bind(self, address: str) -> str:
        """Return the interface for a rank to bind, by the worker's own address."""
        if address.startswith("inproc"):
            return "127.0.0.1"
        comm = getattr(self._worker.batched_stream, "comm", None)
        addresses = (address, self._worker.address, getattr(comm, "local_address", ""))
        return own_interface([str(get_address_host(each)) for each in addresses if each])

    # -- in the event loop -----------------------------------------------------------------------

    def _send(self, message: m.Message) -> None:
        # Without a scheduler, the worker is about to close.
        with contextlib.suppress(OSError):
            self._worker.batched_stream.send({"op": FROM_AGENTS, "message": pack(message)})

    def _send_beats(self) -> None:
        silence = unacknowledged_s(getattr(self._worker.batched_stream, "comm", None))
        # At the first of two in a row, data may have been sent just now, after a pause.
        before, self._unheard = self._unheard, silence >= LIMIT_S
        if before and self._unheard:
            for rank in self._ranks.values():
                rank.leave_generation(CUT_OFF)
        beats = ((job, rank.beat()) for (job, _), rank in self._ranks.items())
        self._send(m.Heartbeats(tuple(beats)))
        self._check_memory()

    def _check_memory(self) -> None:
        """End the largest rank if it and the worker have more memory than the worker may have.

        Dask's nanny ends a worker at the same limit, but counts the worker's own process only.
        """
        limit = memory_limit(self._worker)
        if limit is None or not self._ranks:
            return
        used = {key: rank.process.memory() for key, rank in self._ranks.items()}
        total = sum(used.values()) + psutil.Process().memory_info().rss
        if total > limit:
            largest = max(used, key=used.__getitem__)
            self._ranks[largest].kill(
                f"its worker has ended its process: out of memory (together they have "
                f"{total / 1e9:.2f} GB, and the worker's limit is {limit / 1e9:.2f} GB)"
            )

    def _handle(self, message: Any = None, **_: Any) -> None:
        """Take a message from the scheduler; if unreadable, its rank is ended."""
        try:
            self._take(unpack(message, m.ForgetOrder | m.WatchOrder | m.RankOrder))
        except Exception as error:  # the stream, and the worker with it, would close
            logger.exception("a message from the scheduler cannot be read")
            for rank in list(self._ranks.values()):
                rank.end(f"its worker cannot read a message: {error!r}")

    def _take(self, message: m.ForgetOrder | m.WatchOrder | m.RankOrder) -> None:
        if isinstance(message, m.ForgetOrder):
            self._payloads.pop(message.job, None)
            self._early = {k: each for k, each in self._early.items() if k[0] != message.job}
        elif isinstance(message, m.WatchOrder):
            self._notices.apply(message)
        else:
            self._obey(message)

    def _obey(self, order: m.RankOrder) -> None:
        key = (order.job, order.start)
        if (rank := self._ranks.get(key)) is not None:
            rank.obey(order)
        elif isinstance(order.effect, (m.EndRank, m.InjectFaults)) and not self._ends(key):
            self._early.setdefault(key, []).append(order)
            if isinstance(order.effect, m.EndRank):
                self._send(m.RankEvent(order.job, m.RankLeft(order.start)))
                self._send(m.RankEnded(*key, never=True))

    def _ends(self, key: Key) -> bool:
        """Whether a rank was ordered to end before its start."""
        return any(isinstance(each.effect, m.EndRank) for each in self._early.get(key, ()))


def run_rank(spec: RankSpec, slot: m.Slot) -> None:
    """Make the worker's agent run a rank, and wait for its end: the Dask task of a rank.

    It runs in a thread that has left the worker's pool. So Dask sees the worker as busy, and the
    pool's own threads are free for other tasks. A task that Dask sends again, to another worker at
    the address of its `slot`, finds another id there and does nothing.
    """
    worker = get_worker()
    agent = cast("Agent | None", worker.plugins.get(PLUGIN))
    if agent is not None and worker.id == slot.id:
        secede()
        sync(worker.loop, agent.run, spec, slot.worker)


def own_interface(hosts: Iterable[str]) -> str:
    """Return the first of `hosts` that this machine can bind, as an IP address; else 127.0.0.1.

    A worker's contact address may hold a name, which this machine may resolve to its loopback, or
    the address of a gateway before it, where nothing can listen.
    """
    for host in hosts:
        try:
            found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError):
            continue  # a name that is unknown here, or none at all, as in "inproc://"
        for family, kind, _, _, where in sorted(found):
            with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
                probe.bind(where)
                return str(where[0])
    return "127.0.0.1"
