"""Play many schedules: ``python -m tests.simulation 1000``."""

from __future__ import annotations

import argparse
import collections
import functools
import gc
import logging
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from .world import World, simulate

BLOCK = 50

Run = Callable[..., World]


def main() -> int:
    """Play schedules over all cores; tell the failing ones at the end."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("number", type=int, help="how many schedules")
    parser.add_argument("--seed", type=int, default=0, help="the first one's seed")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--trace", action="store_true", help="print what happens in each")
    parser.add_argument("--exact", action="store_true", help="storms over an exact training")
    options = parser.parse_args()
    seeds = range(options.seed, options.seed + options.number)
    run: Run = simulate
    if options.exact:
        from .exact import storm  # imports torch

        run = storm
    if options.trace:
        for seed in seeds:
            print(story(seed, run))
        return 0
    logging.disable()  # at a schedule's end, processes that are taken apart log that they fail
    began = time.monotonic()
    ends: collections.Counter[str] = collections.Counter()
    failing: list[tuple[int, str]] = []
    for part in _play_all(seeds, options.jobs, run):
        for seed, end, problem in part:
            ends[end] += 1
            if problem:
                failing.append((seed, problem))
                print(f"\nseed {seed}: {problem}", flush=True)
        seconds = time.monotonic() - began
        print(f"\r{ends.total()} schedules in {seconds:.0f} s", end="", flush=True)
    print("".join(f"\n{count:8} {end}" for end, count in ends.most_common()))
    if failing:
        print(f"{len(failing)} failing; the first, as it happened:\n")
        print(story(failing[0][0], run))
    return 1 if failing else 0


def _play_all(seeds: range, jobs: int, run: Run) -> Iterator[list[tuple[int, str, str]]]:
    blocks = [seeds[i : i + BLOCK] for i in range(0, len(seeds), BLOCK)]
    if jobs == 1:
        yield from (play(block, run) for block in blocks)
        return
    # In a forked process, greenlets that never end keep their frames: each lives for some blocks.
    fork = multiprocessing.get_context("fork")
    with fork.Pool(jobs, initializer=gc.freeze, maxtasksperchild=10) as pool:
        yield from pool.imap_unordered(functools.partial(play, run=run), blocks)


def play(seeds: range, run: Run = simulate) -> list[tuple[int, str, str]]:
    """Play some schedules; return how each ended, and what did not hold."""
    ends = []
    for seed in seeds:
        try:
            world = run(seed)
        except Exception as error:  # whatever it is, it is found, and belongs to this seed
            ends.append((seed, "BROKEN", f"{type(error).__name__}: {error}"))
        else:
            ends.append((seed, world.end, ""))
    gc.collect()
    return ends


def story(seed: int, run: Run = simulate) -> str:
    """Play a schedule once more; tell what happens, and what does not hold."""
    problem: BaseException | None = None
    try:
        world: Any = run(seed, tracing=True)
    except Exception as error:  # what is wrong with the schedule is what the story ends with
        problem, world = error, getattr(error, "world", None)
    lines = [f"seed {seed}"]
    if world is not None:
        lines += [f"  the function: {world.script}", f"  the options: {world.options}"]
        lines += [f"    {f.at:8.4f} {f.kind} {f.which} for {f.length:g} s" for f in world.faults]
        lines += world.hub.trace or []
    if problem is not None:
        lines.append(f"BROKEN: {type(problem).__name__}: {problem}")
    exact = "" if run is simulate else "--exact "
    lines.append(f"again with: python -m tests.simulation 1 {exact}--seed {seed} --trace")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
