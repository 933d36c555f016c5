"""Processes of this host that do what a test sends them, as ranks without Dask."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import itertools
import multiprocessing
import os
import queue
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import cloudpickle
import torch
import torch._dynamo  # once, before forks: a fake device's mode imports it, which takes seconds

from nbelastic.collectives import Rendezvous, RendezvousServer
from nbelastic.elastic.ranks.context import activate
from tests.collectives.worlds import BIND, MAKERS, terms
from tests.support.world import StaticContext

PATIENCE_S = 60.0

_forkserver = multiprocessing.get_context("forkserver")
_forkserver.set_forkserver_preload([__name__])


class Process:
    """A process, forked from one that has imported what ranks need, or spawned anew.

    Its functions have one argument, a namespace of the process. They are performed in order by its
    rank's thread, or `at_once`.
    """

    def __init__(self, context: Any = _forkserver) -> None:
        # Two pipes, because a thread that reads keeps a closed one open.
        its_requests, self._requests = context.Pipe(duplex=False)
        self._replies, its_replies = context.Pipe(duplex=False)
        self._process = context.Process(target=_serve, args=(its_requests, its_replies))
        self._process.start()
        for end in (its_requests, its_replies):
            end.close()
        self._numbers = itertools.count()
        self._futures: dict[int, Future[Any]] = {}
        threading.Thread(target=self._read, name="replies", daemon=True).start()

    def ask(self, function: Callable[[Any], Any], *, at_once: bool = False) -> Future[Any]:
        """Have the process call a function, and return a future of the outcome."""
        number, future = next(self._numbers), Future()
        self._futures[number] = future
        self._requests.send_bytes(cloudpickle.dumps((number, function, at_once)))
        return future

    def _read(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                number, error, value = cloudpickle.loads(self._replies.recv_bytes())
                future = self._futures.pop(number)
                future.set_result(value) if error is None else future.set_exception(error)

    @property
    def pid(self) -> int:
        number: int = self._process.pid
        return number

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self._process.kill()
        self.leave()

    def hang_up(self) -> None:
        """Make the process end by itself."""
        self._requests.close()

    def leave(self) -> int | None:
        """Wait until it has, and return its exit code."""
        self.hang_up()
        self._process.join(PATIENCE_S)
        return self._process.exitcode


def _serve(requests: Connection, replies: Connection) -> None:
    torch.set_num_threads(1)
    here, lock = SimpleNamespace(communicator=None), threading.Lock()
    queued: queue.SimpleQueue[tuple[int, Callable[[Any], Any]]] = queue.SimpleQueue()

    def answer(number: int, function: Callable[[Any], Any]) -> None:
        error = value = None
        try:
            value = function(here)
        except Exception as raised:
            traceback.print_exc()
            error = raised
        with lock:
            replies.send_bytes(cloudpickle.dumps((number, error, value)))

    def work() -> None:
        while True:
            answer(*queued.get())

    threading.Thread(target=work, name="rank", daemon=True).start()
    with contextlib.suppress(EOFError):
        while True:
            number, function, at_once = cloudpickle.loads(requests.recv_bytes())
            answer(number, function) if at_once else queued.put((number, function))
    # As any process ends: multiprocessing leaves out much of that.
    ctypes.pythonapi.Py_Exit(0)


class Ranks:
    """Processes that are ranks by turns. A context manager: they are gone at its end."""

    def __init__(self, most: int) -> None:
        spawn = multiprocessing.get_context("spawn")
        self.processes = [Process(spawn) for _ in range(most)]

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.leave()

    def run(
        self, size: int, function: Callable[[StaticContext], Any], kind: str = "auto"
    ) -> list[Any]:
        """Run `function(context)` on `size` ranks; return what each returned, or raise."""
        with contextlib.closing(RendezvousServer(BIND)) as store:
            its = terms(0, size, store.address, timeout_s=PATIENCE_S / 2)
            answers = [
                process.ask(functools.partial(_run, function, kind, its, rank))
                for rank, process in enumerate(self.processes[:size])
            ]
            return [answer.result(PATIENCE_S) for answer in answers]


def _run(function: Any, kind: str, its: Rendezvous, rank: int, _here: Any) -> Any:
    communicator: Any = MAKERS[kind](dataclasses.replace(its, rank=rank)).connect()
    try:
        context = StaticContext(communicator)
        with activate(context):
            return function(context)
    except BaseException as error:
        communicator.abort(f"rank {rank} raised {error!r}")
        raise
    finally:
        communicator.close()
