"""Ranks that are killed and stopped at random moments inside collectives over shared memory.

``python -m tests.native.test_faults FAULTS SEED`` is that alone. Ranks are forked from its process,
which has one thread, and plays the part of their agents.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import random
import signal
import struct
import subprocess
import sys
import time
from typing import Any

import pytest

from nbelastic.collectives.reduction_tree import Blocks
from nbelastic.errors import CollectiveError
from nbelastic.native import core

SIZES = (1, 256, 5_000, 100_000, 1_500_000)
LIMIT_S = 20.0

_fork = multiprocessing.get_context("fork")


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("faults", [24, pytest.param(2000, marks=pytest.mark.nightly)])
def test_ranks_that_are_killed_or_stopped_hang_or_corrupt_no_other(faults):
    """All others hear of it, no sum is wrong, no two ranks are apart by more than a step."""
    command = [sys.executable, "-m", "tests.native.test_faults", str(faults), "100"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1700, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


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
    steps, wrong = 0, False
    try:
        while True:
            count, value = chosen.choice(SIZES), chosen.randrange(100)
            inside = (chosen.randrange(2) + rank) % 2
            leaves = chosen.choice((0, 0, 1, size, 2 * size + 1))
            wrong |= not reduce(group, rank, size, leaves, count, value, inside)
            steps += 1
            if steps == 1 and rank == 0:
                line.send({})
    except CollectiveError as error:
        line.send({"steps": steps, "reason": str(error), "wrong": wrong, "dead": group.dead})
    group.close()


def reduce(group, rank, size, leaves, count, value, inside):
    """Sum `value` and numbers; return whether each element of the sum is right.

    These are of ranks, or along a tree of its leaves, which ranks have one, several or none of.
    """
    blocks = Blocks.even(leaves or size, size)
    nodes = [sum(value + leaf for leaf in range(*node)) for node in blocks.covers[rank]]
    memories, places = zip(*(filled(group, count, n, inside) for n in nodes or [-1]), strict=True)
    if leaves == 0:
        ticket = group.allreduce_async(places[0], core.TYPES["float32"], core.OPS["sum"])
    else:  # the package's own function imports torch
        tree = core.Tree([*blocks.quotas], [len(each) for each in blocks.covers], [*blocks.order])
        ours = [*places[: len(nodes)]]
        ticket = group.allreduce_tree_async(ours, places[0], tree, core.TYPES["float32"])
    group.wait(ticket)
    expected = sum(value + leaf for leaf in range(blocks.leaves))
    return memories[0] == memoryview(struct.pack("f", expected) * count)


def filled(group, count, value, inside):
    """Return memory with a value, in the segment or outside, and its place."""
    block = group.empty(4 * count) if inside else bytearray(4 * count)
    memory = memoryview(block).cast("B")
    memory[:] = struct.pack("f", value) * count
    return memory, [(ctypes.addressof(ctypes.c_char.from_buffer(memory)), count)]


def strike(size: int, seed: int) -> None:
    """Let a world run, kill or stop a rank, and see that all others end."""
    chosen = random.Random(seed)
    world = World(size, seed)
    victim, killed = chosen.randrange(size), chosen.choice((True, False))
    try:
        world.report(0)
        time.sleep(chosen.uniform(0.01, 0.04))
        os.kill(world.ranks[victim].pid, signal.SIGKILL if killed else signal.SIGSTOP)
        if not killed:
            time.sleep(0.02)  # the others are waiting for it by now
            agent = core.Group(world.fd, victim, size, 1.0)
            agent.abort("it was stopped")
        told = [world.report(rank) for rank in range(size) if rank != victim]
        reason = (
            f"the process of rank {victim} of this host is gone" if killed else "it was stopped"
        )
        assert {each["reason"] for each in told} == {reason}, f"seed {seed}: {told}"
        assert all(each["dead"] == [victim] * killed for each in told), f"seed {seed}: {told}"
        if not killed:
            agent.close()
            os.kill(world.ranks[victim].pid, signal.SIGCONT)
            told.append(world.report(victim))  # it may not take itself for a member
        steps = [each["steps"] for each in told]
        assert max(steps) - min(steps) <= 1, f"seed {seed}: ranks are apart by more than a step"
        assert not any(each["wrong"] for each in told), f"seed {seed}: a wrong sum"
    finally:
        world.close()


def main(faults: int, seed: int) -> None:
    before = sorted(os.listdir("/proc/self/fd"))
    for number in range(faults):
        strike(2 + number % 3, seed + number)
    assert sorted(os.listdir("/proc/self/fd")) == before, "descriptors are left"


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
