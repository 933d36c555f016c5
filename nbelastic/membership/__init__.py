"""Membership of a job: a pure state machine, events in, effects out."""

from . import rules
from .machine import TICK, Machine, pack_machine, unpack_machine
from .placement import arrange, places_of
from .ranks import Phase, Stage
from .view import JobView, RankView, view

__all__ = [
    "TICK",
    "JobView",
    "Machine",
    "Phase",
    "RankView",
    "Stage",
    "arrange",
    "pack_machine",
    "places_of",
    "rules",
    "unpack_machine",
    "view",
]
