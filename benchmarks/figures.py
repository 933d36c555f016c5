"""Results of a benchmark: medians with their spread, targets, tables."""

from __future__ import annotations

import math
import os
import platform
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Spread:
    """A median between a low and a high."""

    low: float
    median: float
    high: float

    def show(self, digits: int = 1) -> str:
        if math.isnan(self.median):
            return "-"
        low, median, high = (_short(each, digits) for each in (self.low, self.median, self.high))
        return f"{median} ({low}–{high})"


@dataclass(frozen=True)
class Target:
    """A limit for a ratio."""

    name: str
    ratio: float
    limit: float
    at_least: bool

    @property
    def met(self) -> bool:
        return self.ratio >= self.limit if self.at_least else self.ratio <= self.limit

    def show(self) -> str:
        sign = "≥" if self.at_least else "≤"
        verdict = "ok" if self.met else "MISSED"
        return f"{self.name}: {_short(self.ratio, 2)} ({sign} {self.limit:g}) {verdict}"


def quartiles(values: Sequence[float]) -> Spread:
    """Return the median and the quartiles."""
    if len(values) == 1:
        return Spread(values[0], values[0], values[0])
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(low, median, high)


def bootstrap(
    rounds: Sequence[Any], figure: Callable[[Sequence[Any]], float], times: int = 400
) -> Spread:
    """Return a figure of all rounds, and its range in nine of ten bootstrap draws of them."""
    dice = random.Random(0)
    drawn = sorted(figure(dice.choices(rounds, k=len(rounds))) for _ in range(times))
    return Spread(drawn[times // 20], figure(rounds), drawn[-1 - times // 20])


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table as text, the first column aligned left and the others right."""
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    lines = []
    for row in (head, *rows):
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def machine() -> dict[str, Any]:
    """Return a description of the machine."""
    import torch

    cpu = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": models[0] if models else cpu,
        "cores": len(os.sched_getaffinity(0)),
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def _short(value: float, digits: int) -> str:
    """Return a number with so many decimals, or more if it is small."""
    if math.isnan(value):
        return "-"
    while abs(value) < 10 ** (1 - digits) and digits < 4:
        digits += 1
    return f"{value:.{digits}f}"
