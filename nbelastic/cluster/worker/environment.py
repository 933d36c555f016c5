"""Prepare a worker's process for a rank: threads, forks, settings.

Runs in a worker, in the threads of ranks. Dask starts workers as daemonic processes with
``OMP_NUM_THREADS=1``: torch would compute on one core, and a ``DataLoader`` with workers of its own
would fail. Its workers also start processes by ``spawn``: a data loader would import everything
anew at each epoch, and could not use a data set with a class of the notebook. So ranks fork, as
plain scripts do on Linux. A fork inherits the sockets of its parent: while it lives, no peer would
notice that the parent was killed.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import socket
import stat
import sys
import threading
import traceback
from typing import TYPE_CHECKING, Any

from .modules import imported
from .settings import ProcessSettings, ThreadSettings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

__all__ = ["MUST_MATCH", "ForksEnded", "own_interface", "prepared", "versions", "versions_reader"]

MUST_MATCH = ("python", "nbelastic", "torch")
"""Versions that kernel and workers must share; the scheduler may do without torch."""

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_lock = threading.Lock()
_active = 0
_was_daemon = False
_method: str | None = None
_hook_registered = False
_settings: ProcessSettings | None = None


def own_interface(hosts: Iterable[str]) -> str:
    """Return the first of some hosts that is this machine, as a number; else the loopback's.

    A worker's contact address may hold a name, which this machine may resolve to its loopback, or
    the address of a gateway before it, where nothing can listen.
    """
    for host in hosts:
        try:
            found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError):
            continue  # a name that is unknown here, or none at all, as in "inproc://"
        for family, kind, _, _, where in sorted(found):
            try:
                with socket.socket(family, kind) as probe:
                    probe.bind(where)
            except OSError:
                continue
            return str(where[0])
    return "127.0.0.1"


def versions() -> dict[str, str]:
    """Return the versions in this process that kernel and workers must share, without imports."""
    return versions_reader()()


def versions_reader(names: tuple[str, ...] = MUST_MATCH) -> Callable[[], dict[str, str]]:
    """Return a function that reads versions, and travels to a process without nbelastic."""

    def read() -> dict[str, str]:
        import importlib.metadata
        import sys

        found = {}
        for name in names:
            try:
                found[name] = importlib.metadata.version(name)
            except importlib.metadata.PackageNotFoundError:
                found[name] = "missing"
        found["python"] = f"{sys.version_info.major}.{sys.version_info.minor}"
        return found

    return read


@contextlib.contextmanager
def prepared(threads: int, directory: str) -> Iterator[None]:
    """Make the process fit for a rank, for the length of a block; then it is as it was.

    Parameters
    ----------
    threads : int
        How many threads the rank is to compute with.
    directory : str
        Where Dask keeps the worker's files.
    """
    torch = imported("torch")
    _enter(directory)
    settings = ThreadSettings()
    before = torch.get_num_threads() if torch is not None else 1
    try:
        os.environ.update(dict.fromkeys(_THREAD_VARIABLES, str(threads)))
        if torch is not None:
            torch.set_num_threads(threads)
        yield
    finally:
        settings.restore()
        torch = imported("torch")
        if torch is not None:
            torch.set_num_threads(before)
        _leave()
        if torch is not None:
            _forget_backward(torch)


def _forget_backward(torch: Any) -> None:
    """Have autograd let go of what a backward pass that was interrupted has left in this thread.

    That is the rest of its graph, with all the memory of it, and stays until the thread's next
    pass. A thread that ends with it needs the interpreter to free it, and takes a process that is
    exiting down with it.
    """
    with torch.inference_mode(False), torch.enable_grad():
        (torch.zeros((), device="cpu", requires_grad=True) * 1).backward()


def _enter(directory: str) -> None:
    global _active, _was_daemon, _method, _hook_registered, _settings  # noqa: PLW0603 (of the process)
    with _lock:
        if _active == 0:
            _settings = ProcessSettings(directory)
            config = _process_config()
            _was_daemon = bool(config.get("daemon"))
            config["daemon"] = False
            _method = multiprocessing.get_start_method(allow_none=True)
            if sys.platform == "linux":
                multiprocessing.set_start_method("fork", force=True)
        if not _hook_registered:
            os.register_at_fork(after_in_child=_forget_sockets)
            _hook_registered = True
        _active += 1


def _leave() -> None:
    global _active, _settings  # noqa: PLW0603 (state of the process)
    with _lock:
        _active -= 1
        if _active == 0:
            _process_config()["daemon"] = _was_daemon
            multiprocessing.set_start_method(_method, force=True)
            if _settings is not None:
                _settings.restore()
                _settings = None


class ForksEnded:
    """Ends forks of this process that come out of a ``with`` block: they are no ranks.

    Beyond it is the worker, whose event loop, connections and files are the parent's. It is no
    generator: contextlib would set the traceback of a user's error, which frozen ones refuse.
    """

    def __init__(self) -> None:
        self._process = os.getpid()

    def __enter__(self) -> None:
        """Begin the block."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Let the rank itself go on; end the process if it is another one."""
        if os.getpid() == self._process:
            return
        code: int | bool = error is not None
        if isinstance(error, SystemExit):
            code = error.code if isinstance(error.code, int) else error.code is not None
        elif error is not None:
            traceback.print_exception(error, file=sys.__stderr__)
        os._exit(int(code))


def _process_config() -> dict[str, Any]:
    """Return what multiprocessing knows of this process; a public setter refuses to change it."""
    config: dict[str, Any] = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    return config


def _forget_sockets() -> None:
    """In a fork of a process with ranks: let go of the parent's network connections.

    Their numbers stay taken (by ``/dev/null``), since Python objects that own them still exist.
    """
    if _active == 0 or not os.path.isdir("/proc/self/fd"):
        return
    null = os.open(os.devnull, os.O_RDWR)
    for name in os.listdir("/proc/self/fd"):
        number = int(name)
        try:
            if stat.S_ISSOCK(os.fstat(number).st_mode) and _is_network(number):
                os.dup2(null, number)
        except OSError:
            continue  # the directory's own descriptor, closed by now
    os.close(null)


def _is_network(number: int) -> bool:
    """Return whether a descriptor is an internet socket, without taking it over."""
    probe = socket.socket(fileno=os.dup(number))
    with probe:
        return probe.family in (socket.AF_INET, socket.AF_INET6)
