"""Membership of a job: a pure state machine, events in, effects out."""

from . import rules
from .machine import TICK, Machine, pack_machine, unpack_machine
from .placement import arrange, places_of
from .ranks import Phase, Stage
from .view import reasons, view

__all__ = [
    "TICK",
    "Machine",
    "Phase",
    "Stage",
    "arrange",
    "pack_machine",
    "places_of",
    "reasons",
    "rules",
    "unpack_machine",
    "view",
]
