"""Reader of the rows of one unit of unknown length, from any position on."""

from __future__ import annotations

import contextlib
import hashlib
import pickle
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from nbelastic.data.plan.dealing import mix
from nbelastic.data.sources.row_source import named
from nbelastic.elastic.followed import seed_generators
from nbelastic.errors import DataError

_DIGEST_BYTES = 12
_END = object()
_OPENING = -1  # takes the place of a row in the seed of what `make` draws


@dataclass(frozen=True)
class Mark:
    """Place in a unit from which its reading can go on."""

    rows: int  # before it
    state: bytes | None  # of what is iterated over, pickled; None if it has none
    digest: bytes  # of the row that is read next


class StreamReader:
    """Rows of one unit.

    Random generators are seeded before each row is read, by its number. The reader knows one row
    ahead, so that it knows the end of the unit with its last row. The rows of the last call of
    :meth:`take` are kept: a rollback by one step reads nothing again.

    `make` returns what is iterated over. If that, or its iterator, has ``state_dict`` and
    ``load_state_dict``, reading goes on from a mark.
    """

    def __init__(self, name: str, make: Callable[[], Iterable[Any]], seed: int) -> None:
        self.name = name  # of the unit, for errors
        self.position = 0  # number of the next row
        self.mark: Mark | None = None  # the latest that all ranks have; reading begins there
        self.has_states = True  # marks have states, as far as is known
        self.seed = seed
        self._make = make
        self._rows: Iterator[Any] | None = None
        self._holder: Any = None
        self._read = 0  # number of the row that is read next
        self._kept: list[Any] = []  # the rows before it, from that of the last call on
        self._ended = False

    def seek(self, position: int) -> None:
        """Go to a row; DataError if the unit ends before, or does not match its mark."""
        if self._rows is None or position < self._read - len(self._kept):
            self._open(position)
        while self._read < position:
            if not self._read_row():
                raise DataError(
                    f"{self.name} has only {self._read} rows, and had at least {position}: it "
                    "has changed since, or is not the same each time"
                )
            self._kept.clear()
        self.position = position

    def take(self, count: int) -> list[Any]:
        """Return the next rows: `count`, or fewer where the unit ends."""
        self._kept = self._kept[len(self._kept) + self.position - self._read :]
        while len(self._kept) < count and self._read_row():
            pass
        rows = self._kept[:count]
        self.position += len(rows)
        return rows

    def make_mark(self) -> Mark | None:
        """Return a mark of the present position; None where it has no state to go on from."""
        # A row that was read ahead is not in the state, as after a rollback. At the end of the
        # unit, the states of some iterators lead to the start.
        if self._ended or self.position != self._read:
            return None
        state = None
        if self.has_states:
            with named(f"the state of {self.name} cannot be read:", self.close):
                state = pickle.dumps(self._holder.state_dict())
        if not self._read_row():
            return None
        return Mark(self.position, state, row_digest(self._kept[-1]))

    @property
    def at_end(self) -> bool:
        """Whether there are no more rows."""
        return self.position == self._read and not self._read_row()

    def close(self) -> None:
        """Stop reading; :meth:`seek` begins again."""
        rows, self._rows, self._holder = self._rows, None, None
        with contextlib.suppress(Exception):  # most have no such method, and nothing is read again
            rows.close()  # type: ignore[union-attr]

    def _read_row(self) -> bool:
        """Read a further row; return whether the unit has any."""
        if self._ended:
            return False
        assert self._rows is not None
        seed_generators(mix(self.seed, self._read))
        # Closed after an error: what is left of a generator that has raised looks like its end.
        with named(f"row {self._read} of {self.name} cannot be read:", self.close):
            row = next(self._rows, _END)
        if self.mark is not None and self.mark.rows == self._read:  # a digest takes its time
            self._check(self.mark, b"" if row is _END else row_digest(row))
        self._ended = row is _END
        if not self._ended:
            self._kept.append(row)
            self._read += 1
        return not self._ended

    def _open(self, position: int) -> None:
        """Begin to read: at the mark if it has a state, and is not after `position`."""
        self.close()
        mark = self.mark
        self._kept, self._read, self._ended = [], 0, False
        seed_generators(mix(self.seed, _OPENING))
        with named(f"{self.name} cannot be read:", self.close):
            made: Any = self._make()
            in_iterator = not _keeps_state(made)
            self._holder = iter(made) if in_iterator else made
            self.has_states = _keeps_state(self._holder)
            if mark and mark.rows <= position and mark.state is not None and self.has_states:
                self._holder.load_state_dict(pickle.loads(mark.state))
                self._read = mark.rows
            self._rows = self._holder if in_iterator else iter(made)

    def _check(self, mark: Mark, digest: bytes) -> None:
        """Refuse to go on with another row than the mark has; an empty digest is the end."""
        if digest == mark.digest:
            return
        if mark.state is not None and self.has_states:
            raise DataError(
                f"{self.name} goes on with another row than before, from the state that it had "
                f"after {mark.rows} rows. Its state_dict() is not complete: a shuffle buffer, for "
                "one, is not in the states of Hugging Face's datasets. Pass "
                "Stateful(..., states_every=None), so that streams are read from their start"
            )
        raise DataError(
            f"{self.name} has another row {mark.rows} than before: it is not the same each time. "
            "Draw random numbers from the global generators only, or with fixed seeds"
        )


def _keeps_state(value: Any) -> bool:
    return all(callable(getattr(value, name, None)) for name in ("state_dict", "load_state_dict"))


def row_digest(row: Any) -> bytes:
    """Return a digest of the values in a row; equal rows have equal ones in all processes."""
    found = hashlib.blake2b(digest_size=_DIGEST_BYTES)

    def add(value: Any) -> None:
        found.update(type(value).__name__.encode())
        if isinstance(value, torch.Tensor):
            if value.layout is torch.strided and not value.is_quantized:
                numbers = value.detach().cpu().contiguous().view(-1)
                found.update(numbers.view(torch.uint8).numpy().tobytes())
        elif isinstance(value, (np.ndarray, np.generic)):
            found.update(np.asarray(value).tobytes() if value.dtype != object else b"")
        elif isinstance(value, (dict, list, tuple)):
            if not isinstance(value, dict):
                found.update(len(value).to_bytes(8, "little"))
            inner = (*value, *value.values()) if isinstance(value, dict) else value
            for each in reversed(inner):  # as checkpoints have it
                add(each)
        elif isinstance(value, (str, int, float, bool, bytes, type(None))):
            found.update(repr(value).encode())

    add(row)
    return found.digest()
