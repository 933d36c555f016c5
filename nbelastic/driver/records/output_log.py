"""Keep the output of a job's ranks: the newest in memory, all of it in files.

Files are written, one for each start of the function, if a directory is named for them. That and
the size in memory are settings of the kernel's environment.
"""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from dask.utils import parse_bytes

from nbelastic.errors import OptionError

if TYPE_CHECKING:
    from nbelastic.driver.status import Output

BYTES = "NBELASTIC_LOG_BYTES"
DIRECTORY = "NBELASTIC_LOG_DIR"
DEFAULT = "64 MB"

PIECE_BYTES = 200
"""Bytes of a piece, without its text."""


class OutputLog:
    """The newest output in memory, and all of it in files where ``NBELASTIC_LOG_DIR`` is set."""

    def __init__(self, job: str) -> None:
        self.dropped = 0
        self._most = _most()
        self._place = _place(job)
        self._pieces: deque[Output] = deque()
        self._bytes = self._gone = 0
        self._written = False
        self._problem = ""

    def add(self, piece: Output, *, write: bool = True) -> str:
        """Keep a piece and drop the oldest; return a warning for the user, each one once."""
        told, problem = self.dropped > 0, self._problem
        if write:
            self._write(piece)
        self._pieces.append(piece)
        self._bytes += _size(piece)
        while self._bytes > self._most and self._pieces:
            oldest = self._pieces.popleft()
            self._bytes -= _size(oldest)
            self.dropped += len(oldest.text)
            self._gone += 1
        if self._problem != problem:
            return self._problem
        return "" if told or not self.dropped else self.remark()

    def since(self, cursor: int) -> tuple[int, tuple[Output, ...]]:
        """Return the next cursor, and the pieces kept that have come since the one given."""
        first = max(cursor - self._gone, 0)
        return self._gone + len(self._pieces), tuple(islice(self._pieces, first, None))

    def last(self, rank: int, most: int) -> str:
        """Return the last pieces of a rank, of `most` characters or somewhat more."""
        found: list[str] = []
        for piece in reversed(self._pieces):
            if piece.rank == rank:
                found.append(piece.text)
                most -= len(piece.text)
            if most <= 0:
                break
        return "".join(reversed(found))

    def clear(self) -> None:
        """Forget all that is in memory, and count anew."""
        self._pieces.clear()
        self._bytes = self._gone = self.dropped = 0

    @property
    def written(self) -> bool:
        """Whether anything has gone to a file."""
        return self._written

    def remark(self) -> str:
        """Return a line on what has been dropped and where it is to be found; empty for nothing."""
        if not self.dropped:
            return ""
        kept = self._most
        most = f"{kept / 1e6:,.0f} MB" if kept >= 1_000_000 else f"{kept:,} bytes"
        what = f"only the last {most} of what ranks printed are in memory ({BYTES})"
        if self._place is not None and not self._problem:
            return f"{what}; all of it is in {self._place}"
        return f"{what}; with {DIRECTORY} set to a directory, all of it goes there"

    def _write(self, piece: Output) -> None:
        if self._place is None or self._problem:
            return
        try:
            self._place.mkdir(parents=True, exist_ok=True)
            with open(
                self._place / f"start-{piece.start}.log",
                "a",
                encoding="utf-8",
                errors="backslashreplace",
                newline="",
            ) as file:
                file.write(piece.text)
        except OSError as error:
            self._problem = f"what ranks print cannot be written to {self._place}: {error}"
        self._written = True


def _size(piece: Output) -> int:
    return sys.getsizeof(piece.text) + PIECE_BYTES


def _most() -> int:
    value = os.environ.get(BYTES) or DEFAULT
    try:
        most = parse_bytes(value)
    except (ValueError, OverflowError):
        most = 0
    if most <= 0:
        raise OptionError(f"{BYTES}={value!r}: must be a number of bytes, such as 64000000 or 64MB")
    return most


def _place(job: str) -> Path | None:
    directory = os.environ.get(DIRECTORY)
    if not directory:
        return None
    try:
        os.makedirs(directory, exist_ok=True)
    except OSError as error:
        raise OptionError(f"{DIRECTORY}={directory!r}: must be a directory: {error}") from None
    name = f"{job}-{time.strftime('%Y%m%d-%H%M%S')}".replace(os.sep, "_")
    return Path(directory).absolute() / name
