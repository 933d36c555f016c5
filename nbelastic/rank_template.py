"""The rank template of a host: the process that imports torch for all ranks.

It imports what every rank needs, has one thread, so that forking is safe, and never initialises
CUDA, so that its forks can. Workers of the same standing (:func:`address`) share one by an abstract
Unix socket (:mod:`nbelastic.cluster.worker.rank_process` is their side). For each rank that a
worker asks for it forks a rank server (:mod:`nbelastic.cluster.worker.rank.server`), the parent of
that rank alone. It has nothing of any worker's, and does nothing but fork and reap.

============  ====================================================================================
the template  then
============  ====================================================================================
starts        it has bound the socket: who comes second ends, and its worker asks the first. (It is
              started with a line to its own worker; one without a name serves that worker alone.)
imports       connections wait. Its death is heard by those who wait; each asks anew
serves        a message on a line forks a server. A line that closes condemns its servers, which
              end by themselves, unless they are stopped
is idle       no line, no server: it ends after some seconds
has ended     servers and ranks live on. The next who asks starts another
============  ====================================================================================

This module is at the root of the package, and imports nothing at first: several workers that start
one at once find out in a moment which is first.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import hashlib
import importlib
import importlib.util
import json
import math
import os
import resource
import signal
import socket
import struct
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbelastic.system import LINUX

if TYPE_CHECKING:
    from nbelastic.cluster.worker.rank.children import Children

PRELOAD = ("nbelastic.torch", "nbelastic.cluster.worker.rank.main", "torch._dynamo")
"""What every rank needs, imported once. The first optimizer of a process imports Dynamo."""

KIND = socket.SOCK_SEQPACKET if LINUX else socket.SOCK_STREAM
"""Sockets of workers, templates and rank servers. macOS has none that keep messages apart."""

MESSAGE_BYTES = 4096
"""Longest message on a line, or between a worker and a rank server; no reader is so far behind."""

IDLE_S = 10.0  # seconds after its last line and server after which a template ends

CONDEMNED_S = 4.0
"""Seconds that a rank server may take to end after its worker; more than it needs by itself."""

AT_IMPORT = (
    *("LD_", "GLIBC_", "MALLOC_", "PYTHON", "LANG", "LC_", "TZ", "NBELASTIC_"),
    *("TORCH", "PYTORCH_", "ATEN_", "TRITON_", "NUMPY_", "NPY_"),
    *("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "BLIS_"),
)
"""Beginnings of the variables which libraries read once, when they are loaded. A rank gets all
others from its own worker, after the fork."""

_SCRATCH = "dask-scratch-space"
_STANDING = ("Uid:", "Gid:", "Groups:", "Cap", "NoNewPrivs:", "Seccomp")
LIMITS = [each for name, each in vars(resource).items() if name.startswith("RLIMIT_")]


# -- for workers -----------------------------------------------------------------------------------


def standing(pid: int) -> list[Any]:
    """Return what a fork has of its parent for good: rights, namespaces, hard limits and the like.

    OSError: it is not ours to know, or the system does not tell.
    """
    process = f"/proc/{pid}"
    rights = [each for each in _lines(f"{process}/status") if each.startswith(_STANDING)]
    spaces = [os.readlink(f"{process}/ns/{each}") for each in sorted(os.listdir(f"{process}/ns"))]
    memory = []
    with contextlib.suppress(FileNotFoundError), open(f"{process}/numa_maps") as file:
        memory = file.readline().split()[1:2]
    hard = [resource.prlimit(pid, each)[1] for each in LIMITS]
    turns = [os.getpriority(os.PRIO_PROCESS, pid), os.sched_getscheduler(pid)]
    return [rights, spaces, memory, hard, turns, _lines(f"{process}/cgroup")]


def search_path() -> list[str]:
    """Return the folders in which a template for this process looks for modules.

    Dask adds a folder for each worker and scheduler, which a rank gets from its own worker.
    """
    found = (os.path.abspath(each) for each in sys.path if each and _SCRATCH not in each)
    return list(dict.fromkeys(found))


def address(path: list[str]) -> str:
    """Return the name of the template that this process can share, with a search path."""
    variables = {
        name: value
        for name, value in os.environ.items()
        if name.startswith(AT_IMPORT) and name != "PYTHONPATH" and not name.endswith("_NUM_THREADS")
    }
    own, found = Path(__file__).parent, importlib.util.find_spec("torch")
    files = sorted([*own.rglob("*.py"), *own.rglob("*.so")])
    if found and found.origin:  # what is installed or removed there changes the folder
        files += [Path(found.origin), Path(found.origin).parents[1]]
    installed = [_stamp(each) for each in files]
    parts = [standing(os.getpid()), sys.executable, sys.version, path, variables, installed]
    return "nbelastic-" + hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def peer(line: socket.socket) -> int:
    """Return the process at the other end of a line, if its standing is the same.

    PermissionError: it has another. ConnectionRefusedError: it has ended, or is about to.
    """
    credentials = line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, user, _ = struct.unpack("3i", credentials)
    own = standing(os.getpid())
    try:
        alike = user == os.geteuid() and standing(pid) == own
    except (FileNotFoundError, ProcessLookupError) as error:
        # A killed process accepts connections until the system has closed its listener.
        raise ConnectionRefusedError(f"process {pid} has ended") from error
    if not alike:
        raise PermissionError(f"process {pid} of user {user} has other rights than this one")
    return int(pid)


def _lines(path: str) -> list[str]:
    with open(path) as file:
        return file.read().splitlines()


def _stamp(path: Path) -> str:
    found = path.stat()
    return f"{path} {found.st_dev} {found.st_ino} {found.st_mtime_ns} {found.st_size}"


# -- the process -----------------------------------------------------------------------------------


class _Template:
    """The one thread of a template.

    A worker sends ``{"worker"}`` with descriptors; the server answers on one of them. It hears
    ``bound`` and ``ready`` once.
    """

    def __init__(self, listener: socket.socket | None, line: socket.socket) -> None:
        self._listener = listener
        self._lines = {line.fileno(): line}
        self._servers: dict[int, int] = {}  # by process: the line that has asked for it
        self._condemned: dict[int, float] = {}

    def serve(self, children: Children) -> tuple[Any, list[int]] | None:
        """Fork servers, and reap them with their children, until no worker is left.

        Returned is, in a fork, the message that asked for it, with its descriptors.
        """
        for line in self._lines.values():
            send(line, op="ready")
        left, idle_end = False, math.inf
        while True:
            now = time.monotonic()
            for pid in [each for each, moment in self._condemned.items() if moment <= now]:
                os.kill(pid, signal.SIGKILL)  # it is reaped next
                del self._condemned[pid]
            if self._lines or self._servers:
                idle_end = math.inf
            else:
                idle_end = min(idle_end, now + IDLE_S if self._listener else now)
            if now >= idle_end:
                return None
            moment = now + 0.05 if left else min([idle_end, *self._condemned.values()])
            watched = {*self._lines, *([self._listener.fileno()] if self._listener else [])}
            ready = children.wait(watched, None if moment == math.inf else moment - now)
            for pid, _ in children.reap():
                self._servers.pop(pid, None)
                self._condemned.pop(pid, None)
                left = True
            if left:
                left = children.end_left(self._servers)
            for descriptor in ready:
                if descriptor in self._lines:
                    if asked := self._take(self._lines[descriptor], children):
                        return asked
                elif self._listener is not None:
                    self._accept(self._listener)

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):  # it has gone
            line, _ = listener.accept()
            try:
                peer(line)
            except OSError:
                line.close()
            else:
                self._lines[line.fileno()] = line
                send(line, op="ready")

    def _take(self, line: socket.socket, children: Children) -> tuple[Any, list[int]] | None:
        descriptors: list[int] = []
        data = b""
        with contextlib.suppress(ConnectionError):
            cloexec = getattr(socket, "MSG_CMSG_CLOEXEC", 0)
            data, descriptors, _, _ = socket.recv_fds(line, MESSAGE_BYTES, 8, cloexec)
        if not data:
            number = line.fileno()
            self._lines.pop(number).close()
            end = time.monotonic() + CONDEMNED_S
            for pid, of in self._servers.items():
                if of == number:  # which the next line may get
                    self._condemned[pid], self._servers[pid] = end, -1
            return None
        message = json.loads(data)
        try:
            pid = os.fork()
        except OSError as error:
            with socket.socket(fileno=os.dup(descriptors[0])) as control:
                send(control, op="refused", why=str(error))
        else:
            if not pid:
                children.close()
                for each in self._lines.values():
                    each.close()
                if self._listener is not None:
                    self._listener.close()
                return message, descriptors
            self._servers[pid] = line.fileno()
        for descriptor in descriptors:
            os.close(descriptor)
        return None


def send(line: socket.socket, **message: Any) -> None:
    """Send a message between a worker, a template and a rank server, without waiting."""
    with contextlib.suppress(OSError):  # the other end has gone, or reads nothing: it notices
        line.send(json.dumps(message).encode() + b"\n", getattr(socket, "MSG_DONTWAIT", 0))


def receive(line: socket.socket) -> list[dict[str, Any]]:
    """Return what has come: a stream may join messages, and has none where the sender has gone."""
    with contextlib.suppress(ConnectionError):
        return [json.loads(each) for each in line.recv(MESSAGE_BYTES).splitlines()]
    return []


def main(descriptor: str, name: str = "", bare: str = "") -> None:
    """Serve as the template with a name, or become a rank server and then a rank.

    A `bare` template imports nothing: its ranks do, which takes seconds.
    """
    line, listener = socket.socket(fileno=int(descriptor)), None
    os.set_inheritable(line.fileno(), False)
    if name:
        listener = socket.socket(socket.AF_UNIX, KIND)
        try:
            listener.bind(f"\0{name}")
        except OSError:
            os._exit(1)  # another one has it
    if os.fork():  # it belongs to no worker
        os._exit(0)
    with contextlib.suppress(PermissionError):
        os.setsid()  # a console's signals reach neither it nor ranks
    if listener is not None:
        listener.listen(128)  # by this process, which those who connect see
    send(line, op="bound", pid=os.getpid())

    from nbelastic.cluster.worker.rank import children, server  # noqa: PLC0415 - after the bind

    atexit.register(children.skip_teardown)  # first, so that it is called last
    children.set_option(children.NAME, b"rank template")  # for ``ps -e``
    family = children.Children()
    if LINUX and not bare:  # frameworks of macOS do not work in a fork
        for each in PRELOAD:
            with contextlib.suppress(Exception):  # a rank that needs it raises the error again
                importlib.import_module(each)
        gc.collect()
        gc.freeze()  # a search for garbage would copy the pages of all that ranks share
        if len(os.listdir("/proc/self/task")) > 1:  # a fork might wait for what they hold
            os.set_inheritable(line.fileno(), True)
            words = ["-m", "nbelastic.rank_template", descriptor, name, "bare"]
            os.execv(sys.executable, [sys.executable, *words])
    if (asked := _Template(listener, line).serve(family)) is None:
        os._exit(0)
    server.main(asked[0]["worker"], asked[1])


if __name__ == "__main__":
    main(*sys.argv[1:])
