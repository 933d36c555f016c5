"""Ranks as processes of this host, kept from test to test, and no Dask."""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import traceback
from typing import TYPE_CHECKING, Any

import cloudpickle

from nbelastic.collectives import Rendezvous, RendezvousServer, SoloCommunicator
from nbelastic.elastic.ranks.context import activate
from tests.collectives.worlds import MAKERS
from tests.support.world import StaticContext

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection

PATIENCE_S = 60.0

_generations = itertools.count(1)


class Ranks:
    """Processes that are ranks by turns. A context manager: they are gone at its end."""

    def __init__(self, most: int) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._lines: list[Connection] = []
        self._processes = []
        for _ in range(most):
            ours, theirs = spawn.Pipe()
            process = spawn.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self._lines.append(ours)
            self._processes.append(process)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for line in self._lines:
            line.close()
        for process in self._processes:
            process.join(PATIENCE_S)
            process.close()

    def run(
        self, size: int, function: Callable[[StaticContext], Any], kind: str = "auto"
    ) -> list[Any]:
        """Run `function(context)` on `size` ranks; return what each returned, or raise."""
        generation, what = next(_generations), cloudpickle.dumps(function)
        store = RendezvousServer("127.0.0.1")
        try:
            for rank, line in enumerate(self._lines[:size]):
                line.send((what, kind, {"rank": rank, "size": size}, generation, store.address))
            for line in self._lines[:size]:
                assert line.poll(PATIENCE_S), "a rank does not answer"
            answers = [line.recv() for line in self._lines[:size]]
        finally:
            store.close()
        errors = [text for fine, text in answers if not fine]
        assert not errors, "\n".join(errors)
        return [cloudpickle.loads(value) for _, value in answers]


def _serve(line: Connection) -> None:
    with contextlib.suppress(EOFError):
        while True:
            what, kind, place, generation, store = line.recv()
            try:
                answer = (True, cloudpickle.dumps(_run(what, kind, place, generation, store)))
            except Exception:
                answer = (False, traceback.format_exc())
            line.send(answer)


def _run(what: bytes, kind: str, place: Any, generation: int, store: tuple[str, int]) -> Any:
    communicator: Any = SoloCommunicator(generation=generation)
    if place["size"] > 1:
        rendezvous = Rendezvous(
            job="test",
            generation=generation,
            store=store,
            bind="127.0.0.1",
            timeout_s=PATIENCE_S / 2,
            **place,
        )
        communicator = MAKERS[kind](rendezvous).connect()
    try:
        context = StaticContext(communicator)
        with activate(context):
            return cloudpickle.loads(what)(context)
    except BaseException as error:
        communicator.abort(f"rank {communicator.rank} raised {error!r}")
        raise
    finally:
        communicator.close()
