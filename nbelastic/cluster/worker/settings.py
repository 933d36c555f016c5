"""Restore the settings of a worker's process and thread after a rank.

Runs in a worker, in the threads of ranks. Settings of the process are restored when its last rank
has ended, settings of a thread when its rank has. Random generators continue from where they were
before, each in a stream of its own: a seed in one rank does not reach the next, and two jobs
without a seed still differ.
"""

from __future__ import annotations

import builtins
import copy
import decimal
import functools
import gc
import locale
import logging
import os
import pickle
import random
import socket
import sys
import threading
import time
import warnings
from typing import TYPE_CHECKING, Any, NamedTuple

import dask

from nbelastic.elastic.settings import Setting, Settings, TorchModes, attributes

from .modules import imported

if TYPE_CHECKING:
    from collections.abc import Callable

try:
    import resource
except ImportError:  # not on Windows
    resource = None  # type: ignore[assignment]

__all__ = ["ProcessSettings", "ThreadSettings", "keep_settings_of_torch"]


class ProcessSettings:
    """Settings of this process.

    Parameters
    ----------
    directory : str
        Where Dask keeps the worker's files: modules that it uploads there stay importable.
    """

    def __init__(self, directory: str) -> None:
        self._settings = Settings(_of_process(directory))
        self._streams = _Streams()

    def restore(self) -> None:
        """Put back what has changed since."""
        zone = os.environ.get("TZ")
        self._settings.restore()
        if os.environ.get("TZ") != zone and hasattr(time, "tzset"):
            time.tzset()
        self._streams.go_on()


class ThreadSettings:
    """Settings of the calling thread."""

    def __init__(self) -> None:
        self._settings = Settings(_of_thread())
        self._modes = TorchModes()

    def restore(self) -> None:
        """Put back what has changed since."""
        self._modes.restore()
        self._settings.restore()


def keep_settings_of_torch(torch: Any) -> Callable[[], None]:
    """Take note of torch's settings for the process; return what puts them back."""
    settings = Settings(_of_torch(torch))
    seed, state = torch.initial_seed(), torch.get_rng_state()

    def restore() -> None:
        settings.restore()
        if torch.initial_seed() != seed:
            torch.set_rng_state(state)

    return restore


# -- the process -----------------------------------------------------------------------------------


def _of_process(directory: str) -> list[Setting]:
    root = logging.getLogger()
    put_path = functools.partial(_put_path, directory=directory)
    found = [
        Setting(os.getcwd, os.chdir),
        _same(os, "environ"),
        Setting(lambda: dict(os.environ), _set_environment),
        _list(sys, "path", put_path),
        _list(sys, "meta_path", _put_missing),
        _list(sys, "path_hooks", _put_missing),
        _list(warnings, "filters", _put_filters),
        Setting(sys.getrecursionlimit, sys.setrecursionlimit),
        Setting(sys.getswitchinterval, sys.setswitchinterval),
        Setting(gc.isenabled, lambda enabled: gc.enable() if enabled else gc.disable()),
        Setting(gc.get_threshold, lambda threshold: gc.set_threshold(*threshold)),
        Setting(lambda: gc.get_freeze_count() > 0, _set_frozen),
        Setting(socket.getdefaulttimeout, socket.setdefaulttimeout),
        Setting(
            lambda: locale.setlocale(locale.LC_ALL),
            lambda name: locale.setlocale(locale.LC_ALL, name),
        ),
        _list(root, "handlers", _put_all),
        Setting(lambda: root.level, root.setLevel),
        Setting(lambda: root.manager.disable, logging.disable),
        Setting(_loggers, _set_loggers),
        Setting(lambda: copy.deepcopy(dask.config.config), _set_dask),
        *attributes(decimal.DefaultContext, "prec", "rounding"),
        Setting(_umask, os.umask),
        Setting(lambda: list(sys.argv), lambda words: setattr(sys, "argv", words)),
        *attributes(sys, "stdin", "stdout", "stderr", "displayhook", "breakpointhook"),
        *attributes(sys, "excepthook", "unraisablehook"),
        *attributes(threading, "excepthook"),
        *attributes(builtins, "print", "input", "open", "__import__"),
        *map(_limit, range(getattr(resource, "RLIM_NLIMITS", 16) if resource else 0)),
    ]
    if (numpy := _numpy()) is not None:
        found.append(Setting(numpy.get_printoptions, lambda all_: numpy.set_printoptions(**all_)))
    return found


def _set_environment(before: dict[str, str]) -> None:
    for name in set(os.environ) - set(before):
        del os.environ[name]
    os.environ.update(before)


def _same(owner: Any, name: str) -> Setting:
    """Return the setting of which object an attribute is, whatever is in it."""
    original = getattr(owner, name)
    return Setting(
        lambda: getattr(owner, name, None) is original,
        lambda _: setattr(owner, name, original),
    )


def _list(owner: Any, name: str, put: Callable[[list[Any], list[Any], list[Any]], None]) -> Setting:
    """Return the setting of a list: which list it is, and what is in it.

    Parameters
    ----------
    owner, name : object, str
        It is this attribute. Others may hold the list, and it may have become something else.
    put : callable
        ``put(live, now, before)`` puts back what was in the list.
    """
    live: list[Any] = getattr(owner, name)

    def read() -> tuple[bool, list[Any]]:
        now = getattr(owner, name)
        return now is live, list(now)

    def put_back(value: tuple[bool, list[Any]]) -> None:
        now = getattr(owner, name, None)
        setattr(owner, name, live)
        put(live, list(now) if isinstance(now, (list, tuple)) else [], value[1])

    return Setting(read, put_back)


def _put_all(live: list[Any], _now: list[Any], before: list[Any]) -> None:
    live[:] = before


def _put_missing(live: list[Any], now: list[Any], before: list[Any]) -> None:
    """Put back importers that are gone. Libraries that stay imported need those they have added."""
    kept = [each for each in now if any(each is one for one in before)]
    if len(kept) == len(before):
        live[:] = now
    else:
        live[:] = before + [each for each in now if not any(each is one for one in before)]


def _put_path(live: list[Any], now: list[Any], before: list[Any], directory: str) -> None:
    live[:] = [each for each in now if each not in before and _is_below(each, directory)] + before


def _is_below(path: Any, directory: str) -> bool:
    if not isinstance(path, str):
        return False
    return os.path.abspath(path).startswith(os.path.join(os.path.abspath(directory), ""))


def _put_filters(live: list[Any], _now: list[Any], before: list[Any]) -> None:
    warnings.simplefilter("default", append=True)  # has every module look at the filters again
    live[:] = before


def _set_frozen(before: bool) -> None:
    if not before:
        gc.unfreeze()


def _fill(live: list[Any], before: list[Any]) -> None:
    live[:] = before


class _LoggerSettings(NamedTuple):
    level: int
    handlers: list[logging.Handler]
    propagate: bool
    disabled: bool


def _loggers() -> dict[str, _LoggerSettings]:
    known = list(logging.getLogger().manager.loggerDict.items())
    return {
        name: _LoggerSettings(each.level, list(each.handlers), each.propagate, each.disabled)
        for name, each in known
        if isinstance(each, logging.Logger)
    }


def _set_loggers(before: dict[str, _LoggerSettings]) -> None:
    """Put back loggers; new ones too, unless an imported library has made them for itself."""
    new = _LoggerSettings(logging.NOTSET, [], True, False)
    for name in _loggers():
        if name in before or name.partition(".")[0] not in sys.modules:
            logger, was = logging.getLogger(name), before.get(name, new)
            logger.setLevel(was.level)
            _fill(logger.handlers, was.handlers)
            logger.propagate, logger.disabled = was.propagate, was.disabled


def _set_dask(before: dict[str, Any]) -> None:
    with dask.config.config_lock:
        dask.config.config.clear()
        dask.config.config.update(before)


def _umask() -> int:
    """Return the mask for new files, which has no function that reads it without a change."""
    with open("/proc/self/status", encoding="ascii", errors="replace") as file:
        return next(int(line.split()[1], 8) for line in file if line.startswith("Umask:"))


def _limit(number: int) -> Setting:
    """Return the setting of one of the process's limits, as far as it may be changed back."""

    def put_back(before: tuple[int, int]) -> None:
        hard = resource.getrlimit(number)[1]
        soft = before[0] if hard == resource.RLIM_INFINITY else min(before[0], hard)
        resource.setrlimit(number, (soft, hard))

    return Setting(lambda: resource.getrlimit(number), put_back)


class _Streams:
    """Where Python's and numpy's random generators were."""

    def __init__(self) -> None:
        self._python = random.getstate()
        numpy = _numpy()
        self._numpy = None if numpy is None else numpy.random.get_state()

    def go_on(self) -> None:
        """Have generators that were used begin streams which do not depend on how."""
        if random.getstate() != self._python:
            random.setstate(self._python)
            random.seed(random.getrandbits(128))
        numpy, before = _numpy(), self._numpy
        if numpy is None:
            return
        if before is None:
            numpy.random.seed()
        elif pickle.dumps(numpy.random.get_state()) != pickle.dumps(before):
            numpy.random.set_state(before)
            numpy.random.seed(numpy.random.randint(1 << 32, dtype=numpy.uint32))


def _numpy() -> Any:
    """Return numpy, if it is imported."""
    numpy = imported("numpy")
    return numpy if hasattr(numpy, "random") else None


# -- the thread ------------------------------------------------------------------------------------


def _of_thread() -> list[Setting]:
    found = [
        Setting(sys.gettrace, sys.settrace),
        Setting(sys.getprofile, sys.setprofile),
    ]
    if hasattr(os, "sched_getaffinity"):
        found.append(
            Setting(lambda: os.sched_getaffinity(0), lambda cpus: os.sched_setaffinity(0, cpus))
        )
    if (numpy := _numpy()) is not None:
        found.append(Setting(numpy.geterr, lambda modes: numpy.seterr(**modes)))
    return found


# -- torch -----------------------------------------------------------------------------------------


def _of_torch(torch: Any) -> list[Setting]:
    backends, cuda = torch.backends, torch.backends.cuda
    precise = [backends, cuda.matmul, backends.cudnn, backends.mkldnn]
    for several in (backends.cudnn, backends.mkldnn):  # since torch 2.9
        parts = [getattr(several, name, None) for name in ("matmul", "conv", "rnn")]
        precise += [part for part in parts if hasattr(part, "fp32_precision")]
    return [
        Setting(torch.get_default_dtype, torch.set_default_dtype),
        Setting(
            lambda: (
                torch.are_deterministic_algorithms_enabled(),
                torch.is_deterministic_algorithms_warn_only_enabled(),
            ),
            lambda modes: torch.use_deterministic_algorithms(modes[0], warn_only=modes[1]),
        ),
        *attributes(torch.utils.deterministic, "fill_uninitialized_memory"),
        Setting(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
        *attributes(backends.cudnn, "enabled", "benchmark", "benchmark_limit", "deterministic"),
        *attributes(backends.cudnn, "allow_tf32"),
        *attributes(backends.mkldnn, "enabled", "deterministic", "allow_tf32"),
        *attributes(cuda.matmul, "allow_tf32", "allow_fp16_reduced_precision_reduction"),
        *attributes(cuda.matmul, "allow_bf16_reduced_precision_reduction"),
        *attributes(cuda.matmul, "allow_fp16_accumulation"),
        *(each for owner in precise for each in attributes(owner, "fp32_precision")),
        Setting(cuda.flash_sdp_enabled, cuda.enable_flash_sdp),
        Setting(cuda.mem_efficient_sdp_enabled, cuda.enable_mem_efficient_sdp),
        Setting(cuda.math_sdp_enabled, cuda.enable_math_sdp),
        Setting(cuda.cudnn_sdp_enabled, cuda.enable_cudnn_sdp),
        *attributes(backends.quantized, "engine"),
        Setting(backends.mha.get_fastpath_enabled, backends.mha.set_fastpath_enabled),
        *attributes(backends.opt_einsum, "enabled", "strategy"),
        Setting(
            lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
            lambda modes: torch.set_anomaly_enabled(*modes),
        ),
        Setting(torch.is_warn_always_enabled, torch.set_warn_always),
        Setting(
            lambda: dict(vars(torch._tensor_str.PRINT_OPTS)),
            lambda options: vars(torch._tensor_str.PRINT_OPTS).update(options),
        ),
        Setting(
            torch.multiprocessing.get_sharing_strategy,
            torch.multiprocessing.set_sharing_strategy,
        ),
    ]
