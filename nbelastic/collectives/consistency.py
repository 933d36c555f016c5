"""Comparison of what ranks are about to do, before any data moves.

Each rank describes its operation in text. One exchange of records of :data:`RECORD` bytes, with a
digest and the length of the description and a number that may differ, shows all ranks whether the
descriptions are equal. Only if they differ do the descriptions travel, in a second exchange. All
ranks take part in it, because all have seen the same records. So all ranks raise the same error at
the same point, and can go on.

Training repeats its operations, so a :class:`History` foresees the next one, the same on all ranks.
A rank begins a foreseen operation without a word. One that is about to do something else must not
send records then, because others may be in the foreseen operation, with other messages. Through
shared memory that is found out. Over Gloo it would end the process, so there ranks compare `apart`
from operations, from the first one on that could have been foreseen.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import struct
from collections.abc import Hashable, Mapping, Sequence

from nbelastic.errors import RanksDisagree

NUMBERS = struct.Struct("<qq")
_DIGEST = 16
RECORD = _DIGEST + NUMBERS.size  # bytes that each rank sends to compare an operation
_HEADLINE = 200  # maximum length of the headline that precedes a record through shared memory
_LONG = 1000  # length from which a description's digest is not cached
_MAX_SIDES = 4  # number of different descriptions that an error names


_CONTEXT = 3  # number of operations in a row by which a history finds its place
_MOST_KEPT = 4096  # number of operations from which a history forgets its first half


class History:
    """Operations that the ranks of a communicator have compared or foreseen, in order.

    It expects that what followed the last operations before follows them again. A rank's history is
    the beginning of that of any rank which is ahead, so all foresee the same.
    """

    def __init__(self) -> None:
        self.apart = False  # from the first operation on that is compared apart
        self.asked: set[int] = set()  # numbers of operations that other ranks compare apart
        self.begins = ""  # what this rank compares by records at present; other threads read it
        self._forgotten = 0
        self._patterns: list[Hashable] = []
        self._numbers: dict[Hashable, int] = {}  # of patterns
        self._recent: tuple[int, ...] = ()
        self._places: dict[tuple[int, ...], int] = {}  # what follows a context
        self._next: int | None = None

    @property
    def number(self) -> int:
        """Number of operations."""
        return self._forgotten + len(self._patterns)

    def foresees(self, pattern: Hashable) -> bool:
        """Return whether all ranks expect this operation next."""
        return self._next is not None and self._patterns[self._next] == pattern

    def add(self, pattern: Hashable) -> None:
        """Add an operation that all ranks have agreed on or foreseen; None if they disagreed."""
        follows = self.foresees(pattern)
        patterns = self._patterns
        patterns.append(pattern)
        number = self._numbers.setdefault(pattern, len(self._numbers))
        self._recent = (*self._recent[1 - _CONTEXT :], number)
        known = self._places.get(self._recent)
        self._places[self._recent] = len(patterns)
        self._next = self._next + 1 if follows and self._next is not None else known
        if len(patterns) > _MOST_KEPT:
            kept, number = patterns[_MOST_KEPT // 2 :], self.number
            self._patterns, self._recent, self._next = [], (), None
            self._places, self._numbers = {}, {}
            for each in kept:
                self.add(each)
            self._forgotten = number - len(kept)

    def at(self, number: int) -> Hashable:
        """Return the operation of a number."""
        return self._patterns[max(number - self._forgotten, 0)]


def described(text: str) -> tuple[str, bytes, bytes, int]:
    """Return the first line as text and for the record, and the digest and length of all."""
    return (_described if len(text) < _LONG else _described.__wrapped__)(text)


@functools.lru_cache(maxsize=256)
def _described(text: str) -> tuple[str, bytes, bytes, int]:
    headline = text.partition("\n")[0][:_HEADLINE].encode("ascii", "replace").replace(b"\0", b"?")
    data = text.encode(errors="replace")
    digest = hashlib.blake2b(data, digest_size=_DIGEST).digest()
    return headline.decode(), headline + b"\0", digest, len(data)


def disagreement(
    texts: Sequence[str], ranks: Sequence[int] | None = None, numbers: Sequence[int] = ()
) -> RanksDisagree:
    """Return the error for ranks with different descriptions, given by rank."""
    sides = [text.partition("\n")[0] for text in texts]
    what = "ranks called different operations"
    if len(set(sides)) == 1:
        what, sides = f"ranks disagree in {sides[0]}", _differing_details(texts)
    by_side: dict[str, list[int]] = {}
    for rank, side in zip(ranks or range(len(sides)), sides, strict=True):
        by_side.setdefault(side, []).append(rank)
    error = RanksDisagree(f"{what}: {listed(by_side)}")
    error.sides = tuple(zip(texts, numbers, strict=False))
    return error


def _differing_details(texts: Sequence[str]) -> list[str]:
    """Return each rank's first detail that is not the same on all ranks."""
    details = [text.split("\n")[1:] for text in texts]
    for sides in itertools.zip_longest(*details, fillvalue="no more"):
        if len({*sides}) > 1:
            return [*sides]
    return ["?" for _ in texts]


def listed(ranks: Mapping[str, Sequence[int]]) -> str:
    """Return the ranks on each side in words, by the side's text."""
    parts = [f"{_named(numbers)}: {side}" for side, numbers in list(ranks.items())[:_MAX_SIDES]]
    if len(ranks) > _MAX_SIDES:
        parts.append(f"and {len(ranks) - _MAX_SIDES} more")
    return "; ".join(parts)


def _named(ranks: Sequence[int]) -> str:
    first = ", ".join(map(str, ranks[:8]))
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"rank {first}" if len(ranks) == 1 else f"ranks {first}{more}"
