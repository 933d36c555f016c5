"""Faults as a feature: do harm to a job of your own, on purpose, and see what it costs.

>>> from nbelastic import chaos
>>> storm = chaos.inject(job, chaos.kill(rank=2, step=100))  # doctest: +SKIP
>>> storm.report()  # doctest: +SKIP

A fault says what happens, to which rank, and when: at a step of that rank, from a generation on,
some seconds after the storm has begun, when the next generation forms, or at once.
:func:`random` makes faults up from a seed for as long as the job runs.
"""

from nbelastic.cluster import InjectedFault

from .faults import (
    Fault,
    close,
    disk,
    fail,
    hang,
    kill,
    leave,
    memory,
    partition,
    pause,
    restart,
    slow,
    stop,
)
from .report import Injection, Report, Row
from .storm import Storm, inject
from .weather import KINDS, Weather, random

__all__ = [
    "KINDS",
    "Fault",
    "InjectedFault",
    "Injection",
    "Report",
    "Row",
    "Storm",
    "Weather",
    "close",
    "disk",
    "fail",
    "hang",
    "inject",
    "kill",
    "leave",
    "memory",
    "partition",
    "pause",
    "random",
    "restart",
    "slow",
    "stop",
]
