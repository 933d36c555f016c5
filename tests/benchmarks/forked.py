"""Ranks of a benchmark's crew, forked from a process that has imported torch.

A rank that starts as a program imports torch and, with its first optimizer, the compiler: seconds
that a benchmark needs, because its processes are to be like a user's, and a test does not.
"""

from __future__ import annotations

import os
import subprocess

from distributed.utils import get_mp_context


class ForkedRank:
    """A rank with the interface of ``Popen``, as far as a crew uses it."""

    def __init__(self, command: list[str], _environment: dict[str, str]) -> None:
        arguments = command[command.index("benchmarks.rank") + 1 :]
        self._process = get_mp_context().Process(target=_serve, args=(arguments,))
        self._process.start()
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("a forked rank", timeout or 0.0)
        return self._process.exitcode


def _serve(arguments: list[str]) -> None:
    import torch

    from benchmarks import rank

    os.setsid()
    torch.set_num_threads(1)  # as OMP_NUM_THREADS=1 says to a program
    rank.main(*arguments)
