"""Time that processes of this machine need to form a generation."""

from __future__ import annotations

import contextlib
import multiprocessing
import time
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.side_by_side import Failed

AHEAD_S = 0.1
PATIENCE_S = 120.0


def formed_in(backend: str, size: int, rounds: int) -> list[float]:
    """Return, for each round, the milliseconds until the last of `size` ranks was connected.

    A rank is connected when its first barrier has completed.
    """
    import torch

    from nbelastic.collectives import RendezvousServer

    torch.set_num_threads(1)
    context = multiprocessing.get_context("fork")  # before the store starts its thread
    crew: list[tuple[Any, Connection]] = []
    for rank in range(size):
        ours, its = context.Pipe()
        others = [ours, *(pipe for _, pipe in crew)]
        order = (its, others, backend, rank, size)
        process = context.Process(target=_serve, args=order, daemon=True)
        process.start()
        its.close()
        crew.append((process, ours))
    try:
        with contextlib.closing(RendezvousServer("127.0.0.1")) as store:
            return [_round(crew, store.address, number) for number in range(rounds + 1)][1:]
    finally:
        for _, pipe in crew:
            pipe.close()
        for process, _ in crew:
            process.join(PATIENCE_S)


def _round(crew: list[tuple[Any, Any]], store: tuple[str, int], number: int) -> float:
    moment = time.monotonic() + AHEAD_S
    for _, pipe in crew:
        pipe.send((store, number, moment))
    ends = []
    for _, pipe in crew:
        if not pipe.poll(PATIENCE_S):
            raise Failed("a rank did not connect")
        answer = pipe.recv()
        if isinstance(answer, str):
            raise Failed(answer)
        ends.append(answer)
    return 1e3 * (max(ends) - moment)


def _serve(pipe: Any, others: list[Connection], backend: str, rank: int, size: int) -> None:
    from nbelastic.collectives import Rendezvous, connect

    for end in others:
        end.close()  # inherited; open, it would hide from its rank that it has been left
    while True:
        try:
            store, number, moment = pipe.recv()
        except EOFError:
            return
        time.sleep(max(0.0, moment - time.monotonic()))
        rendezvous = Rendezvous(
            job=f"forming-{backend}-{size}",
            generation=number + 1,
            rank=rank,
            size=size,
            store=store,
            bind="127.0.0.1",
            timeout_s=60.0,
            backend=backend,
        )
        try:
            with contextlib.closing(connect(rendezvous).connect()) as communicator:
                communicator.barrier()
                pipe.send(time.monotonic())
        except Exception as error:
            pipe.send(f"{type(error).__name__}: {error}")
            raise
