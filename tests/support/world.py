"""Ranks as threads of one process, with real Gloo between them and no Dask."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from nbelastic.collectives import (
    Communicator,
    Rendezvous,
    RendezvousServer,
    SoloCommunicator,
    connect,
)
from nbelastic.elastic.ranks.context import Context, activate, when_formed

_generations = itertools.count(1)


class StaticContext(Context):
    """A member of a world that never changes, unless the test says so."""

    def __init__(self, communicator: Communicator, source: int = 0) -> None:
        super().__init__()
        self.rank = self.local_rank = communicator.rank
        self.size = self.local_size = communicator.size
        self.generation = communicator.generation
        self.source = source
        self._communicator = communicator  # type: ignore[assignment]
        self.flag = False
        self.agreed: list[bool] = []

    def change_flag(self) -> bool:
        return self.flag

    def agree(self, changed: bool) -> None:
        self.agreed.append(changed)


def world_of(rank: int, size: int, communicator: Communicator | None = None) -> StaticContext:
    """Return a member of a world; alone it has no exchanges with the others."""
    context = StaticContext(communicator or SoloCommunicator(generation=1))
    context.rank, context.size = rank, size
    return context


def in_time(call: Callable[[], Any], limit_s: float = 20.0) -> Any:
    """Return what a call in a thread returns, or raise its error; it must not wait for ever."""
    found: Future[Any] = Future()

    def run() -> None:
        try:
            found.set_result(call())
        except BaseException as error:
            found.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return found.result(limit_s)


def run_ranks(
    size: int,
    function: Callable[[StaticContext], Any],
    *,
    source: int = 0,
    make: Callable[[Rendezvous], Communicator] = connect,
) -> list[Any]:
    """Run `function(context)` on `size` ranks and return what each returned.

    Raises the first error in time: later ones may be its consequences, as a rank that fails aborts
    the operations of the others.
    """
    generation = next(_generations)
    store = RendezvousServer("127.0.0.1")
    results: list[Any] = [None] * size
    errors: list[BaseException] = []
    # A rank that has its last result leaves after the others have theirs, or after a moment: Gloo's
    # do not come at once on all ranks. In a job the driver sees to that.
    all_done = threading.Barrier(size)

    def rank_main(rank: int) -> None:
        communicator: Communicator
        if size == 1:
            communicator = SoloCommunicator(generation=generation)
        else:
            communicator = make(
                Rendezvous(
                    job="test",
                    generation=generation,
                    rank=rank,
                    size=size,
                    store=store.address,
                    bind="127.0.0.1",
                    timeout_s=30.0,
                )
            )
        try:
            communicator = communicator.connect()
            for tell in when_formed:
                tell(communicator)
            context = StaticContext(communicator, source)
            with activate(context):
                results[rank] = function(context)
            with contextlib.suppress(threading.BrokenBarrierError):
                all_done.wait(1)
        except BaseException as error:
            errors.append(error)
            all_done.abort()
            communicator.abort(f"rank {rank} raised {error!r}")
        finally:
            communicator.close()

    threads = [
        threading.Thread(target=rank_main, args=(rank,), name=f"rank-{rank}")
        for rank in range(size)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    store.close()
    if errors:
        raise errors[0]
    return results
