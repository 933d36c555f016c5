"""What a worker's process must provide so that training inside it just works.

Dask starts workers as daemonic processes with ``OMP_NUM_THREADS=1``: torch would compute on one
core, and a ``DataLoader`` with workers of its own would fail. Its workers also start processes by
``spawn``: a data loader would import everything anew at each epoch, and could not use a data set
whose class is defined in the notebook. So ranks fork, as plain scripts do on Linux. And a fork
inherits the sockets of its parent: while it lives, nobody sees that the parent was killed.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import multiprocessing
import os
import platform
import socket
import stat
import sys
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["HOST_VARIABLE", "host_identity", "prepared", "versions"]

HOST_VARIABLE = "NBELASTIC_HOST"
"""Environment variable that splits one machine into several hosts, for tests of placement."""

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_lock = threading.Lock()
_active = 0
_was_daemon = False
_method: str | None = None
_hook_registered = False


def host_identity() -> str:
    """Return a name that two processes share exactly if they can share memory.

    That is: the same boot of the same kernel, the same network namespace, and the same file
    system under ``/dev/shm``. No host name enters: containers on one machine often claim one.
    """
    named = os.environ.get(HOST_VARIABLE)
    if named:
        return named
    parts = []
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            parts.append(file.read().strip())
        memory = os.stat("/dev/shm")
        parts.append(f"{memory.st_dev}:{memory.st_ino}")
        parts.append(os.readlink("/proc/self/ns/net"))
    except OSError:
        parts.append(f"{socket.gethostname()}:{platform.node()}")
    return hashlib.blake2s("|".join(parts).encode(), digest_size=6).hexdigest()


def versions() -> dict[str, str]:
    """Return the versions that kernel, scheduler and workers must share, without imports."""
    found = {"python": f"{sys.version_info.major}.{sys.version_info.minor}"}
    for name in ("nbelastic", "torch", "cloudpickle"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "missing"
    return found


@contextlib.contextmanager
def prepared(threads: int) -> Iterator[None]:
    """Make the process fit for a rank with `threads` threads, for the length of a block."""
    _enter()
    variables = {name: os.environ.get(name) for name in _THREAD_VARIABLES}
    torch: Any = sys.modules.get("torch")
    before = torch.get_num_threads() if torch is not None else 1
    try:
        os.environ.update(dict.fromkeys(_THREAD_VARIABLES, str(threads)))
        if torch is not None:
            torch.set_num_threads(threads)
        yield
    finally:
        for name, value in variables.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        torch = sys.modules.get("torch")
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


def _enter() -> None:
    global _active, _was_daemon, _method, _hook_registered  # noqa: PLW0603 (state of the process)
    with _lock:
        if _active == 0:
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
    global _active  # noqa: PLW0603 (state of the process)
    with _lock:
        _active -= 1
        if _active == 0:
            _process_config()["daemon"] = _was_daemon
            multiprocessing.set_start_method(_method, force=True)


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
