"""What a rank sets for its process and thread is put back when it has ended."""

from __future__ import annotations

import builtins
import contextlib
import decimal
import gc
import json
import locale
import logging
import os
import random
import resource
import socket
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import dask
import numpy as np
import pytest
import torch
from nbelastic.cluster.worker.torch_hooks import hooked_torch

from nbelastic.cluster.worker.environment import prepared


def one_processor() -> None:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})


def lower_limit() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft - 1, hard))


def change_zone() -> None:
    os.environ["TZ"] = "XYZ-5"
    time.tzset()


def new_logger() -> None:
    OWN_LOGGER.manager.loggerDict["of a job"] = OWN_LOGGER
    OWN_LOGGER.addHandler(logging.NullHandler())
    OWN_LOGGER.setLevel(logging.DEBUG)


OWN_LOGGER = logging.Logger("of a job")
OWN_LOGGER.manager = logging.getLogger().manager


def enter_inference_mode() -> None:
    kept.append(torch.inference_mode())
    kept[-1].__enter__()


def autocast() -> None:
    torch.set_autocast_enabled("cpu", True)
    torch.set_autocast_dtype("cpu", torch.float16)


kept: list[Any] = []

ROOT = Path(__file__).parents[2]

# What is set, and how it is read.
CHANGES: dict[str, tuple[Any, Any]] = {
    "directory": (lambda: os.chdir("/"), os.getcwd),
    "new variable": (lambda: os.environ.update(A_NEW="1"), lambda: os.environ.get("A_NEW")),
    "variable": (lambda: os.environ.update(HOME="/"), lambda: os.environ["HOME"]),
    "no variable": (lambda: os.environ.pop("HOME"), lambda: os.environ.get("HOME")),
    "time zone": (change_zone, lambda: time.strftime("%Z")),
    "path": (lambda: sys.path.insert(0, "/nowhere"), lambda: list(sys.path)),
    "no path": (lambda: setattr(sys, "path", None), lambda: list(sys.path)),
    "another path": (lambda: setattr(sys, "path", [*sys.path]), lambda: id(sys.path)),
    "a path of objects": (lambda: sys.path.insert(0, 5), lambda: list(sys.path)),  # type: ignore
    "no importers": (sys.meta_path.clear, lambda: list(sys.meta_path)),
    "no hooks of paths": (lambda: setattr(sys, "path_hooks", None), lambda: list(sys.path_hooks)),
    "another environment": (
        lambda: setattr(os, "environ", dict(os.environ)),
        lambda: type(os.environ),
    ),
    "no filters": (lambda: setattr(warnings, "filters", None), lambda: list(warnings.filters)),
    "no handlers": (
        lambda: setattr(logging.getLogger(), "handlers", None),
        lambda: list(logging.getLogger().handlers),
    ),
    "open": (lambda: setattr(builtins, "open", None), lambda: builtins.open),
    "arguments": (lambda: sys.argv.append("--x"), lambda: list(sys.argv)),
    "other arguments": (lambda: setattr(sys, "argv", ["x"]), lambda: list(sys.argv)),
    "warnings": (
        lambda: warnings.simplefilter("always", BytesWarning),
        lambda: list(warnings.filters),
    ),
    "recursion": (lambda: sys.setrecursionlimit(4321), sys.getrecursionlimit),
    "no collection": (gc.disable, gc.isenabled),
    "rare collection": (lambda: gc.set_threshold(9, 9, 9), gc.get_threshold),
    "frozen objects": (gc.freeze, lambda: gc.get_freeze_count() > 0),
    "sockets": (lambda: socket.setdefaulttimeout(3.0), socket.getdefaulttimeout),
    "locale": (
        lambda: locale.setlocale(locale.LC_ALL, "C.UTF-8"),
        lambda: locale.setlocale(locale.LC_ALL),
    ),
    "logging": (
        lambda: logging.getLogger().addHandler(logging.NullHandler()),
        lambda: list(logging.getLogger().handlers),
    ),
    "level": (
        lambda: logging.getLogger().setLevel(logging.DEBUG),
        lambda: logging.getLogger().level,
    ),
    "a logger's level": (
        lambda: logging.getLogger("distributed").setLevel(logging.CRITICAL),
        lambda: logging.getLogger("distributed").level,
    ),
    "a logger's handlers": (
        lambda: logging.getLogger("distributed").addHandler(logging.NullHandler()),
        lambda: list(logging.getLogger("distributed").handlers),
    ),
    "a new logger": (new_logger, lambda: (OWN_LOGGER.handlers, OWN_LOGGER.level)),
    "dask": (
        lambda: dask.config.set({"distributed.worker.memory.target": 0.1}),
        lambda: dask.config.get("distributed.worker.memory.target"),
    ),
    "decimals": (
        lambda: setattr(decimal.DefaultContext, "prec", 5),
        lambda: decimal.DefaultContext.prec,
    ),
    "no logging": (logging.disable, lambda: logging.getLogger().isEnabledFor(logging.CRITICAL)),
    "umask": (
        lambda: os.umask(0o077),
        lambda: subprocess.run(["sh", "-c", "umask"], capture_output=True, check=True).stdout,
    ),
    "stdout": (lambda: setattr(sys, "stdout", sys.stderr), lambda: sys.stdout),
    "hook": (lambda: setattr(sys, "excepthook", print), lambda: sys.excepthook),
    "hook of threads": (
        lambda: setattr(threading, "excepthook", print),
        lambda: threading.excepthook,
    ),
    "print": (lambda: setattr(builtins, "print", repr), lambda: builtins.print),
    "limit": (lower_limit, lambda: resource.getrlimit(resource.RLIMIT_NOFILE)),
    "processors": (one_processor, lambda: os.sched_getaffinity(0)),
    "numpy's errors": (lambda: np.seterr(all="raise"), np.geterr),
    "numpy's words": (lambda: np.set_printoptions(precision=2), np.get_printoptions),
    "profile": (lambda: sys.setprofile(lambda *_: None), sys.getprofile),
    "gradients": (lambda: torch.set_grad_enabled(False), torch.is_grad_enabled),
    "inference": (enter_inference_mode, torch.is_inference_mode_enabled),
    "autocast": (
        autocast,
        lambda: (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
    ),
    "device": (lambda: torch.set_default_device("meta"), lambda: torch.zeros(1).device),
    "type": (lambda: torch.set_default_dtype(torch.float64), torch.get_default_dtype),
    "deterministic": (
        lambda: torch.use_deterministic_algorithms(True, warn_only=True),
        torch.get_deterministic_debug_mode,
    ),
    "precision": (
        lambda: torch.set_float32_matmul_precision("medium"),
        torch.get_float32_matmul_precision,
    ),
    "benchmark": (
        lambda: setattr(torch.backends.cudnn, "benchmark", True),
        lambda: torch.backends.cudnn.benchmark,
    ),
    "tf32": (
        lambda: setattr(torch.backends.cuda.matmul, "allow_tf32", True),
        lambda: torch.backends.cuda.matmul.allow_tf32,
    ),
    "anomalies": (lambda: torch.autograd.set_detect_anomaly(True), torch.is_anomaly_enabled),
    "threads": (lambda: torch.set_num_threads(1), torch.get_num_threads),
    "torch's words": (
        lambda: torch.set_printoptions(precision=2),
        lambda: torch._tensor_str.PRINT_OPTS.precision,
    ),
    "attention": (
        lambda: torch.backends.cuda.enable_flash_sdp(False),
        torch.backends.cuda.flash_sdp_enabled,
    ),
    "torch's seed": (lambda: torch.manual_seed(7), torch.initial_seed),
}
if hasattr(torch.backends.cuda.matmul, "fp32_precision"):
    CHANGES["new precision"] = (
        lambda: setattr(torch.backends.cuda.matmul, "fp32_precision", "tf32"),
        lambda: (
            torch.backends.cuda.matmul.fp32_precision,
            torch.get_float32_matmul_precision(),
        ),
    )


@contextlib.contextmanager
def a_rank(directory: Any) -> Any:
    with prepared(2, str(directory)), hooked_torch():
        yield


def try_all() -> None:
    """Print, for each change, whether it is put back; in a process of its own."""
    with tempfile.TemporaryDirectory() as directory:
        for name, (change, read) in CHANGES.items():
            before = read()
            with contextlib.suppress(ValueError), a_rank(directory):
                change()
                raise ValueError("the function's")
            after = read()
            problem = "" if after == before else f"{before!r} has become {after!r}"
            kept.clear()
            print(json.dumps([name, problem]), file=sys.__stdout__, flush=True)


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str]:
    """What comes of each change. The process of the tests has event loops that go on meanwhile."""
    call = "from tests.cluster.test_settings import try_all; try_all()"
    done = subprocess.run(
        [sys.executable, "-c", call],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return dict(json.loads(line) for line in done.stdout.splitlines())


@pytest.mark.parametrize("name", CHANGES)
def test_a_setting_is_put_back(name: str, outcomes: dict[str, str]) -> None:
    assert outcomes[name] == ""


def test_the_last_of_several_ranks_puts_back(tmp_path: Any) -> None:
    before = torch.get_default_dtype(), dict(os.environ)
    first = contextlib.ExitStack()
    first.enter_context(a_rank(tmp_path))
    with a_rank(tmp_path):
        torch.set_default_dtype(torch.float64)
        os.environ["A_NEW"] = "1"
        first.close()
        assert torch.get_default_dtype() == torch.float64
        assert os.environ["A_NEW"] == "1"
        assert os.environ["OMP_NUM_THREADS"] == "2"
    assert before == (torch.get_default_dtype(), dict(os.environ))


def test_what_dask_has_uploaded_stays_importable(tmp_path: Any) -> None:
    with a_rank(tmp_path):
        sys.path.insert(0, str(tmp_path / "uploaded.zip"))
        sys.path.insert(0, "/nowhere")
    assert sys.path[0] == str(tmp_path / "uploaded.zip")
    assert "/nowhere" not in sys.path
    del sys.path[0]


def test_a_seed_does_not_reach_the_next_rank(tmp_path: Any) -> None:
    def draw() -> tuple[float, float]:
        return random.random(), float(np.random.random())

    states = random.getstate(), np.random.get_state()
    found = []
    for seed in (1, 2):
        random.setstate(states[0])
        np.random.set_state(states[1])
        with a_rank(tmp_path):
            random.seed(seed)
            np.random.seed(seed)
            draw()
        found.append(draw())
    assert found[0] == found[1]
    with a_rank(tmp_path):
        draw()
    assert not {*draw()} & {*found[0]}


SCRIPT = """
import sys, threading
from nbelastic.cluster.worker.environment import prepared
from nbelastic.cluster.worker.torch_hooks import hooked_torch
with prepared(1, "/nowhere"), hooked_torch():
    assert "torch" not in sys.modules
    import torch
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    torch.set_default_device("meta")
    torch.set_autocast_enabled("cpu", True)
    torch.backends.cudnn.benchmark = True
print(torch.get_default_dtype(), torch.is_grad_enabled(), torch.get_default_device(),
      torch.is_autocast_enabled("cpu"), torch.backends.cudnn.benchmark)
"""


def test_settings_are_put_back_where_the_rank_has_imported_torch() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True
    )
    assert done.stdout == "torch.float32 True cpu False False\n"
