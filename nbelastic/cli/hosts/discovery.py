"""Rules of host discovery: what hosts are present, and when to look again.

No clock, process or network. A *source* is a function that returns the slots of each present host,
or raises :class:`DiscoveryFailed` where that is unknown. Its first failure ends the run, as Horovod
documents; after a first success a failure keeps the hosts as they are.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from nbelastic.errors import NbelasticError, OptionError

Hosts: TypeAlias = Mapping[str, int]  # slots by host

Source: TypeAlias = Callable[[], Hosts]

LONGEST_DELAY = 30.0  # most seconds between two looks while a source fails
MOST_SLOTS = 4096  # most slots of a host: more is a mistake, and every slot is a process

_LINE = re.compile(
    r"(?P<host>\[[0-9A-Fa-f:.]+\]|[^\s:]+|\S+(?=\s+slots))"
    r"((:|\s+slots\s*=\s*)(?P<slots>\d{1,10}))?"
)
_HOST = re.compile(r"([\w.+][\w.+-]*@)?[\w:][\w.:-]{0,254}")  # no option, and nothing for a shell
LONGEST_SHOWN = 100


class DiscoveryFailed(NbelasticError):
    """The present hosts are unknown: the discovery script has failed."""


def _cut(text: str) -> str:
    return ascii(text if len(text) <= LONGEST_SHOWN else text[:LONGEST_SHOWN] + "...")


def _parsed(part: str, texts: Sequence[str], default: int) -> dict[str, int]:
    found: dict[str, int] = {}
    for number, text in enumerate(texts, 1):
        words = text.partition("#")[0].strip()
        if not words:
            continue
        match = _LINE.fullmatch(words)
        if match is None:
            raise DiscoveryFailed(f"{part} {number}: {_cut(words)} must be HOST or HOST:SLOTS")
        host = match["host"].strip("[]")
        slots = int(match["slots"] or default) + found.get(host, 0)
        problem = "" if _HOST.fullmatch(host) else "must be the name or the address of a host"
        if slots > MOST_SLOTS:
            problem = f"must have at most {MOST_SLOTS:,} slots, not {slots:,}"
        if problem:
            raise DiscoveryFailed(f"{part} {number}: {_cut(host)} {problem}")
        if slots:
            found[host] = slots
    return found


def _option(option: str, part: str, texts: Sequence[str], default: int, hint: str) -> Hosts:
    try:
        found = _parsed(part, texts, default)
    except DiscoveryFailed as error:
        raise OptionError(f"{option}, {error}, {hint}") from None
    if not found:
        raise OptionError(f"{option}: names no host with a slot, {hint}")
    return found


def parse_hosts(text: str, default: int = 1) -> Hosts:
    """Return the hosts of ``--hosts a:2,b:2``; one without a number has `default` slots."""
    return _option("--hosts", "host", text.split(","), default, "as in a:2,b:2")


def parse_hostfile(text: str, default: int = 1) -> Hosts:
    """Return the hosts of a hostfile: ``NAME slots=N``, ``NAME:N`` or ``NAME`` in each line."""
    return _option("--hostfile", "line", text.splitlines(), default, "or NAME slots=N")


def parse_output(text: str, default: int = 1) -> Hosts:
    """Return the hosts that a discovery script has printed; none for no output."""
    return _parsed("line", text.splitlines(), default)


def delay(interval: float, failures: int) -> float:
    """Return the seconds until the next try; each failure in a row doubles them."""
    return min(interval * 2.0 ** min(failures, 30), max(LONGEST_DELAY, interval))
