"""Rank servers forked from a process that has imported torch.

A rank server takes seconds of processor time for its imports, and a test session starts hundreds.
Here a fork server imports once what they need. A forked one differs from one that a worker starts
by its parent only: it hears of the end of its worker by the socket between them, not by a signal.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

from nbelastic.cluster.worker import rank_process
from nbelastic.cluster.worker.rank import server

FOLDER = "NBELASTIC_TEST_RANK_SERVERS"
"""Variable with the fork server's folder: its socket, and for each rank server, by its process id,
that of its worker. With a cluster's ``env={FOLDER: ""}`` its workers start theirs themselves."""

ROOT = Path(__file__).parents[2]
LONGEST_REQUEST = 1 << 17


def start_fork_server() -> None:
    """Have all workers that this process and its children start ask a fork server from now on."""
    if os.environ.get(FOLDER) or rank_process.METHOD != "fork":
        return
    folder = tempfile.mkdtemp(prefix="nbelastic-servers-")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(os.path.join(folder, "socket"))
    listener.listen(64)
    one_thread = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    with listener:
        process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(listener.fileno()), folder],
            cwd=ROOT,
            env={**os.environ, **one_thread, "PYTORCH_NVML_BASED_CUDA_CHECK": "1"},
            stdin=subprocess.PIPE,  # closed with this process, in whatever way it ends
            pass_fds=[listener.fileno()],
            start_new_session=True,
        )
    os.environ[FOLDER] = folder
    atexit.register(process.communicate)


def workers_of_servers() -> dict[int, int]:
    """Return the worker of each rank server that the fork server has forked, by process ids."""
    folder, found = os.environ.get(FOLDER), {}
    for path in Path(folder).glob("[0-9]*") if folder else ():
        with contextlib.suppress(FileNotFoundError, ValueError):  # it ends just now, or begins
            found[int(path.name)] = int(path.read_text())
    return found


class ForkedServer:
    """A rank server's process, as :class:`subprocess.Popen` shows one."""

    def __init__(self, folder: str, control: socket.socket) -> None:
        self._line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._line.connect(os.path.join(folder, "socket"))
        request = {
            "worker": os.getpid(),
            "environment": dict(os.environ),
            "path": [each for each in sys.path if each],
        }
        socket.send_fds(self._line, [json.dumps(request).encode()], [control.fileno()])
        self.pid = int(self._line.recv(20))
        self.returncode: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            self._line.settimeout(timeout)
            try:
                self.returncode = int(self._line.recv(20) or -signal.SIGKILL)
            except TimeoutError:
                raise subprocess.TimeoutExpired("rank server", timeout or 0) from None
            self._line.close()
        return self.returncode

    def kill(self) -> None:
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


def ask_fork_server() -> None:
    """Have a worker in this process or its forks ask the fork server, if there is one then."""
    start_one = rank_process.start_process

    def start(control: socket.socket) -> ForkedServer | subprocess.Popen[bytes]:
        if folder := os.environ.get(FOLDER):
            with contextlib.suppress(ConnectionError, FileNotFoundError):  # it has been killed
                return ForkedServer(folder, control)
        return start_one(control)

    rank_process.start_process = start


# -- in the fork server ----------------------------------------------------------------------------


class _Forked(Exception):
    """Leaves the fork server's loop in a rank server."""


def _serve(listener: socket.socket, folder: Path) -> None:
    """Fork rank servers until the test session has ended."""
    running: dict[int, tuple[socket.socket, int]] = {}  # by descriptor of the process
    poll = select.poll()
    for descriptor in (0, listener.fileno()):
        poll.register(descriptor, select.POLLIN)
    while True:
        for descriptor, _ in poll.poll():
            if descriptor == 0:
                return
            if descriptor in running:
                line, pid = running.pop(descriptor)
                poll.unregister(descriptor)
                os.close(descriptor)
                _, status = os.waitpid(pid, 0)
                (folder / str(pid)).unlink(missing_ok=True)
                with line, contextlib.suppress(OSError):
                    line.send(str(os.waitstatus_to_exitcode(status)).encode())
                continue
            line, _ = listener.accept()
            data, [control], _, _ = socket.recv_fds(line, LONGEST_REQUEST, 1)
            pid = os.fork()
            if not pid:
                for each in (listener, line, *(line for line, _ in running.values())):
                    each.close()
                for process in running:
                    os.close(process)
                raise _Forked(json.loads(data), control)
            os.close(control)
            line.send(str(pid).encode())
            process = os.pidfd_open(pid)
            poll.register(process, select.POLLIN)
            running[process] = line, pid


def main() -> None:
    """Serve, or become a rank server."""
    for name in server.PRELOAD:
        importlib.import_module(name)
    descriptor, folder = sys.argv[1:]
    try:
        _serve(socket.socket(fileno=int(descriptor)), Path(folder))
    except _Forked as forked:
        request, control = forked.args
    else:
        shutil.rmtree(folder)
        return
    (Path(folder) / str(os.getpid())).write_text(str(request["worker"]))
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.path[:] = request["path"]
    sys.argv[:] = ["-c", str(control), str(os.getppid()), rank_process.METHOD]
    server.main()


if __name__ == "__main__":
    main()
