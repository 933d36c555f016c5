"""Wants and slots made up by Hypothesis."""

import math
from dataclasses import replace

from hypothesis import strategies as st

from nbelastic.sharing import SlotGroup, Want
from nbelastic.sharing.fair_share import Allocation

PATIENCE = 100.0
NOW = 1000.0


@st.composite
def wants(draw, preemptible=None, patient=False, per_host=False):
    """Jobs of which the running ones fit: they are there."""
    found = []
    for number in range(draw(st.integers(1, 6))):
        least = draw(st.integers(1, 4))
        running = draw(st.booleans())
        soft = draw(st.booleans()) if preemptible is None else preemptible
        kept = draw(st.integers(0, least)) if running else 0
        impatient = not running and not patient and draw(st.booleans())
        found.append(
            Want(
                f"job{number}",
                since=float(draw(st.integers(0, 5))),
                least=least,
                most=draw(st.sampled_from([math.inf, least, least + 1, least + 3])),
                kept=min(kept, 1) if soft else kept,
                has=kept + draw(st.integers(0, 3)) if running else 0,
                running=running,
                waiting_since=NOW - (2 * PATIENCE if impatient else 1.0) if not running else None,
                priority=draw(st.integers(-1, 1)),
                weight=draw(st.sampled_from([0.5, 1.0, 1.0, 2.0, 3.0])),
                preemptible=soft,
                per_host=draw(st.none() | st.integers(1, 3)) if per_host else None,
            )
        )
    return found


@st.composite
def unlike(draw, jobs):
    """Slots on hosts, each of use to some jobs."""
    names = [want.job for want in jobs]
    return [
        SlotGroup(
            draw(st.integers(0, 4)),
            f"host{draw(st.integers(0, 2))}",
            draw(st.none() | st.frozensets(st.sampled_from(names))),
        )
        for _ in range(draw(st.integers(1, 5)))
    ]


def alike(size):
    return [SlotGroup(size)]


def fitting(jobs, groups):
    """Return the jobs with what they can keep at the same time."""
    allocation = Allocation(jobs, groups)
    found = []
    for want in jobs:
        while allocation.count[want.job] < want.kept and allocation.add(want.job):
            pass
        found.append(replace(want, kept=allocation.count[want.job]))
    return found


def fits(jobs, groups, counts):
    """Return whether all jobs can have so many slots at the same time."""
    allocation = Allocation(jobs, groups)
    return all(allocation.add(job) for job, number in counts.items() for _ in range(number))


def after(want, share):
    """Return what a job wants when it has its share."""
    served = share >= want.least
    return replace(
        want,
        has=share,
        kept=min(share, 1 if want.preemptible else want.least) if served else want.kept,
        running=want.running or served,
        waiting_since=None if served else want.waiting_since,
    )
