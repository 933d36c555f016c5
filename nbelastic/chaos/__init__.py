"""Inject faults into a job of your own, and measure what they cost.

>>> from nbelastic import chaos
>>> plan = chaos.inject(job, chaos.kill(rank=2, step=100))  # doctest: +SKIP
>>> plan.report()  # doctest: +SKIP

A fault has a kind, a rank, and a moment: at a step of that rank, from a generation on,
some seconds after :func:`inject`, when the next generation forms, or at once.
:func:`random` makes faults up from a seed for as long as the job runs.
"""

from nbelastic.cluster import InjectedFault

from .fault_plan import FaultPlan, inject
from .faults import (
    KINDS,
    Fault,
    RandomPlan,
    close,
    crash,
    fail,
    hang,
    kill,
    leave,
    notice,
    partition,
    pause,
    random,
    restart,
    slow,
    stop,
)
from .report import FaultOutcome, Report

__all__ = [
    "KINDS",
    "Fault",
    "FaultOutcome",
    "FaultPlan",
    "InjectedFault",
    "RandomPlan",
    "Report",
    "close",
    "crash",
    "fail",
    "hang",
    "inject",
    "kill",
    "leave",
    "notice",
    "partition",
    "pause",
    "random",
    "restart",
    "slow",
    "stop",
]
