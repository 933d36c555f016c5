"""Telemetry of a rank: progress, speed, memory, and reported metrics.

Nothing here decides anything. The rank's thread writes it, a few assignments per batch. The agent's
thread reads it and sends it along with the heartbeats.

A report is identified by the commit before it and by its number since then, which are the same on
all ranks. So the report of a repeated step replaces the one that was rolled back.
"""

from __future__ import annotations

import contextlib
import gc
import math
import numbers
import sys
import sysconfig
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from nbelastic.messages import CodeLine, MetricsReport, RankTelemetry
from nbelastic.status import DataStatus

_EXACT = 2**53

NOT_THE_USERS = (
    str(Path(__file__).parents[2]),
    *(sysconfig.get_path(name) for name in ("purelib", "platlib", "stdlib", "platstdlib")),
    "<frozen ",
)
"""How names of files begin that are not the user's: the library's, packages', and nbelastic's."""


class Telemetry:
    """Telemetry of the rank in whose thread it is made; see :class:`RankTelemetry`."""

    def __init__(self) -> None:
        self.steps = 0  # without a sampler commits and checks
        self.samples = 0
        self.device = ""
        self.place = (0, 0)  # epoch and batch
        self.total = (0, 0)  # epochs, and batches of an epoch; or no epochs, and steps
        self.memory = (0, 0)  # bytes of the state, and of copies
        self.observer: Any = None  # of each batch, commit or check; a FaultInjector of chaos
        self.share = (0, 0, 0, "")  # micro-batches, first and last, and why not exact
        self.data: tuple[DataStatus, ...] = ()
        self._recording = False
        self._at_commit = (0, 0)
        self._thread = threading.get_ident()
        self._sent = -1
        self._lock = threading.Lock()
        self._reports: list[MetricsReport] = []
        self._key = (-1, -1)
        self._number = 0

    def recorded(self, samples: int) -> None:
        """Count a batch that a sampler has recorded."""
        self._recording = True
        self.steps += 1
        self.samples += samples
        if self.observer is not None:
            self.observer.step()

    def nothing_to_redo(self, *, made: bool = False) -> None:
        """Record that a commit has everything counted so far.

        It was received, or made by this rank; then without a sampler it is counted itself next.
        """
        self._at_commit = (self.steps + (made and not self._recording), self.samples)

    def uncommitted(self) -> tuple[int, int]:
        """Return how many batches and samples were counted since the last commit."""
        return self.steps - self._at_commit[0], self.samples - self._at_commit[1]

    def checked(self) -> None:
        """Count a commit or check as a step, unless a sampler counts batches."""
        if not self._recording:
            self.steps += 1
            if self.observer is not None:
                self.observer.step()

    def report(
        self, version: int, generation: int, values: dict[str, Any], step: Any = None
    ) -> None:
        """Add a report; TypeError if one of its values is not a single number."""
        found = {name: _as_number(name, value) for name, value in values.items()}
        place = _as_step(step)
        key = (max(version, 0), generation)
        if key != self._key:
            self._key, self._number = key, 0
        made = MetricsReport(key[0], self._number, generation, place, found)
        self._number += 1
        with self._lock:
            self._reports.append(made)

    def take(self, job: str = "", start: int = 0) -> RankTelemetry:
        """Return the present telemetry, with the reports that were not sent before."""
        with self._lock:
            reports, self._reports = self._reports, []
        line = user_line(self._thread) if self.steps == self._sent else None
        self._sent = self.steps
        count, first, last, why_not_exact = self.share
        resident_bytes, gpu_bytes, gpu_total = memory_in_use()
        return RankTelemetry(
            job,
            start,
            self.steps,
            self.samples,
            self.device,
            *self.place,
            *self.total,
            *self.memory,
            resident_bytes=resident_bytes,
            gpu_bytes=gpu_bytes,
            gpu_total=gpu_total,
            line=line,
            micro_batches=count,
            first=first,
            last=last,
            why_not_exact=why_not_exact,
            data=self.data,
            reports=tuple(reports),
        )


class ResetTimings:
    """Moments of the reset in progress, if any; any thread may mark them.

    In their order: ``noticed`` (an operation has failed, or a message has come that the generation
    is over or about to change), ``aborted`` (the rank's thread has left the user's code),
    ``restored`` (the state is that of the last commit), ``ready`` (reported), ``planned`` (the next
    plan has come), ``connected``, ``synchronised`` (the state is that of all members), ``stepped``
    (the first commit or check after it).
    """

    def __init__(self) -> None:
        self._moments: list[tuple[str, float]] = []  # which a thread changes in one step

    @property
    def in_progress(self) -> bool:
        """Whether a change has been noticed."""
        return bool(self._moments)

    def begin(self) -> None:
        """Mark that a change has been noticed, unless a reset is in progress."""
        if not self._moments:
            self._moments.append(("noticed", time.monotonic()))

    def mark(self, phase: str) -> None:
        """Mark the end of a phase; where resets run together, the last one counts."""
        if self._moments:
            self._moments.append((phase, time.monotonic()))

    def end(self) -> dict[str, float]:
        """Mark the end of the reset; return after how many milliseconds each phase was over."""
        self.mark("stepped")
        moments, self._moments = self._moments, []
        begin = moments[0][1]
        found: dict[str, float] = {}
        for phase, moment in moments:
            found.pop(phase, None)  # so that the last one has the last place, too
            found[phase] = round(1e3 * (moment - begin), 1)
        return found


_COLLECTOR = threading.Lock()  # held while the garbage collector is off


@contextlib.contextmanager
def collector_off() -> Iterator[None]:
    """Keep garbage from being collected during calls that break if another thread goes on there."""
    with _COLLECTOR:
        collects = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if collects:
                gc.enable()


def user_line(thread: int) -> CodeLine | None:
    """Return the innermost line of user code in which a thread is."""
    # CPython 3.11 makes frame objects when they are asked for, and may collect garbage on the way.
    # What that runs (a callback of `gc`, a destructor) may release the interpreter's lock. Then the
    # other thread goes on, and the new object stands for memory that has been reused: the process
    # crashes. So the collector is off meanwhile, as in sys._current_frames itself
    # (https://github.com/python/cpython/issues/106883).
    with collector_off():
        frame = sys._current_frames().get(thread)
        while frame is not None and frame.f_code.co_filename.startswith(NOT_THE_USERS):
            frame = frame.f_back
    if frame is None:
        return None
    return CodeLine(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)


def memory_in_use() -> tuple[int, int, int]:
    """Return the bytes of this process, of torch on its fullest GPU, and of that GPU.

    CUDA is not initialized for that: until the rank has done so, the last two are 0.
    """
    resident = psutil.Process().memory_info().rss
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    if cuda is None or not cuda.is_initialized():
        return resident, 0, 0
    used, gpu = max((cuda.memory_allocated(gpu), gpu) for gpu in range(cuda.device_count()))
    return resident, used, cuda.get_device_properties(gpu).total_memory


def _as_step(step: Any) -> float | None:
    """Return the position of a report on the horizontal axis; None if it is not finite."""
    if step is None or (isinstance(step, int) and abs(step) <= _EXACT):
        return step
    number = _as_number("step", step)
    return None if math.isnan(number) else number


def _as_number(name: str, value: Any) -> float:
    if not isinstance(value, numbers.Real) and hasattr(value, "item"):
        try:
            value = value.item()
        except (ValueError, RuntimeError) as error:
            raise TypeError(f"report({name}=…): must be a single number: {error}") from None
    if not isinstance(value, numbers.Real):
        raise TypeError(f"report({name}={value!r}): must be a number, or a tensor of one element")
    try:
        number = float(value)
    except OverflowError:  # an integer beyond all floats
        return math.nan
    return number if math.isfinite(number) else math.nan
