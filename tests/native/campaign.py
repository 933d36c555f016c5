"""Kills and stops ranks at random moments inside collectives over shared memory.

``python -m tests.native.campaign FAULTS SEED`` prints, as JSON, what came of it. Ranks are forked
from this process, which has one thread; it plays the part of their agents.
"""

from __future__ import annotations

import ctypes
import functools
import json
import multiprocessing
import os
import random
import signal
import statistics
import struct
import sys
import time
from collections import Counter
from typing import Any

from nbelastic.collectives.reduction_tree import Blocks
from nbelastic.native import core

SIZES = (1, 256, 5_000, 100_000, 1_500_000)
LIMIT_S = 20.0

_fork = multiprocessing.get_context("fork")


class World:
    """Some ranks that reduce all the time, each in a process; each reports how it ended."""

    def __init__(self, size: int, seed: int) -> None:
        self.fd = core.create(size)
        self.reports, self.ranks = [], []
        for rank in range(size):
            report, told = _fork.Pipe(duplex=False)
            process = _fork.Process(target=serve, args=(self.fd, rank, size, seed, told))
            process.start()
            told.close()
            self.reports.append(report)
            self.ranks.append(process)

    def report(self, rank: int) -> dict[str, Any]:
        """Wait for what a rank has to say: nothing when rank 0 has begun, and how each ended."""
        assert self.reports[rank].poll(LIMIT_S), f"rank {rank} hangs"
        told: dict[str, Any] = self.reports[rank].recv()
        return told

    def close(self) -> None:
        for rank, report in zip(self.ranks, self.reports, strict=True):
            rank.kill()
            rank.join()
            rank.close()
            report.close()
        os.close(self.fd)


def serve(fd, rank, size, seed, line):
    """Reduce until the segment is broken."""
    group = core.Group(fd, rank, size, 60.0)
    chosen = random.Random(seed)
    steps = 0
    wrong = False
    try:
        while True:
            count = chosen.choice(SIZES)
            value = chosen.randrange(100)
            inside = (chosen.randrange(2) + rank) % 2
            leaves = chosen.choice((0, 0, 1, size, 2 * size + 1))
            how = reduce if leaves == 0 else functools.partial(reduce_along_tree, leaves)
            wrong = wrong or not how(group, rank, size, count, float(value), inside)
            steps += 1
            if steps == 1 and rank == 0:
                line.send({})
    except core.Broken as error:
        at = time.monotonic()
        line.send({"steps": steps, "at": at, "reason": str(error), "wrong": wrong})
    group.close()


def reduce(group, rank, size, count, value, inside):
    """Sum `value + rank` over all ranks; return whether each element of the sum is right."""
    memory, places = filled(group, count, value + rank, inside)
    group.wait(group.allreduce_async(places, core.TYPES["float32"], core.OPS["sum"]))
    expected = size * value + size * (size - 1) / 2
    return memory == memoryview(struct.pack("f", expected) * count)


def reduce_along_tree(leaves, group, rank, size, count, value, inside):
    """Sum `value + leaf` over all leaves, which ranks have one, several or none of."""
    blocks = Blocks.even(leaves, size)
    nodes = [sum(value + leaf for leaf in range(*node)) for node in blocks.covers[rank]]
    memories, places = zip(*(filled(group, count, n, inside) for n in nodes or [-1.0]), strict=True)
    # The package's own function imports torch.
    tree = core.Tree([*blocks.quotas], [len(each) for each in blocks.covers], [*blocks.order])
    ours = [*places[: len(nodes)]]
    group.wait(group.allreduce_tree_async(ours, places[0], tree, core.TYPES["float32"]))
    expected = sum(value + leaf for leaf in range(leaves))
    return memories[0] == memoryview(struct.pack("f", expected) * count)


def filled(group, count, value, inside):
    """Return memory with a value, in the segment or outside, and its place."""
    block = group.empty(4 * count) if inside else bytearray(4 * count)
    memory = memoryview(block).cast("B")
    memory[:] = struct.pack("f", value) * count
    return memory, [(ctypes.addressof(ctypes.c_char.from_buffer(memory)), count)]


def strike(size: int, seed: int) -> dict[str, object]:
    """Let a world run, kill or stop a rank, and see that all others end."""
    chosen = random.Random(seed)
    world = World(size, seed)
    try:
        victim = chosen.randrange(size)
        kind = chosen.choice(("kill", "stop"))
        world.report(0)
        time.sleep(chosen.uniform(0.01, 0.04))
        os.kill(world.ranks[victim].pid, signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
        if kind == "stop":
            time.sleep(0.02)  # the others are waiting for it by now
            struck = time.monotonic()
            agent = core.Group(world.fd, victim, size, 1.0)
            agent.abort("it was stopped")
        else:
            struck = time.monotonic()
        told = [world.report(rank) for rank in range(size) if rank != victim]
        if kind == "stop":
            agent.close()
            os.kill(world.ranks[victim].pid, signal.SIGCONT)
            told.append(world.report(victim))  # it may not take itself for a member
        steps = [each["steps"] for each in told]
        assert max(steps) - min(steps) <= 1, f"seed {seed}: ranks are apart by more than a step"
        assert not any(each["wrong"] for each in told), f"seed {seed}: a wrong sum"
        return {
            "kind": kind,
            "ms": max(1000 * (each["at"] - struck) for each in told[: size - 1]),
            "steps": max(steps),
            "reason": told[0]["reason"],
        }
    finally:
        world.close()


def main(faults: int, seed: int) -> None:
    before = sorted(os.listdir("/proc/self/fd"))
    ends = [strike(2 + number % 3, seed + number) for number in range(faults)]
    assert sorted(os.listdir("/proc/self/fd")) == before, "descriptors are left"
    times = sorted(end["ms"] for end in ends)
    json.dump(
        {
            "faults": Counter(end["kind"] for end in ends),
            "reasons": sorted({end["reason"] for end in ends}),
            "steps": sum(end["steps"] for end in ends),
            "p50_ms": statistics.median(times),
            "p99_ms": times[int(0.99 * (len(times) - 1))],
        },
        sys.stdout,
    )


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
