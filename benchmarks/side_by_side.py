"""Processes that measure one candidate at a time, in turns, in one run.

A :class:`Crew` is a set of processes, one per rank, that carry out orders and otherwise sleep in a
read of a socket. So several crews, and several candidates within one, can be measured in turns on
a machine whose speed drifts. A sample begins in all ranks at an agreed moment of the machine's
monotonic clock, and ends with the last rank.

Each rank is an object of a class that the benchmark names. Orders are calls of its methods. In
case of any error, all processes end: they end when their orders cease, and are killed if they do
not. Every wait is bounded.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
START_S = 120.0
ORDER_S = 120.0
HEAD_START_S = 0.004
"""Seconds between an order and the moment at which all ranks begin."""


def spawn(command: list[str], environment: dict[str, str]) -> subprocess.Popen[bytes]:
    """Start a rank in a session of its own, which ends with all that the rank has started."""
    return subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, start_new_session=True
    )


class Failed(RuntimeError):
    """A benchmark cannot be done; the message has the reason."""


class Crew:
    """Ranks in processes of their own. A context manager, which ends them.

    Parameters
    ----------
    kind : str
        ``module:Class`` of a rank, made with its rank, `size` and `arguments`.
    size : int
        Number of ranks.
    arguments : sequence
        Picklable, the same for all ranks.
    mpiexec : str, optional
        Path of the program that starts them; without it, they are started one by one.
    """

    def __init__(
        self, kind: str, size: int, arguments: Sequence[object] = (), mpiexec: str = ""
    ) -> None:
        self.kind = kind
        self._size = size
        self._processes: list[subprocess.Popen[bytes]] = []
        self._ranks: list[Connection] = []
        try:
            self._start(size, arguments, mpiexec)
        except BaseException:
            self._kill()
            raise

    def ask(self, what: str, *arguments: object) -> list[Any]:
        """Call a method on all ranks; return what each returns.

        Raises
        ------
        Failed
            The method raised on a rank, or a rank has ended or not answered in two minutes.
        """
        return self._order(what, arguments, None)

    def time(self, what: str, *arguments: object) -> float:
        """Call a method on all ranks at the same moment; return when the last is done.

        The result is in seconds from that moment on.
        """
        begin = time.monotonic() + HEAD_START_S
        return float(max(self._order(what, arguments, begin))) - begin

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            for connection in self._ranks if kind is None else ():
                with contextlib.suppress(OSError):
                    connection.send(None)
            deadline = time.monotonic() + 10.0
            for process in self._processes if kind is None else ():
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.0, deadline - time.monotonic()))
        finally:
            self._kill()

    def _order(self, what: str, arguments: tuple[object, ...], moment: float | None) -> list[Any]:
        for connection in self._ranks:
            with contextlib.suppress(OSError):  # the process has ended; reading its answer raises
                connection.send((what, arguments, moment))
        answers: list[Any] = [None] * self._size
        awaited = {connection: rank for rank, connection in enumerate(self._ranks)}
        deadline = time.monotonic() + ORDER_S
        while awaited:
            ready = wait(awaited, max(0.0, deadline - time.monotonic()))
            if not ready:
                late = sorted(awaited.values())
                raise Failed(f"{self.kind}.{what}: no answer from ranks {late} in {ORDER_S:g} s")
            for connection in ready:
                rank = awaited.pop(connection)
                answers[rank] = self._answer(connection, rank, what)
        return answers

    def _start(self, size: int, arguments: Sequence[object], mpiexec: str) -> None:
        with _listener() as (listener, address):
            command = [sys.executable, "-m", "benchmarks.rank", self.kind, address]
            commands = [[*command, str(rank)] for rank in range(size)]
            if mpiexec:
                commands = [[mpiexec, "-n", str(size), *command]]
            path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
            environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}
            for each in commands:
                self._processes.append(spawn(each, environment))
            met: dict[int, Connection] = {}
            deadline = time.monotonic() + START_S
            while len(met) < size:
                connection = self._accept(listener, deadline)
                self._ranks.append(connection)
                met[connection.recv()] = connection
        self._ranks = [met[rank] for rank in range(size)]
        for connection in self._ranks:
            connection.send(size)
        self.ask("__init__", *arguments)

    def _accept(self, listener: socket.socket, deadline: float) -> Connection:
        while time.monotonic() < deadline:
            if any(process.poll() is not None for process in self._processes):
                raise Failed(f"{self.kind}: a process ended before it began; see above")
            with contextlib.suppress(TimeoutError):
                return Connection(listener.accept()[0].detach())
        raise Failed(f"{self.kind}: not all processes were there in {START_S:g} s")

    def _answer(self, connection: Connection, rank: int, what: str) -> Any:
        try:
            error, answer = connection.recv()
        except (EOFError, OSError):
            raise Failed(f"rank {rank} of {self.kind} ended during {what}") from None
        if error:
            raise Failed(f"rank {rank} of {self.kind}, {what}: {error}")
        return answer

    def _kill(self) -> None:
        for connection in self._ranks:
            connection.close()
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@contextlib.contextmanager
def _listener() -> Iterator[tuple[socket.socket, str]]:
    """Listen where only this user can connect, because messages are unpickled."""
    folder = tempfile.mkdtemp(prefix="side-by-side-")
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            address = str(Path(folder) / "orders")
            listener.bind(address)
            listener.listen()
            listener.settimeout(0.2)
            yield listener, address
    finally:
        shutil.rmtree(folder)
