"""The main program of a rank's process, after its fork.

Its threads: the main one runs the function; the channel's two read orders and send messages. They
share the session, whose methods say which thread may call them.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import functools
import importlib
import io
import mmap
import os
import pickle
import signal
import sys
import threading
import types
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import dask.config
import distributed
import torch
import torch.distributed
from distributed import Client
from torch.distributed import distributed_c10d
from torch.optim import optimizer

from nbelastic import collectives
from nbelastic.cluster.dask_compat import key_of, value_of
from nbelastic.cluster.worker.rank import children
from nbelastic.cluster.worker.rank.channel import RankChannel, RankSetup
from nbelastic.cluster.worker.rank.program import RankProgram
from nbelastic.elastic.ranks import session
from nbelastic.elastic.ranks.context import current_or_none
from nbelastic.elastic.ranks.runtime import (
    DEFAULT_RUNTIME,
    THREAD_VARIABLES,
    Interrupt,
    own_gpu_first,
)
from nbelastic.elastic.training_checks import note_step

if TYPE_CHECKING:
    from nbelastic.elastic.ranks.context import Context


def main(channel_fd: int) -> None:
    """Run as a rank until its function is over."""
    os.set_inheritable(channel_fd, False)  # no program that it starts has it
    faulthandler.enable(2, all_threads=False)
    # Output goes line by line. The rank server's streams know whether its own descriptors could
    # seek, which a pipe cannot.
    sys.stdout = sys.__stdout__ = _lines(1)  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = _lines(2)  # type: ignore[misc]
    channel = RankChannel(channel_fd)
    setup: RankSetup = pickle.loads(channel.read())
    _take_environment(setup)
    runtime = replace(DEFAULT_RUNTIME, interrupt=SignalInterrupt, on_set_up=keep_freed_memory)
    program = RankProgram(setup.spec, setup.payload, channel.send, runtime)
    channel.start(program.take, program.beat)
    dask_client = RankClient(setup)
    try:
        _handle_signals(program)
        program.session.scratch = setup.scratch
        program.session.fetch_partition = dask_client.fetch_partition
        dask_client.install()
        hook_torch()
        keep_variables(program.session)
    except BaseException as error:
        program.fail(error)
    else:
        program.run()
        children.exit_status = children.RETURNED if program.returned else 0
    finally:
        with contextlib.suppress(Exception):
            dask_client.close()
        channel.close()


def _take_environment(setup: RankSetup) -> None:
    """Give this process what the worker's has, and fresh random numbers."""
    os.environ.clear()
    os.environ.update(setup.environment)
    os.environ.update(setup.spec.env)
    os.environ.update(dict.fromkeys(THREAD_VARIABLES, str(setup.threads)))
    with contextlib.suppress(OSError):
        os.chdir(setup.directory)
    sys.path[:] = setup.path
    sys.argv[:] = [""]
    main = types.ModuleType("__main__")  # not the rank server's, as multiprocessing has it, too
    sys.modules["__main__"] = sys.modules["__mp_main__"] = main
    # Python's own generator seeds itself anew in a fork. Those of NumPy and torch do not.
    import numpy

    numpy.random.seed()
    torch.seed()
    torch.set_num_threads(setup.threads)


def _handle_signals(program: RankProgram) -> None:
    """Leave a batch system's SIGTERM to the worker, until its order to end.

    It goes to all processes of a job, and the worker acts on it for its rank.
    """
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        return
    process = os.getpid()

    def handle(number: int, _: object) -> None:
        if program.session.ordered_to_end:
            sys.exit(128 + number)

    def give_back() -> None:
        """Have a fork end by it as any process does."""
        if os.getppid() == process and signal.getsignal(signal.SIGTERM) is handle:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    signal.signal(signal.SIGTERM, handle)
    os.register_at_fork(after_in_child=give_back)


# -- standard streams, and variables ---------------------------------------------------------------


def _lines(descriptor: int) -> io.TextIOWrapper:
    stream = open(descriptor, "wb", closefd=False)  # noqa: SIM115 - for the life of the process
    return io.TextIOWrapper(
        stream, encoding="utf-8", errors="backslashreplace", line_buffering=True
    )


def keep_variables(context: Context) -> None:
    """Set the variables in which torchrun and horovodrun tell a process its rank.

    Trainers and scripts read them before they ask ``torch.distributed``, and some once more in each
    epoch. So they are set now, to the foreseen ranks, and again as each generation has formed.
    """

    def write() -> None:
        for name in ("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size"):
            value = str(getattr(context, name))
            os.environ[f"HOROVOD_{name.upper()}"] = value
            if not name.startswith("cross"):
                os.environ[name.upper().replace("SIZE", "WORLD_SIZE")] = value

    write()
    context.after_forming = (write, *context.after_forming)
    # accelerate refuses ranks on several hosts without an address. The process group needs none.
    # A name that never resolves makes other uses of it fail at once instead of waiting for a host.
    os.environ.setdefault("MASTER_ADDR", "nbelastic.invalid")
    os.environ.setdefault("MASTER_PORT", "29500")  # torchrun's default
    with warnings.catch_warnings():  # of a driver that does not work
        warnings.simplefilter("ignore")
        # It asks the driver's library, so that forks of the rank can still use the GPU.
        gpus = torch.cuda.device_count()
    if not gpus:
        # Without it accelerate makes a rank on a host without GPU a world of its own.
        os.environ.setdefault("ACCELERATE_USE_CPU", "true")
    elif own_gpu_first():
        # accelerate and Transformers take the GPU of LOCAL_RANK, which is another worker's.
        os.environ.setdefault("ACCELERATE_TORCH_DEVICE", "cuda:0")


# -- a rank that trains without nbelastic ----------------------------------------------------------
#
# Ranks often run code that was written for ``torch.distributed``, which ``init_process_group``
# shows. Steps of optimizers show what is trained, which should be the same on all ranks.


def hook_torch() -> None:
    """Hook torch in this process."""
    modules: tuple[Any, ...] = (distributed_c10d, torch.distributed)
    original: Callable[..., None] = distributed_c10d.init_process_group

    @functools.wraps(original)
    def init_process_group(*args: Any, **kwargs: Any) -> None:
        context = current_or_none()
        if context is None:
            original(*args, **kwargs)
            return
        # By name, because the room of torch is no part of the cluster's.
        groups = importlib.import_module("nbelastic.torch.process_group")
        groups.answer(original, *args, **kwargs)
        if groups.default_group() is None:
            context.in_torch_group = distributed_c10d.get_world_size() > 1

    for module in modules:
        module.init_process_group = init_process_group
    optimizer.register_optimizer_step_post_hook(_stepped)


def _stepped(stepped: Any, *_: object) -> None:
    context = current_or_none()
    if context is not None:
        note_step(context, stepped)


# -- Dask's functions for tasks --------------------------------------------------------------------


class RankClient:
    """The client of a rank, made when it is first asked for.

    It gives code in a rank what a task gets from its worker: a rank's process has none in it.
    """

    def __init__(self, setup: RankSetup) -> None:
        self._setup = setup
        self._lock = threading.Lock()
        self._client: Client | None = None

    def install(self) -> None:
        """Make Dask's functions for tasks use this client, wherever they are imported."""
        if self._setup.dask_config:
            with contextlib.suppress(Exception):  # a class that this process lacks
                dask.config.update(dask.config.config, pickle.loads(self._setup.dask_config))
        for name in ("get_client", "secede", "rejoin", "worker_client"):
            original = getattr(distributed, name)
            for module_name, module in list(sys.modules.items()):
                theirs = module_name.partition(".")[0] in ("dask", "distributed")
                if theirs and vars(module).get(name) is original:
                    setattr(module, name, getattr(self, name))

    def close(self) -> None:
        """Close the client, if any."""
        with self._lock:
            client, self._client = self._client, None
        if client is not None:
            client.close()

    def fetch_partition(self, text: str) -> Any:
        """Return the partition of a Dask collection by its key in JSON. Any thread."""
        return value_of(self.get_client(), key_of(text))

    # In place of Dask's:

    def get_client(
        self, address: str | None = None, timeout: Any = None, resolve_address: bool = True
    ) -> Client:
        """Return the client of this rank; that of another cluster if its `address` is given."""
        setup, timeout = self._setup, timeout or "30s"
        if address not in (None, setup.scheduler):
            return distributed.Client(address, timeout=timeout)
        with self._lock:
            if self._client is None:
                self._client = distributed.Client(
                    setup.scheduler,
                    timeout=timeout,
                    security=setup.security,
                    name="nbelastic-rank",
                    direct_to_workers=True,  # as a task's client: values don't pass the scheduler
                )
            return self._client

    def secede(self) -> None:
        """Do nothing: a rank is in no pool of threads."""

    rejoin = secede

    @contextlib.contextmanager
    def worker_client(self, timeout: Any = None, separate_thread: bool = True) -> Iterator[Client]:
        """Return the client of this rank for a ``with`` block."""
        yield self.get_client(timeout=timeout)


# -- memory ----------------------------------------------------------------------------------------

# Parameters of mallopt(3) and madvise(2).
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX = -1, -2, -4
_HUGE_PAGES = 14

# As much as a heap of a thread can have. With so much free at the top, empty heaps stay, too.
_HEAP_BYTES = 64 << 20
_NEVER = (1 << 31) - 1

_SLACK_BYTES = 32 << 20
"""Bytes for activations, and for the buffers that libraries of matrices keep."""


def keep_freed_memory(nbytes: int = 0) -> None:
    """Keep freed memory in this process for the next step, unless the user has chosen.

    Get the first `nbytes` of it now: the first touch of a page is what takes time.

    Dask's nanny has processes return freed memory to the system from 64 KB on
    (``MALLOC_TRIM_THRESHOLD_``), and glibc maps large blocks anew in any case. Then every gradient
    comes from the system page by page, in each step. So a rank keeps freed memory from its first
    step on, and a newcomer gets that of its first step before others wait for it. A thread's
    blocks of more than 64 MB always come from the system, but not the main thread's.

    See https://distributed.dask.org/en/stable/worker-memory.html and ``mallopt(3)``.
    """
    if os.environ.keys() & {"MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_TOP_PAD_"}:
        return
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "gnu_get_libc_version"):
        return  # another C library
    libc.mallopt(_MMAP_MAX, 0)
    libc.mallopt(_TOP_PAD, _HEAP_BYTES)
    libc.mallopt(_TRIM_THRESHOLD, _NEVER)
    if not nbytes:
        return
    # One block, whose memory stays in one piece: smaller ones that are taken from it leave the
    # rest whole. Of many blocks freed, any may be a few bytes too short for the next tensor.
    size = nbytes + nbytes // 16 + _SLACK_BYTES
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.restype, libc.free.argtypes = None, [ctypes.c_void_p]
    block = libc.malloc(size)
    if block:
        first = -(-block // mmap.PAGESIZE) * mmap.PAGESIZE
        length = (block + size - first) // mmap.PAGESIZE * mmap.PAGESIZE
        # As large as the system has them; an error says that it has none.
        libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(length), _HUGE_PAGES)
        ctypes.memset(block, 0, size)
        libc.free(block)


# -- interrupts ------------------------------------------------------------------------------------

SIGNAL = signal.SIGRTMIN + 7 if hasattr(signal, "SIGRTMIN") else signal.SIGUSR2
"""One that neither users nor batch systems are likely to use."""

_OURS = (str(Path(collectives.__file__).parent), session.__file__)


class SignalInterrupt(Interrupt):
    """Interruption of the main thread by a signal whose handler raises; to be made there.

    The thread that reads orders sends the signal to the main thread, whose handler raises. That
    reaches code that sleeps or waits, but none in C that never returns. It must not be raised in
    the session and the communicators, which hold locks and obey by themselves: then it is tried
    again later.
    """

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._reachable = False
        self._wanted: type[BaseException] | None = None
        signal.signal(SIGNAL, self._handle)

    def reachable(self) -> SignalInterrupt:
        return self

    # No generator, because ``contextlib`` sets tracebacks of exceptions.
    def __enter__(self) -> None:
        self._reachable = True

    def __exit__(self, *_: object) -> None:
        self._reachable = False

    def request(self, kind: type[BaseException]) -> None:
        self._wanted = kind
        self.nudge()

    def drop(self) -> None:
        self._wanted = None

    def nudge(self) -> None:
        if self._wanted is not None and self._reachable:
            signal.pthread_kill(self._thread, SIGNAL)

    def _handle(self, _: int, frame: FrameType | None) -> None:
        kind = self._wanted
        if kind is not None and self._reachable:
            while frame is not None:
                if frame.f_code.co_filename.startswith(_OURS):
                    return
                frame = frame.f_back
            self._wanted = None
            raise kind
