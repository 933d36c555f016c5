"""A process that has imported what ranks need, and forks members quickly.

It serves requests over a socket: two pipe ends for a member's standard input and output, answered
with its process id; or a process id to wait for, answered with the exit code.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

PATIENCE_S = 20.0
ROOT = Path(__file__).parents[2]


class ForkServer:
    """The client: asks for members."""

    def __init__(self) -> None:
        self._line, inside = socket.socketpair()
        with inside:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.collectives.fork_server", str(inside.fileno())],
                cwd=ROOT,
                pass_fds=[inside.fileno()],
            )

    def start(self, stdin: int, stdout: int) -> int:
        """Start a member with these descriptors, and return its process id."""
        socket.send_fds(self._line, [b"0"], [stdin, stdout])
        return int(self._line.recv(20))

    def wait(self, number: int) -> int:
        """Wait for the end of a member and return its exit code."""
        self._line.send(str(number).encode())
        return int(self._line.recv(20))

    def close(self) -> None:
        self._line.close()
        self._process.wait(PATIENCE_S)


def _wait(number: int) -> int:
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        ended, status = os.waitpid(number, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    raise TimeoutError(f"process {number} does not end")


def main() -> None:
    from tests.collectives import member

    with socket.socket(fileno=int(sys.argv[1])) as line:
        while True:
            message, descriptors, _, _ = socket.recv_fds(line, 20, 2)
            if not message:
                return
            if not descriptors:
                line.send(str(_wait(int(message))).encode())
                continue
            child = os.fork()
            if child == 0:
                break
            for descriptor in descriptors:
                os.close(descriptor)
            line.send(str(child).encode())
    for place, descriptor in enumerate(descriptors):
        os.dup2(descriptor, place)
        os.close(descriptor)
    member.main()


if __name__ == "__main__":
    main()
