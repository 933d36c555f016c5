"""Formatting of numbers, durations and names for people."""

from __future__ import annotations

import math
import re

from markupsafe import Markup
from markupsafe import escape as markup_escape

from nbelastic.status import JobStatus

_UNFIT = re.compile("[\x00-\x08\x0b-\x1f\x7f\ud800-\udfff\ufffe\uffff]")  # XML cannot hold these
_PLURALS = {"rank lost": "ranks lost", "batch": "batches"}


def printable(value: object) -> object:
    """Return a value that XML can hold: a string without control characters."""
    if isinstance(value, Markup) or not isinstance(value, str):
        return value
    return _UNFIT.sub("\N{REPLACEMENT CHARACTER}", value)


def escape(value: str) -> str:
    """Return a string escaped for HTML and SVG."""
    return str(markup_escape(printable(value)))


def abbreviate(value: object, most: int) -> str:
    """Return a value on a line of at most `most` characters, cut in its middle."""
    # Names differ at their ends, and a message ends with the line of code or the remedy.
    line = " ".join(str(value).split())
    kept = most - 1
    return line if len(line) <= most else f"{line[: kept - kept // 2]}…{line[-(kept // 2) :]}"


def some_lines(value: str, lines: int = 12, width: int = 600) -> str:
    """Return the first and the last lines of a text, each cut in its middle to `width`."""
    every = value.strip().splitlines()
    cut = [line if len(line) <= width else abbreviate(line, width) for line in every]
    if len(every) > lines:
        last = lines // 3
        cut[lines - last : -last] = [f"… {len(every) - lines:,} more lines"]
    return "\n".join(cut)


def count(amount: int, noun: str) -> str:
    """Return an amount with its noun: ``1 rank``, ``2 ranks``."""
    name = noun if amount == 1 else _PLURALS.get(noun, noun + "s")
    return f"{amount:,} {name}"


def duration(seconds: float) -> str:
    """Return a duration as on a clock: ``0:42``, ``12:05``, ``1:02:03``."""
    whole = int(max(seconds, 0.0)) if math.isfinite(seconds) else 0
    hours, rest = divmod(whole, 3600)
    minutes, left = divmod(rest, 60)
    return f"{hours}:{minutes:02d}:{left:02d}" if hours else f"{minutes}:{left:02d}"


def number(value: float) -> str:
    """Return a metric's value with four significant digits."""
    return f"{value:,.0f}" if 1e4 <= abs(value) < 1e9 else f"{value:.4g}"


def rate(value: float | None) -> str:
    """Return samples per second, or a dash if unknown."""
    if value is None or not math.isfinite(value):
        return "–"
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def pace(status: JobStatus) -> tuple[str, str]:
    """Return a job's pace and its unit: steps where no samples are counted; empty if unknown."""
    if status.samples_per_s is not None:
        return rate(status.samples_per_s), "samples/s"
    return (rate(status.steps_per_s), "steps/s") if status.steps_per_s is not None else ("", "")


def limits(min_np: int, max_np: int | None) -> str:
    """Return the number of ranks that a job may have: ``4``, ``2 to 8``, ``2 or more``."""
    if max_np is None:
        return f"{min_np} or more"
    return str(min_np) if min_np == max_np else f"{min_np} to {max_np}"


def block(bounds: tuple[int, int] | None) -> str:
    """Return a rank's micro-batches: ``4 (0 to 3)`` from the first and the one after the last."""
    if bounds is None:
        return "–"
    first, after = bounds
    if after - first <= 1:
        return f"1 ({first})" if first < after else "none"
    return f"{after - first} ({first} to {after - 1})"


def worker(name: str, address: str | None) -> str:
    """Return a worker's name in Dask, or its address without a name."""
    if name and name != address:
        return f"worker {abbreviate(name, 32)}"
    return abbreviate((address or "").rpartition("://")[2], 40)
