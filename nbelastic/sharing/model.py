"""Data of sharing: what a job wants, and what there is. All of it is frozen."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Want:
    """What a job wants of the slots of its cluster."""

    job: str  # name
    since: float = 0.0  # when it was submitted
    least: int = 1  # its floor: with fewer slots it cannot train
    # Most slots that it can use, at least `least`; infinite: all that there are.
    most: float = math.inf
    kept: int = 0  # slots that it holds and that are not taken from it, at most `most`
    has: int = 0  # slots that it has, by which ties are decided
    running: bool = False  # it has had its floor, or has a state that can be lost
    waiting_since: float | None = None  # since when it has been below its floor; None: it is not
    priority: int = 0  # jobs of a higher priority are served first
    weight: float = 1.0  # its part of what a priority has, relative to others; above 0
    preemptible: bool = False  # a job of a higher priority may take slots of its floor
    resumable: bool = False  # it yields what it keeps without a loss: its state is on disk
    per_host: int | None = None  # most slots on one host; None: no limit


@dataclass(frozen=True)
class SlotGroup:
    """Slots that are alike: on one host, and of use to the same jobs."""

    size: int  # number of the slots
    host: str = ""
    jobs: frozenset[str] | None = None  # that can use them; None: all
