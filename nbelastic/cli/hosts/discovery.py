"""Rules of host discovery: what hosts are present, and when to look again.

Pure: no clock, process or network. A *source* is a function that returns the slots of each present
host, or raises :class:`DiscoveryFailed` where that is unknown. Its first failure ends the run, as
Horovod documents; after a first success a failure keeps the hosts as they are.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import TypeAlias

from nbelastic.errors import NbelasticError, OptionError

Hosts: TypeAlias = Mapping[str, int]
"""Slots by host."""

Source: TypeAlias = Callable[[], Hosts]

LONGEST_DELAY = 30.0
"""Most seconds between two looks while a source fails."""

MOST_SLOTS = 4096
"""Most slots of a host: more is a mistake, and every slot is a process."""

_LINE = re.compile(r"(?P<host>\[[0-9A-Fa-f:.]+\]|[^\s:]+)(?::(?P<slots>\d{1,10}))?")
_IN_FILE = re.compile(r"(?P<host>\S+)\s+slots\s*=\s*(?P<slots>\d{1,10})")
_HOST = re.compile(r"([\w.+][\w.+-]*@)?[\w:][\w.:-]{0,254}")
"""A host's name or address. OpenSSH, too, takes no name that an option or a shell could be."""

LONGEST_SHOWN = 100


class DiscoveryFailed(NbelasticError):
    """The present hosts are unknown: a discovery script or service has failed."""


def _add(found: dict[str, int], text: str, pattern: re.Pattern[str], default: int) -> None:
    match = pattern.fullmatch(text)
    if match is None:
        raise ValueError(f"{_cut(text)} must be HOST or HOST:SLOTS")
    slots = default if match["slots"] is None else int(match["slots"])
    host = match["host"].strip("[]")
    _check(host, found.get(host, 0) + slots)
    if slots:
        found[host] = found.get(host, 0) + slots


def _check(host: str, slots: int) -> None:
    if not _HOST.fullmatch(host):
        raise ValueError(f"{_cut(host)} must be the name or the address of a host")
    if slots > MOST_SLOTS:
        raise ValueError(f"{_cut(host)} must have at most {MOST_SLOTS:,} slots, not {slots:,}")


def _cut(text: str) -> str:
    """Return a text as part of a message."""
    return ascii(text if len(text) <= LONGEST_SHOWN else text[:LONGEST_SHOWN] + "...")


def checked(hosts: Hosts) -> dict[str, int]:
    """Return the slots by host that a source has found, if they are possible."""
    for host, slots in hosts.items():
        if not isinstance(slots, int) or slots < 0:
            raise DiscoveryFailed(f"{_cut(str(host))} must have a number of slots, not {slots!r}")
        try:
            _check(str(host), slots)
        except ValueError as error:
            raise DiscoveryFailed(str(error)) from None
    return dict(hosts)


def parse_hosts(text: str, default: int = 1) -> dict[str, int]:
    """Return the hosts of ``--hosts a:2,b:2``; one without a number has `default` slots."""
    found: dict[str, int] = {}
    try:
        for each in filter(None, map(str.strip, text.split(","))):
            _add(found, each, _LINE, default)
    except ValueError as error:
        raise OptionError(f"--hosts: {error}, as in a:2,b:2") from None
    if not found:
        raise OptionError(f"--hosts {text!r}: names no host with a slot")
    return found


def parse_hostfile(text: str, default: int = 1) -> dict[str, int]:
    """Return the hosts of a hostfile: ``NAME slots=N``, ``NAME:N`` or ``NAME`` in each line."""
    found: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].strip()
        if not words:
            continue
        try:
            _add(found, words, _IN_FILE if _IN_FILE.fullmatch(words) else _LINE, default)
        except ValueError as error:
            raise OptionError(f"--hostfile, line {number}: {error}, or NAME slots=N") from None
    if not found:
        raise OptionError("--hostfile: names no host with a slot")
    return found


def parse_output(text: str, default: int = 1) -> dict[str, int]:
    """Return the hosts that a discovery script has printed; none for no output."""
    found: dict[str, int] = {}
    for line in filter(None, map(str.strip, text.splitlines())):
        try:
            _add(found, line, _LINE, default)
        except ValueError as error:
            raise DiscoveryFailed(f"the line {error}") from None
    return found


class FailureCount:
    """Consecutive failures of something that is tried again; each doubles the delay."""

    def __init__(self, interval: float) -> None:
        self._interval = interval
        self.number = 0

    def succeeded(self) -> None:
        """Note a success."""
        self.number = 0

    def failed(self) -> None:
        """Note a failure."""
        self.number += 1

    def delay(self) -> float:
        """Return the seconds until the next try."""
        longest = max(LONGEST_DELAY, self._interval)
        return min(self._interval * 2.0 ** min(self.number, 30), longest)
