"""Describe a worker's machine and installation.

Runs in workers, on the scheduler and in the kernel.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable

MUST_MATCH = ("python", "nbelastic", "torch")
"""Versions that kernel and workers must share; the scheduler may do without torch."""


def own_interface(hosts: Iterable[str]) -> str:
    """Return the first of `hosts` that this machine can bind, as an IP address; else 127.0.0.1.

    A worker's contact address may hold a name, which this machine may resolve to its loopback, or
    the address of a gateway before it, where nothing can listen.
    """
    for host in hosts:
        try:
            found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError):
            continue  # a name that is unknown here, or none at all, as in "inproc://"
        for family, kind, _, _, where in sorted(found):
            try:
                with socket.socket(family, kind) as probe:
                    probe.bind(where)
            except OSError:
                continue
            return str(where[0])
    return "127.0.0.1"


def versions() -> dict[str, str]:
    """Return the versions in this process that kernel and workers must share, without imports."""
    return versions_reader()()


def versions_reader(names: tuple[str, ...] = MUST_MATCH) -> Callable[[], dict[str, str]]:
    """Return a function that reads versions, and travels to a process without nbelastic."""

    def read() -> dict[str, str]:
        import importlib.metadata
        import sys

        found = {}
        for name in names:
            try:
                found[name] = importlib.metadata.version(name)
            except importlib.metadata.PackageNotFoundError:
                found[name] = "missing"
        found["python"] = f"{sys.version_info.major}.{sys.version_info.minor}"
        return found

    return read
