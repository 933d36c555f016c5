"""Where the simulation steps in for what is real: clocks, threads, and the process itself."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
from collections.abc import Iterator
from typing import Any

from nbelastic.cluster.kernel import preflight
from nbelastic.cluster.payload import Modules
from nbelastic.cluster.scheduler import job_service, plugin
from nbelastic.cluster.worker import agent
from nbelastic.elastic.ranks import telemetry
from nbelastic.membership import unpack_machine
from nbelastic.messages import ProcessId

from . import user
from .invariants import WatchedMachine
from .remote import block_on
from .worker import SimAgent

fit = importlib.import_module("nbelastic.driver.fit")  # the package gives this name to a function

VERSIONS = {"python": "3", "nbelastic": "1", "torch": "2", "cloudpickle": "3"}

_depth = 0


def _process() -> Any:
    return asyncio.get_running_loop()


def _own_process_id() -> ProcessId:
    process = _process()
    number = process.owner.world.processes.index(process)
    return ProcessId(number, 1.0, process.host)


def _machine(data: str) -> Any:
    world = user._stage[-1]
    world.machine = WatchedMachine(world, unpack_machine(data))
    return world.machine


REPLACED: list[tuple[Any, str, Any]] = [
    (agent, "host_identity", lambda: _process().host),
    (agent, "ignore_interrupts", lambda: lambda: None),
    (agent, "versions", lambda: VERSIONS),
    (agent, "own_interface", lambda hosts: next(iter(hosts))),
    (agent, "own_process_id", _own_process_id),
    (agent, "secede", lambda: None),
    (agent, "get_worker", lambda: _process().owner),
    (agent, "sync", block_on),
    (job_service, "unpack_machine", _machine),
    (fit, "own_versions", lambda: VERSIONS),
    (preflight, "collect", lambda names: Modules()),
    (plugin, "Agent", SimAgent),
    (plugin, "start_processes_shielded", lambda: None),
    (telemetry, "user_line", lambda thread: None),
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
