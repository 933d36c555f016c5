"""Sums of ranks that share a GPU: how long they take, and what a rank that is killed costs.

All ranks are processes that use one GPU. ``sums`` compares CUDA IPC with the way through the host's
memory, with NCCL, and with NCCL as torch uses it, by milliseconds of an allreduce of float32
(medians). ``kills`` kills a rank at random moments, while the others sum and the GPU is busy. It
prints milliseconds (medians and maxima): from the kill until the survivors are told, from there
until their next generation is formed, and until its first sum is there. ``resets`` forms
generations one after the other, and prints the memory of the GPU that is used after the third and
after the last. Both take place over CUDA IPC, or ``--over nccl``, for which each rank is a host of
its own. Exits with 1 if a sum is wrong, memory grows, or a target is missed, with 2 if there is no
GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import random
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import torch

from benchmarks.figures import table
from benchmarks.meet import Place, meet, meet_over_nccl, place
from nbelastic.collectives import Communicator, Rendezvous, RendezvousServer, connect
from nbelastic.errors import CollectiveError

PATIENCE_S = 60.0
SIZES = [4 << 10, 1 << 20, 25 << 20, 100 << 20]
WAYS = ["cuda_ipc", "shm", "nccl", "torch-nccl"]
MOST_MS = {"cuda_ipc": 10.0, "nccl": 800.0}
"""From the moment at which survivors are told until their next sum is there."""

MOST_GROWN = {"cuda_ipc": 1 << 20, "nccl": 32 << 20}
"""Bytes that resets may leave behind on the GPU, all of them together."""

SETTLE_S = {"cuda_ipc": 0.0, "nccl": 3.0}
"""What NCCL needs to give back the memory of generations that have ended, with much to spare."""

_spawn = multiprocessing.get_context("fork")  # from a process that has not used CUDA


class Member:
    """A rank, by orders."""

    def __init__(self, over: str) -> None:
        os.environ.setdefault("NBELASTIC_NCCL_SHARED_GPU", "1")
        torch.set_num_threads(1)
        self._over = over
        self.communicator: Communicator | None = None
        self.buffer = torch.empty(100 << 18, device="cuda")
        self.factor = torch.randn(4096, 4096, device="cuda")

    def form(self, store: tuple[str, int], generation: int, rank: int, size: int) -> str:
        """Leave a generation, and become a rank of the next."""
        if self.communicator is not None:
            self.communicator.close()
        terms = Rendezvous(
            job="gpu",
            generation=generation,
            rank=rank,
            size=size,
            store=store,
            bind="127.0.0.1",
            timeout_s=PATIENCE_S,
            backend=self._over,
        )
        self.communicator = connect(terms).connect()
        return self.communicator.name + self.communicator.fallback_reason

    def sum(self) -> bool:
        """Sum a hundred megabytes; return whether the sum is right."""
        communicator = self.communicator
        assert communicator is not None
        self.buffer.fill_(communicator.rank + 1.0)
        communicator.allreduce(self.buffer)
        wanted = communicator.size * (communicator.size + 1) / 2
        return bool((self.buffer == wanted).all())

    def sum_until_told(
        self, store: tuple[str, int], generation: int, rank: int, size: int
    ) -> tuple[float, float, float, bool, str]:
        """Sum, with much else to do for the GPU, until a peer dies; go on with the others.

        Returns the moments of being told, of the next generation, and of its first sum.
        """
        try:
            while True:
                for _ in range(4):
                    torch.mm(self.factor, self.factor)
                self.sum()
        except CollectiveError as error:
            told, said = time.monotonic(), str(error)
        self.form(store, generation, rank, size)
        formed = time.monotonic()
        right = self.sum()
        return told, formed, time.monotonic(), right, said

    def used(self) -> int:
        """Return how many bytes of the GPU are used, by all processes."""
        time.sleep(SETTLE_S[self._over])
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        return total - free


class Timed:
    """A rank that measures sums by all ways."""

    def __init__(self, rank: int, size: int, where: Place, ways: list[str]) -> None:
        torch.set_num_threads(1)
        torch.zeros(1, device="cuda")
        self._nccl = meet_over_nccl(rank, size, where) if "torch-nccl" in ways else None
        os.environ.setdefault("NBELASTIC_NCCL_SHARED_GPU", "1")
        self._communicators = {w: meet(rank, size, w, where) for w in ways if w != "torch-nccl"}

    def measure(self, way: str, nbytes: int, rounds: int) -> list[float]:
        """Return milliseconds of each sum."""
        values = torch.zeros(nbytes // 4, device="cuda")
        times = []
        for _ in range(rounds + 2):
            torch.cuda.synchronize()
            began = time.perf_counter()
            if way == "torch-nccl":
                self._nccl.all_reduce(values)
            else:
                self._communicators[way].allreduce(values)
            torch.cuda.synchronize()
            times.append(1e3 * (time.perf_counter() - began))
        return times[2:]

    def close(self) -> None:
        for communicator in self._communicators.values():
            communicator.close()
        if self._nccl is not None:
            self._nccl.destroy_process_group()


class Process:
    """A process that carries out orders."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self.line, theirs = _spawn.Pipe()
        self._process = _spawn.Process(target=_serve, args=(make, theirs), daemon=True)
        self._process.start()
        theirs.close()

    def order(self, what: str, *arguments: object) -> None:
        self.line.send((what, arguments))

    def answer(self) -> Any:
        if not self.line.poll(PATIENCE_S):
            raise TimeoutError("a rank does not answer")
        fine, value = self.line.recv()
        if not fine:
            raise RuntimeError(value)
        return value

    def kill(self) -> tuple[float, threading.Thread, list[float]]:
        """Kill it; return when, and a list that will have the moment at which it is reaped."""
        reaped: list[float] = []

        def wait() -> None:
            self._process.join()
            reaped.append(time.monotonic())

        moment = time.monotonic()
        self._process.kill()
        thread = threading.Thread(target=wait)
        thread.start()
        return moment, thread, reaped

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.line.send(None)
        self._process.join(10.0)
        if self._process.is_alive():
            self._process.kill()


def _serve(make: Callable[[], Any], line: Connection) -> None:
    try:
        member = make()
        while (order := line.recv()) is not None:
            what, arguments = order
            line.send((True, getattr(member, what)(*arguments)))
        getattr(member, "close", lambda: None)()
    except BaseException as error:
        line.send((False, f"{type(error).__name__}: {error}"))
    os._exit(0)


@contextlib.contextmanager
def crew(makes: list[Callable[[], Any]]) -> Iterator[list[Process]]:
    processes = [Process(make) for make in makes]
    try:
        yield processes
    finally:
        for process in processes:
            process.close()


def together(processes: list[Process], what: str, *arguments: object) -> list[Any]:
    for process in processes:
        process.order(what, *arguments)
    return [process.answer() for process in processes]


def form(processes: list[Process], store: RendezvousServer, generation: int, over: str) -> None:
    for rank, process in enumerate(processes):
        process.order("form", store.address, generation, rank, len(processes))
    for process in processes:
        name = process.answer()
        if name != over:
            raise RuntimeError(f"the ranks met over {name}")


def sums(size: int, rounds: int, ways: list[str]) -> bool:
    with place() as where:

        def make(rank: int) -> Callable[[], Any]:
            return lambda: Timed(rank, size, where, ways)

        rows = []
        with crew([make(rank) for rank in range(size)]) as processes:
            for nbytes in SIZES:
                row = [f"{nbytes / (1 << 20):g} MB"]
                for way in ways:
                    times = together(processes, "measure", way, nbytes, rounds)
                    slowest = [max(each) for each in zip(*times, strict=True)]
                    row.append(f"{statistics.median(slowest):.3f}")
                rows.append(row)
    print(f"\n{size} ranks: milliseconds of a sum\n{table(['', *ways], rows)}", flush=True)
    return True


def kills(size: int, count: int, over: str) -> bool:
    dice = random.Random(size)
    store = RendezvousServer("127.0.0.1")
    numbers = iter(range(1, 1_000_000))
    fine = True
    figures: dict[str, list[float]] = {}
    said: set[str] = set()
    with crew([lambda: Member(over)] * size) as processes:
        form(processes, store, next(numbers), over)
        for _ in range(count):
            victim, generation = dice.randrange(size), next(numbers)
            for rank, process in enumerate(processes):
                place_then = rank - (rank > victim)
                process.order("sum_until_told", store.address, generation, place_then, size - 1)
            time.sleep(0.05 + dice.random() / 20)
            dead = processes.pop(victim)
            moment, thread, reaped = dead.kill()
            outcomes = [process.answer() for process in processes]
            thread.join()
            dead.line.close()
            told = max(outcome[0] for outcome in outcomes)
            formed = max(outcome[1] for outcome in outcomes)
            summed = max(outcome[2] for outcome in outcomes)
            fine = fine and all(outcome[3] for outcome in outcomes)
            said |= {outcome[4] for outcome in outcomes}
            for name, value in {
                "reaped": reaped[0] - moment,
                "told": told - moment,
                "formed after that": formed - told,
                "next sum after told": summed - told,
            }.items():
                figures.setdefault(name, []).append(1e3 * value)
            processes.append(Process(lambda: Member(over)))
            form(processes, store, next(numbers), over)
            fine = fine and all(together(processes, "sum"))
    store.close()
    rows = [
        [name, f"{statistics.median(each):.1f}", f"{max(each):.1f}"]
        for name, each in figures.items()
    ]
    print(f"\n{size} ranks over {over}, {count} kills: milliseconds (all sums right: {fine})")
    print(table(["", "median", "most"], rows))
    print("survivors were told:", *sorted(said)[:3], sep="\n  ", flush=True)
    return fine and statistics.median(figures["next sum after told"]) <= MOST_MS[over]


def resets(size: int, count: int, over: str) -> bool:
    store = RendezvousServer("127.0.0.1")
    used: list[int] = []
    took: list[float] = []
    with crew([lambda: Member(over)] * size) as processes:
        for number in range(1, count + 1):
            began = time.monotonic()
            form(processes, store, number, over)
            took.append(1e3 * (time.monotonic() - began))
            if not all(together(processes, "sum")):
                raise RuntimeError("a sum is wrong")
            if number in (min(3, count), count):
                used.append(together(processes, "used")[0])
    store.close()
    first, last = used[0], used[-1]
    print(
        f"\n{size} ranks over {over}, {count} resets: {first >> 20} MB after the third, "
        f"{last >> 20} MB after the last; {statistics.median(took):.1f} ms each",
        flush=True,
    )
    return last <= first + MOST_GROWN[over]


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parts = ["sums", "kills", "resets"]
    parser.add_argument("what", nargs="*", default=parts, metavar="|".join(parts), help="(all)")
    parser.add_argument("--quick", action="store_true", help="3 of each, on 2 ranks")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="(2 4)")
    parser.add_argument("--rounds", type=int, default=30, help="sums of each size (30)")
    parser.add_argument("--kills", type=int, default=30, help="(30)")
    parser.add_argument("--resets", type=int, default=50, help="(50)")
    parser.add_argument("--over", choices=[*MOST_MS], default="cuda_ipc", help="(cuda_ipc)")
    parser.add_argument("--ways", nargs="+", default=WAYS, choices=WAYS, help="(all)")
    options = parser.parse_args()
    if unknown := set(options.what) - set(parts):
        parser.error(f"{unknown}: must be of {parts}")
    if options.quick:
        options.ranks, options.rounds, options.kills, options.resets = [2], 3, 3, 3
    if not torch.backends.cuda.is_built() or not os.path.exists("/dev/nvidiactl"):
        print("there is no GPU", file=sys.stderr)  # torch would look for it by using CUDA
        return 2
    fine = True
    for size in options.ranks:
        for what in options.what:
            if what == "sums":
                fine &= sums(size, options.rounds, options.ways)
            elif what == "kills":
                fine &= kills(size, options.kills, options.over)
            else:
                fine &= resets(size, options.resets, options.over)
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
