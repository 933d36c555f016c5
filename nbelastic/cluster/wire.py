"""Pack messages for Dask's connections.

These are the client's and the workers' to the scheduler; nothing ever connects to the kernel. A
message travels as its bytes with the number of this protocol, and another number is refused. Dask
closes a stream, and with it the worker, when it carries what msgpack cannot write or when a handler
raises. So a message is made safe where it leaves (:func:`~nbelastic.messages.encode`), and read
before it is handled.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from msgspec import Raw

from nbelastic import messages as m
from nbelastic.errors import VersionMismatch

PROTOCOL = 12  # number of this protocol; to be raised with each change of a message
PLUGIN = "nbelastic"  # name of the scheduler plugin, the agents, and the messages to agents
FROM_AGENTS = "nbelastic-agent"  # name of the agents' messages to the scheduler
FROM_KERNELS = "nbelastic-kernel"  # name of the kernels' messages to the scheduler
HEARTBEAT_INTERVAL_S = 0.5  # seconds between heartbeats
PART_BYTES = 2**30  # bytes in one piece, which Dask limits: a message may have all results


def pack(message: m.Message | m.ToDriver) -> dict[str, Any]:
    """Write a message as Dask can carry it."""
    return in_parts(m.encode(message))


def in_parts(data: bytes) -> dict[str, Any]:
    """Wrap an encoded message as Dask can carry it."""
    parts = [data[at : at + PART_BYTES] for at in range(0, len(data), PART_BYTES)]
    return {"protocol": PROTOCOL, "body": parts}


def pack_for_ranks(job: str, effect: m.RankEffect) -> Callable[[int], dict[str, Any]]:
    """Return a function that writes an order to a rank; the effect is written once for all."""
    written: Any = Raw(m.encode(effect))  # a plan is large
    return lambda start: pack(m.RankOrder(job, start, written))


def unpack(data: Any, kind: Any = m.AnyMessage) -> Any:
    """Read :func:`pack`'s dict as a `kind` of message; raise VersionMismatch or ValueError."""
    if not isinstance(data, dict) or "body" not in data:
        raise ValueError(f"not a message: {data!r:.200}")
    if data.get("protocol") != PROTOCOL:
        raise VersionMismatch(
            f"another version of nbelastic sent a message: its protocol has the number "
            f"{data.get('protocol')!r}, this one {PROTOCOL}; install the same version of nbelastic "
            "in the kernel, on the scheduler and on all workers"
        )
    try:
        return m.decode(b"".join(data["body"]), kind)
    except (TypeError, ValueError) as error:
        raise ValueError(f"not a message: {error}") from error


# -- versions --------------------------------------------------------------------------------------

MUST_MATCH = ("python", "nbelastic", "torch")
"""Versions that kernel and workers must share; the scheduler may do without torch."""


def versions() -> dict[str, str]:
    """Return the versions in this process that kernel and workers must share, without imports."""
    return versions_reader()()


def versions_reader(names: tuple[str, ...] = MUST_MATCH) -> Callable[[], dict[str, str]]:
    """Return a function that reads versions, and travels to a process without nbelastic."""

    def read() -> dict[str, str]:
        import importlib.metadata
        import sys

        found = dict.fromkeys(names, "missing")
        for name in names:
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                found[name] = importlib.metadata.version(name)
        found["python"] = f"{sys.version_info.major}.{sys.version_info.minor}"
        return found

    return read
