"""Membership of a job: a pure state machine, events in, effects out.

Nothing here reads a clock, starts a thread or opens a connection. See
:class:`~nbelastic.membership.machine.Machine`.
"""

from . import rules
from .machine import Machine, pack_machine, unpack_machine
from .placement import arrange, place_of
from .ranks import Phase, Stage
from .view import JobView, RankView, view

__all__ = [
    "JobView",
    "Machine",
    "Phase",
    "RankView",
    "Stage",
    "arrange",
    "pack_machine",
    "place_of",
    "rules",
    "unpack_machine",
    "view",
]
