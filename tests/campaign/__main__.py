"""Play many programs and say what went wrong."""

from __future__ import annotations

import sys
import time

import torch

from .play import judge, play
from .programs import program

KINDS = ("shm", "gloo", "hierarchical")


def main() -> int:
    torch.set_num_threads(1)
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    first = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    begin, longest, wrong = time.monotonic(), 0.0, 0
    for seed in range(first, first + count):
        for kind in KINDS:
            started = time.monotonic()
            each = program(seed)
            trouble = judge(each, courses := play(each, kind))
            longest = max(longest, time.monotonic() - started)
            if trouble:
                wrong += 1
                print(f"{kind}: {trouble}\n{each}")
                for rank, course in enumerate(courses):
                    print(f"  rank {rank} went: {course.steps}, end {course.end!r}")
    took = time.monotonic() - begin
    print(
        f"{count} programs on {', '.join(KINDS)}: {wrong} wrong; "
        f"{took:.1f} s, the longest {longest:.2f} s"
    )
    return wrong > 0


if __name__ == "__main__":
    sys.exit(main())
