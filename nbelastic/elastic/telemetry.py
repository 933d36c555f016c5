"""Telemetry of a rank: progress, speed, memory, and the metrics that it reports.

Nothing here decides anything. The rank's thread writes it, a few assignments per batch. The agent's
thread reads it and sends it along with the heartbeats.

A report is identified by the commit before it and by its number since then, which are the same on
all ranks. So the report of a repeated step replaces the one that was rolled back.
"""

from __future__ import annotations

import math
import numbers
import threading
from dataclasses import dataclass
from typing import Annotated, Any, Protocol

from nbelastic.elastic.stack import user_line

_EXACT = 2**53

AnyFloat = Annotated[float, "may be NaN"]
"""A number of a message that may be NaN; others must be finite."""


@dataclass(frozen=True)
class CodeLine:
    """A line of code, and the function that it is in."""

    file: str
    line: int
    function: str


@dataclass(frozen=True)
class DataProgress:
    """Rows of one source in the steps that a commit has.

    Attributes
    ----------
    source : str
        Name of the source.
    epoch : int
        The present epoch.
    rows : int
        Rows of an epoch; 0 if that is not known.
    done : int
        Rows of the present epoch that are done.
    seen : int
        Rows that went into the training, over all epochs.
    redone : int
        Rows that were handed out, rolled back, and handed out again.
    lost : int
        Rows that should have been in steps that are done, and were not.
    """

    source: str
    epoch: int
    rows: int
    done: int
    seen: int
    redone: int
    lost: int


@dataclass(frozen=True)
class TelemetrySnapshot:
    """Telemetry of a rank at one moment.

    Attributes
    ----------
    step, samples : int
        Batches and samples processed.
    device : str
        Device that it computes on.
    epoch, batch : int
        Position of its state.
    epochs, batches : int
        Epochs in all and batches in an epoch; 0 if not declared.
    state_bytes, copied_bytes : int
        Bytes of tensors in its state, and of copies for commits.
    line : CodeLine or None
        The line of user code that it executes, if it has made no step since the last snapshot.
    micro_batches : int
        Micro-batches of a step, on all ranks; 0 without a loader.
    first, last : int
        The first micro-batch that it computes, and the one after its last.
    why_not_exact : str
        What keeps its training from being exact.
    data : tuple of DataProgress
        For each loader of its state, the rows in its last commit.
    """

    step: int = 0
    samples: int = 0
    device: str = ""
    epoch: int = 0
    batch: int = 0
    epochs: int = 0
    batches: int = 0
    state_bytes: int = 0
    copied_bytes: int = 0
    line: CodeLine | None = None
    micro_batches: int = 0
    first: int = 0
    last: int = 0
    why_not_exact: str = ""
    data: tuple[DataProgress, ...] = ()


@dataclass(frozen=True)
class MetricsReport:
    """A report of metrics.

    Attributes
    ----------
    commit, number : int
        The commit before it, and its number since then.
    generation : int
        The generation in which it was made.
    step : float or None
        Its position on the horizontal axis, if given.
    values : dict of str to float
        The metrics by name; NaN for one that is not finite.
    """

    commit: int
    number: int
    generation: int
    step: float | None
    values: dict[str, AnyFloat]


class StepObserver(Protocol):
    """Observer of every batch; :mod:`nbelastic.chaos` has one."""

    def step(self, recorded: bool) -> None:
        """Observe a batch, or a commit or check; in the rank's thread."""

    def plan(self) -> None:
        """Observe a plan that has come; in the agent's thread."""


class Telemetry:
    """Telemetry of the rank in whose thread it is made.

    Attributes
    ----------
    steps : int
        Batches processed; without a sampler commits and checks.
    samples : int
        Samples processed.
    device : str
        Device that it computes on.
    place : tuple of (int, int)
        Epoch and batch of its state.
    total : tuple of (int, int)
        Epochs in all and batches in an epoch; 0 if not declared.
    memory : tuple of (int, int)
        Bytes of tensors in its state, and of copies for commits, as far as known.
    observer : StepObserver or None
        Observer of every batch.
    share : tuple of (int, int, int, str)
        Micro-batches of a step, those that it computes, and what keeps it from being exact.
    data : tuple of DataProgress
        For each loader of its state, the rows in its last commit.
    """

    def __init__(self) -> None:
        self.steps = 0
        self.samples = 0
        self.device = ""
        self.place = (0, 0)
        self.total = (0, 0)
        self.memory = (0, 0)
        self.observer: StepObserver | None = None
        self.share = (0, 0, 0, "")
        self.data: tuple[DataProgress, ...] = ()
        self._recording = False
        self._at_commit = (0, 0)
        self._thread = threading.get_ident()
        self._sent = -1
        self._lock = threading.Lock()
        self._finite: dict[str, bool] = {}  # names of metrics that were finite, until that is said
        self._reports: list[MetricsReport] = []
        self._key = (-1, -1)
        self._number = 0

    def recorded(self, samples: int) -> None:
        """Count a batch that a sampler has recorded."""
        self._recording = True
        self.steps += 1
        self.samples += samples
        if self.observer is not None:
            self.observer.step(True)

    def committed(self) -> None:
        """Record that everything counted so far is in a commit."""
        self._at_commit = (self.steps, self.samples)

    def uncommitted(self) -> tuple[int, int]:
        """Return how many batches and samples a sampler has recorded since the last commit."""
        if not self._recording:
            return 0, 0
        return self.steps - self._at_commit[0], self.samples - self._at_commit[1]

    def checked(self) -> None:
        """Count a commit or check as a step, unless a sampler counts batches."""
        if not self._recording:
            self.steps += 1
            if self.observer is not None:
                self.observer.step(False)

    def report(
        self, version: int, generation: int, values: dict[str, float], step: float | None
    ) -> None:
        """Add a report."""
        key = (max(version, 0), generation)
        if key != self._key:
            self._key, self._number = key, 0
        made = MetricsReport(key[0], self._number, generation, step, values)
        self._number += 1
        with self._lock:
            self._reports.append(made)

    def turned(self, values: dict[str, float]) -> list[str]:
        """Return the names of values that are not finite and were before; each name once."""
        found = []
        for name, value in values.items():
            if math.isfinite(value):
                self._finite.setdefault(name, True)
            elif self._finite.get(name):
                self._finite[name] = False  # it was said
                found.append(name)
        return found

    def take(self) -> tuple[TelemetrySnapshot, tuple[MetricsReport, ...]]:
        """Return the present telemetry, and the reports that were not sent before."""
        with self._lock:
            reports, self._reports = self._reports, []
        line = user_line(self._thread) if self.steps == self._sent else []
        self._sent = self.steps
        count, first, last, why_not_exact = self.share
        snapshot = TelemetrySnapshot(
            self.steps,
            self.samples,
            self.device,
            *self.place,
            *self.total,
            *self.memory,
            line=_code_line(line),
            micro_batches=count,
            first=first,
            last=last,
            why_not_exact=why_not_exact,
            data=self.data,
        )
        return snapshot, tuple(reports)


def _code_line(line: list[Any]) -> CodeLine | None:
    return CodeLine(*line) if line else None


def as_numbers(values: dict[str, Any]) -> dict[str, float]:
    """Return reported values as floats.

    Raises
    ------
    TypeError
        One is not a number, nor a tensor or array of one element.
    """
    return {name: _as_number(name, value) for name, value in values.items()}


def as_step(step: Any) -> float | None:
    """Return the position of a report on the horizontal axis; None if it is not finite.

    Raises
    ------
    TypeError
        It is not a number, nor a tensor or array of one element.
    """
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
