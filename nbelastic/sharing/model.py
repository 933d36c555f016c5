"""Data of sharing: what a job wants, and what there is. All of it is frozen."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Want:
    """What a job wants of the slots of its cluster.

    Attributes
    ----------
    job : str
        Its name.
    since : float
        When it was submitted.
    least : int
        Its floor: with fewer slots it cannot train.
    most : float
        Most slots that it can use, at least `least`; infinite for all that there are.
    kept : int
        Slots that it holds and that are not taken from it, at most `most`.
    has : int
        Slots that it has, by which ties are decided.
    running : bool
        Whether it has had its floor, or has a state that can be lost.
    waiting_since : float or None
        Since when it has been below its floor; None if it is not.
    priority : int
        Jobs of a higher priority are served first.
    weight : float
        Its part of what a priority has, relative to others; above 0.
    preemptible : bool
        Whether a job of a higher priority may take slots of its floor.
    resumable : bool
        Whether it can yield what it keeps without a loss, because it writes its state to disk.
    per_host : int or None
        Most slots on one host.
    """

    job: str
    since: float = 0.0
    least: int = 1
    most: float = math.inf
    kept: int = 0
    has: int = 0
    running: bool = False
    waiting_since: float | None = None
    priority: int = 0
    weight: float = 1.0
    preemptible: bool = False
    resumable: bool = False
    per_host: int | None = None


@dataclass(frozen=True)
class SlotGroup:
    """Slots that are alike: on one host, and of use to the same jobs.

    Attributes
    ----------
    size : int
        Number of the slots.
    host : str
        Their host.
    jobs : frozenset of str or None
        The jobs that can use them; None for all.
    """

    size: int
    host: str = ""
    jobs: frozenset[str] | None = None
