"""Figures of a rank, declared once for the panel and the terminal."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from nbelastic.status import JobStatus, RankStatus

from .formatting import abbreviate, block, count, pace, rate
from .text import JobSnapshot, line


@dataclass(frozen=True)
class Figure:
    """A column of a table of ranks."""

    title: str
    cell: Callable[[RankStatus], str]
    is_number: bool = False  # aligned to the right
    in_frame: Callable[[RankStatus], str] | None = None  # at the end of a row of the frame
    is_shown: Callable[[JobStatus], bool] = lambda _: True


def _is_new(rank: RankStatus) -> bool:
    return rank.rank is None and not rank.commits


def memory(rank: RankStatus) -> str:
    """Return the memory of a rank's process, or a dash."""
    return f"{rank.resident_bytes / 1e9:.1f} GB" if rank.resident_bytes else "–"


def _gpu_memory(rank: RankStatus) -> str:
    return f"{rank.gpu_bytes / 1e9:.1f} of {rank.gpu_total / 1e9:.0f} GB" if rank.gpu_total else "–"


FIGURES = [
    Figure(
        "Commits",
        lambda rank: "–" if _is_new(rank) else f"{rank.commits:,}",
        is_number=True,
        in_frame=lambda rank: "–" if _is_new(rank) else count(rank.commits, "commit"),
    ),
    Figure(
        "Samples/s",
        lambda rank: rate(rank.samples_per_s),
        is_number=True,
        in_frame=lambda rank: (
            "" if rank.samples_per_s is None else f" {rate(rank.samples_per_s)}/s"
        ),
        is_shown=lambda status: pace(status)[1] != "steps/s",
    ),
    Figure(
        "Steps/s",
        lambda rank: rate(rank.steps_per_s),
        is_number=True,
        is_shown=lambda status: pace(status)[1] == "steps/s",
    ),
    Figure(
        "Memory",
        memory,
        is_number=True,
        in_frame=lambda rank: f" {memory(rank)}" if rank.resident_bytes else "",
        is_shown=lambda status: any(rank.resident_bytes for rank in status.ranks),
    ),
    Figure(
        "GPU memory",
        _gpu_memory,
        is_number=True,
        is_shown=lambda status: any(rank.gpu_total for rank in status.ranks),
    ),
    Figure("Device", lambda rank: abbreviate(rank.device, 24) or "–"),
    Figure(
        "Micro-batches",
        lambda rank: block(rank.micro_batches),
        is_shown=lambda status: bool(status.micro_batches),
    ),
]
"""The columns, from left to right; one more is one more element.

A value that ``RankStatus`` lacks comes from the rank in ``RankTelemetry``, under the same name;
nothing between needs a change.
"""


def shown_figures(status: JobStatus) -> list[Figure]:
    """Return the figures that a table of a job's ranks has."""
    return [figure for figure in FIGURES if figure.is_shown(status)]


def status_lines(snapshot: JobSnapshot) -> list[str]:
    """Return lines on a job and its ranks, for the commands that show a job's status."""
    lines, status = [line(snapshot)], snapshot.status
    if status.reason:
        lines.append(f"  {status.reason}")
    for rank in status.ranks:
        number = "–" if rank.rank is None else str(rank.rank)
        figure = f"{memory(rank):>8}" if rank.resident_bytes else ""
        rest = "  ".join(filter(None, (figure, rank.name, rank.worker)))
        lines.append(f"  {number:>3}  {rank.state:<9}  {rank.commits:>7,} commits  {rest}")
    return lines
