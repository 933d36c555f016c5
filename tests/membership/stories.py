"""Helpers that start a simulated job, and questions to it afterwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nbelastic.membership import Phase, places_of
from nbelastic.messages import Effect, Event, Limits, Place, Plan, StartRank

from .ranks import Script
from .world import World


def job(*workers: str, script: Script | None = None, nanny: bool = False, **limits: Any) -> World:
    """Return a job on workers that are there from the beginning; ``A0`` is one on host ``A``."""
    world = World(Limits(**limits), script)
    world.add(*workers, nanny=nanny)
    return world


def reached(phase: Phase, world: World) -> World:
    """Let a job run until it has come to a phase."""
    return world.run(until=lambda: world.phase() == phase)


def trained(world: World, batch: int = 2) -> World:
    """Let a job run until it has trained that many batches."""
    done: list[bool] = []
    world.at(batch, lambda: done.append(True))
    return world.run(until=lambda: bool(done))


def hosts(plan: Plan) -> list[str]:
    return list(dict.fromkeys(member.slot.host for member in plan.members))


def starts(plan: Plan) -> list[int]:
    return [member.start for member in plan.members]


def workers(plan: Plan) -> list[str]:
    return [member.slot.name for member in plan.members]


def places(plan: Plan) -> list[Place]:
    slots = [member.slot for member in plan.members]
    return places_of(slots)


def when(world: World, what: Callable[[Effect], bool]) -> list[float]:
    """Return the times of the effects that `what` is true of."""
    return [now for _, now, _, effects in world.machine.log for effect in effects if what(effect)]


def starts_on(world: World, name: str) -> list[float]:
    """Return the times at which ranks were started on a worker."""
    return when(world, lambda e: isinstance(e, StartRank) and e.slot.name == name)


def times(world: World, what: Callable[[Event], bool]) -> list[float]:
    """Return the times of the events that `what` is true of."""
    return [now for event, now, _, _ in world.machine.log if what(event)]


def batches(world: World) -> list[int]:
    """Return the numbers of the batches in the order in which they were trained."""
    return [batch for batch, _ in world.trail]
