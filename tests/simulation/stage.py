"""Where the simulation steps in for what is real: clocks, threads, and the process itself."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
from typing import TYPE_CHECKING, Any

from nbelastic.cluster import agent, desk, install, rank
from nbelastic.elastic import vitals
from nbelastic.membership import from_dict

from . import user
from .invariants import WatchedMachine
from .worker import SimAgent

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["staged"]

fit = importlib.import_module("nbelastic.driver.fit")  # the package gives this name to a function

VERSIONS = {"python": "3", "nbelastic": "1", "torch": "2", "cloudpickle": "3"}

_depth = 0


def _process() -> Any:
    return asyncio.get_running_loop()


def _own_process() -> dict[str, Any]:
    process = _process()
    number = process.owner.world.processes.index(process)
    return {"pid": number, "started": "1", "namespace": process.host}


def _machine(data: dict[str, Any]) -> Any:
    world = user._stage[-1]
    world.machine = WatchedMachine(world, from_dict(data))
    return world.machine


REPLACED: list[tuple[Any, str, Any]] = [
    (agent, "host_identity", lambda: _process().host),
    (agent, "versions", lambda: VERSIONS),
    (agent, "own_process", _own_process),
    (desk, "from_dict", _machine),
    (fit, "own_versions", lambda: VERSIONS),
    (install, "Agent", SimAgent),
    (rank, "get_worker", lambda: _process().owner),
    (rank, "prepared", lambda threads: contextlib.nullcontext()),
    (rank, "captured", lambda sink: contextlib.nullcontext()),
    (vitals, "stands_at", lambda thread: []),
]


@contextlib.contextmanager
def staged() -> Iterator[None]:
    """Put the simulation's parts in place of what only a real process has."""
    global _depth  # noqa: PLW0603 - schedules may be played within a block of many
    _depth += 1
    kept = []
    if _depth == 1:
        for module, name, replacement in REPLACED:
            kept.append((module, name, getattr(module, name)))
            setattr(module, name, replacement)
    try:
        yield
    finally:
        _depth -= 1
        for module, name, original in kept:
            setattr(module, name, original)
