"""Run a script as ``__main__`` in a rank.

Runs in a worker, in the thread of a rank. A script expects a process of its own, and a rank is a
thread of a worker. So arguments, working directory, modules and exit handlers of the process are
the script's for the length of the run, and one script at a time runs in a process. After any rank
``cluster/worker/settings.py`` restores environment, working directory, logging and the like.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib.util
import io
import linecache
import os
import runpy
import shutil
import signal
import sys
import sysconfig
import tempfile
import threading
import traceback
import zipfile
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from distributed import get_worker

from nbelastic.elastic.context import current
from nbelastic.elastic.session import warn
from nbelastic.errors import NbelasticError

from .alias import aliased

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from types import TracebackType

    from .command import ScriptCommand

__all__ = ["FileMark", "ScriptCall", "ScriptExit", "mark_of", "run_script"]

SIGNAL_WARNING = (
    "signal.signal was ignored\n"
    "A rank is a thread of a worker, and signals are handled in the main thread alone.\n"
    "Nothing needs to be done: a rank ends by an exception, and its finally blocks run."
)

ALARM_WARNING = (
    "signal.alarm and signal.setitimer were ignored\n"
    "Without a handler, which a rank cannot set, the signal would end the worker.\n"
    "Use threading.Timer, or a limit of the call that may take too long."
)

_OF_WORKERS = ("nbelastic", "dask", "distributed", "torch", "numpy")
"""Packages that a worker and its ranks are made of, wherever they are installed."""

_one_at_a_time = threading.Lock()


class ScriptExit(NbelasticError):
    """A script has exited with another code than 0; the message names both."""


@dataclass(frozen=True)
class FileMark:
    """Identity of a file, equal on all hosts that share its file system."""

    path: str
    inode: int
    modified_ns: int


def mark_of(path: str) -> FileMark | None:
    """Return the identity of a file; None where there is none."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return FileMark(path, found.st_ino, found.st_mtime_ns)


@dataclass(frozen=True)
class ScriptCall:
    """A script as it travels to the ranks.

    Attributes
    ----------
    command : ScriptCommand
        The script and its arguments.
    cwd : str
        The kernel's working directory.
    mark : FileMark or None
        The script's file in the kernel. A worker that finds the same one there uses its folder.
    packed : bytes or None
        The folder as a ZIP file; None where all hosts share its file system.
    alias : bool or None
        Whether ``import horovod`` finds nbelastic; None for where Horovod is not installed.
    variables : mapping of str to str
        Variables of the environment.
    """

    command: ScriptCommand
    cwd: str
    mark: FileMark | None = None
    packed: bytes | None = None
    alias: bool | None = None
    variables: Mapping[str, str] = field(default_factory=dict)


def run_script(call: ScriptCall) -> None:
    """Run a script as one rank of a job.

    Parameters
    ----------
    call : ScriptCall
        The script.

    Raises
    ------
    ScriptExit
        It has exited with another code than 0.
    RuntimeError
        Another rank runs a script in this process.
    """
    if not _one_at_a_time.acquire(blocking=False):
        raise RuntimeError(
            "two ranks cannot run a script in one process; use workers that are processes of "
            "their own (processes=True)"
        )
    try:
        with _placed(call) as (folder, cwd):
            _run(call, folder, cwd)
    finally:
        _one_at_a_time.release()


def _run(call: ScriptCall, folder: str, cwd: str) -> None:
    command = call.command
    script = os.path.join(folder, os.path.basename(command.script)) if command.script else ""
    with (
        fresh_modules(folder),
        signals_ignored(),
        own_exit_handlers(folder),
        aliased(call.alias),
    ):
        os.environ.update(call.variables)
        os.chdir(cwd)
        sys.argv = [script or command.module, *command.arguments]
        sys.path.insert(0, folder)
        try:
            if script:
                runpy.run_path(script, run_name="__main__")
            else:
                runpy.run_module(command.module, run_name="__main__", alter_sys=True)
        except SystemExit as error:
            _take_exit(command, error)
        except Exception as error:
            raise error.with_traceback(_of_script(error.__traceback__))  # noqa: B904 -- the same
        finally:
            while isinstance(sys.path, list) and folder in sys.path:  # else it is put back later
                sys.path.remove(folder)


def _take_exit(command: ScriptCommand, error: SystemExit) -> None:
    """Return if a script's exit means success, as for a process; else raise."""
    code = error.code
    if code is None or code == 0:
        return
    how = f" with code {code}" if isinstance(code, int) else f": {code}"
    exited = ScriptExit(f"{command.name} exited{how}")
    raise exited.with_traceback(_of_script(error.__traceback__)) from None


def _of_script(trace: TracebackType | None) -> TracebackType | None:
    """Return the part of a traceback that begins in the script."""
    ours = (__file__, runpy.__file__, "<frozen runpy>")
    rest = trace
    while rest is not None and rest.tb_frame.f_code.co_filename in ours:
        rest = rest.tb_next
    return rest or trace


# -- where the script lies -----------------------------------------------------------------------


@contextlib.contextmanager
def _placed(call: ScriptCall) -> Iterator[tuple[str, str]]:
    """Yield the script's folder and the working directory, on this host."""
    folder = call.command.folder
    mark = call.mark
    if call.packed is None or (mark is not None and mark_of(mark.path) == mark):
        if not os.path.isdir(folder):
            raise FileNotFoundError(
                f"{folder}: this worker does not see the script's folder; without --shared-fs it "
                "is sent with the job"
            )
        yield folder, call.cwd if os.path.isdir(call.cwd) else folder
        return
    place = tempfile.mkdtemp(prefix="nbelastic-script-", dir=get_worker().local_directory)
    try:
        with zipfile.ZipFile(io.BytesIO(call.packed)) as file:
            file.extractall(place)
        inside = os.path.relpath(call.cwd, folder)
        cwd = os.path.normpath(os.path.join(place, inside))
        is_below = not inside.startswith("..") and os.path.isdir(cwd)
        yield place, cwd if is_below else place
    finally:
        shutil.rmtree(place, ignore_errors=True)


# -- what belongs to the process -----------------------------------------------------------------


@contextlib.contextmanager
def fresh_modules(folder: str) -> Iterator[None]:
    """Import the modules of a folder anew, and forget them at the end."""
    _forget_modules(folder)
    importlib.invalidate_caches()
    try:
        yield
    finally:
        _forget_modules(folder)
        linecache.checkcache()


def _forget_modules(folder: str) -> None:
    for name, module in list(sys.modules.items()):
        if name != "__main__" and _lies_in(module, folder):
            sys.modules.pop(name, None)
    for path in list(sys.path_importer_cache):
        if _is_in(path, folder):
            sys.path_importer_cache.pop(path, None)


def _lies_in(module: Any, folder: str) -> bool:
    file = getattr(module, "__file__", None)
    paths = [file] if isinstance(file, str) else []
    if not paths:
        with contextlib.suppress(Exception):  # a namespace package computes its path
            paths = [str(path) for path in getattr(module, "__path__", ())]
    return any(_is_in(path, folder) for path in paths)


def _is_in(path: str, folder: str) -> bool:
    """Return whether a path lies in a folder, and is no part of the worker or of a package there.

    A script may lie in a home directory that has Python, too, in a checkout of this package, or in
    ``/``.
    """
    rest = path[len(folder) :].split(os.sep)
    installed = "site-packages" in rest or "dist-packages" in rest
    return _below(path, folder) and not installed and not _is_workers(path)


def _is_workers(path: str) -> bool:
    return any(_below(path, place) for place in _workers_places())


@functools.cache
def _workers_places() -> tuple[str, ...]:
    """Return where Python's modules are, and those of the packages that a worker is made of."""
    specs = [importlib.util.find_spec(name) for name in _OF_WORKERS]
    packages = [os.path.dirname(spec.origin) for spec in specs if spec is not None and spec.origin]
    return (sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), *packages)


def _below(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip(os.sep) + os.sep)


@contextlib.contextmanager
def signals_ignored() -> Iterator[None]:
    """Have handlers and alarms that are set in a thread change nothing, with a warning for each.

    A handler cannot be set there, and an alarm without one ends the process.
    """
    set_signal, set_alarm, set_timer = signal.signal, signal.alarm, signal.setitimer
    warned: set[str] = set()

    def is_allowed(warning: str) -> bool:
        if threading.current_thread() is threading.main_thread():
            return True
        if warning not in warned:
            warned.add(warning)
            with contextlib.suppress(NbelasticError):
                warn(current(), warning)
        return False

    def handle(signalnum: int, handler: Any) -> Any:
        if is_allowed(SIGNAL_WARNING):
            return set_signal(signalnum, handler)
        return signal.getsignal(signalnum)

    def alarm(seconds: int, /) -> int:
        return set_alarm(seconds) if is_allowed(ALARM_WARNING) else 0

    def setitimer(which: int, seconds: float, interval: float = 0.0, /) -> tuple[float, float]:
        allowed = is_allowed(ALARM_WARNING)
        return set_timer(which, seconds, interval) if allowed else (0.0, 0.0)

    signal.signal, signal.alarm, signal.setitimer = handle, alarm, setitimer
    try:
        yield
    finally:
        if signal.signal is handle:
            signal.signal, signal.alarm, signal.setitimer = set_signal, set_alarm, set_timer


@contextlib.contextmanager
def own_exit_handlers(folder: str) -> Iterator[None]:
    """Call exit handlers that a script registers at its own end, not at that of the worker."""
    register, unregister = atexit.register, atexit.unregister
    process = os.getpid()
    handlers: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = []

    def note(func: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Callable[..., Any]:
        code = getattr(func, "__code__", None)
        if os.getpid() != process or code is None or not _is_in(code.co_filename, folder):
            return register(func, *args, **kwargs)
        handlers.append((func, args, kwargs))
        return func

    def forget(func: Callable[..., Any], /) -> None:
        handlers[:] = [each for each in handlers if each[0] != func]
        unregister(func)

    atexit.register, atexit.unregister = note, forget
    try:
        yield
    finally:
        if atexit.register is note:
            atexit.register, atexit.unregister = register, unregister
        while handlers:
            func, args, kwargs = handlers.pop()
            try:
                func(*args, **kwargs)
            except (Exception, SystemExit):  # as at the end of a process: shown; others are called
                traceback.print_exc()
