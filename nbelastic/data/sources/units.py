"""Sources whose rows come in units: row groups, record batches, partitions."""

from __future__ import annotations

import abc
import functools
import math
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from typing import Any

import numpy as np

from nbelastic.data.plan.dealing import Dealing, Rows
from nbelastic.data.plan.streams import UnitStreams, Window
from nbelastic.data.sources.columns import (
    NEEDS_TRANSFORM,
    Block,
    ColumnChoice,
    arrays_in,
    arrow_array,
    batch_of,
    between,
    block_of,
    each_array,
    joined,
)
from nbelastic.data.sources.row_source import RowSource, is_count, named
from nbelastic.errors import DataError, OptionError

_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}

COPIES = 3  # copies of a window that exist while it is read: as a table, joined, and permuted


class UnitSource(abc.ABC):
    """Units that are read as tables of Arrow, or given to a ``transform``."""

    name: str  # what the user calls it, for errors
    sizes: Rows  # of each unit
    row_bytes: float  # in memory, about

    def __init__(
        self,
        columns: Any = None,
        *,
        shuffle_rows: int = 100_000,
        transform: Callable[[Any], Any] | None = None,
        memory: int | str = "256 MB",
        fill: Any = None,
    ) -> None:
        for option, value, is_right, must_be in (
            ("shuffle_rows", shuffle_rows, is_count(shuffle_rows), "a whole number, at least 1"),
            ("transform", transform, transform is None or callable(transform), "a function"),
        ):
            if not is_right:
                raise OptionError(f"{self.name}({option}={value!r}): must be {must_be}")
        self.columns, self.transform, self.fill = columns, transform, fill
        self.shuffle_rows = shuffle_rows  # among which a row is shuffled, over all streams
        # Bytes that a rank's windows may take.
        self.memory = parse_bytes(memory, f"{self.name}(memory={memory!r})")

    def __len__(self) -> int:
        return int(self.sizes.sum())

    @abc.abstractmethod
    def read(self, unit: int) -> Block:
        """Return the rows of a unit, in their own order. A background thread calls this."""

    @abc.abstractmethod
    def describe(self) -> dict[str, str]:
        """Return what the rows depend on, as names and texts: a file and its digest."""

    def choose(
        self,
        names: Sequence[str],
        kinds: Sequence[Any],
        is_number: Callable[[Any], object],
        where: str,
    ) -> ColumnChoice:
        """Find the columns to read; without a ``transform``, columns of numbers alone."""
        choice = ColumnChoice.among(names, self.columns, where)
        kind_of = dict(zip(names, kinds, strict=True))
        for name in choice.names if self.transform is None else ():
            if not is_number(kind := kind_of[name]):
                raise OptionError(NEEDS_TRANSFORM.format(where=where, name=name, kind=kind))
        return choice

    def transformed(self, given: Any, rows: int, where: str) -> Block:
        """Return what the user's function makes of the rows of a unit; its errors name the rows."""
        assert self.transform is not None
        with named(f"{where}: transform raised"):
            found = self.transform(given)
        return block_of(found, rows, where)

    def block(self, choice: ColumnChoice, table: Any, where: str) -> Block:
        """Return the chosen columns of a table as arrays, stacked where a pattern stands."""
        if self.transform is not None:
            return self.transformed(table, table.num_rows, where)
        arrays = {}
        for key, names, stacked in choice.parts:
            found = [arrow_array(table.column(name), name, self.fill, where) for name in names]
            if stacked and any(array.ndim != 1 for array in found):
                raise DataError(f"{where}: columns of lists cannot be stacked ({', '.join(names)})")
            arrays[key] = np.stack(found, axis=1) if stacked else found[0]
        return arrays if choice.named else tuple(arrays.values())


class WindowedRows(RowSource):
    """Rows of a source of units, in the order of windows, with a stream for each micro-batch."""

    def __init__(self, source: UnitSource, micro_batches: int) -> None:
        self._source = source
        self.name = source.name
        length = len(source)
        if length < micro_batches:
            raise OptionError(
                f"{source.name}: {length} rows for {micro_batches} micro-batches of a step; each "
                "needs one at least"
            )
        # One rank may come to hold the windows of all streams, while it reads one more.
        most = int(source.memory / (micro_batches + COPIES) / max(source.row_bytes, 1e-9))
        self.window_rows = max(1, min(source.shuffle_rows // micro_batches, most))
        largest = np.sort(source.sizes)[::-1][:micro_batches]
        need = int((largest.sum() + COPIES * largest[0]) * source.row_bytes)
        if largest[0] > most and need > source.memory:
            raise OptionError(
                f"{source.name}: a rank reads {micro_batches} units at a time if it is the only "
                f"one, and the largest has {largest[0]} rows. This takes {_megabytes(need)}, and "
                f"memory={_megabytes(source.memory)!r}. Pass memory={_megabytes(need)!r}, or make "
                "units (row groups, partitions) smaller, or micro-batches fewer"
            )
        self._reader: WindowReader | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_reader": None}

    def __len__(self) -> int:
        return len(self._source)

    @functools.lru_cache(maxsize=2)  # noqa: B019 - a loader has one source for all its life
    def _streams(self, dealing: Dealing, window_rows: int) -> UnitStreams:
        return UnitStreams(self._source.sizes, dealing, window_rows)

    def fetch(self, dealing: Dealing, first: int, block: range) -> Iterator[Any]:
        streams = self._streams(dealing, self.window_rows)
        self._reader = reader = self._reader or WindowReader(self._source)
        reader.begin(streams.needed(first, block))
        for step in range(first, dealing.steps):
            for number in block:
                parts = []
                for window, begin, end in streams.pieces(step, number):
                    parts.append(between(reader.take(window), begin, end))
                    if end == window.rows:
                        reader.release(window)
                if parts:
                    yield batch_of(joined(parts, self.name))

    def describe(self) -> dict[str, str]:
        return {"dataset": f"{len(self)} rows", **self._source.describe()}

    def state_dict(self) -> dict[str, Any]:
        return {"window_rows": self.window_rows}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self.window_rows = int(state_dict.get("window_rows", self.window_rows))


def parse_bytes(value: int | str, what: str) -> int:
    """Return a number of bytes, which may be given as ``"256 MB"`` or ``"1 GiB"``."""
    found = re.fullmatch(r"\s*(\d+\.?\d*)\s*([kmgt]?)(i?)b?\s*", str(value), re.IGNORECASE)
    count = 0.0
    if found is not None and not isinstance(value, bool):
        count = float(found[1]) * (1024 if found[3] else 1000) ** _POWERS[found[2].lower()]
    if not 1 <= count < math.inf:
        raise OptionError(f"{what}: must be a number of bytes, or text such as '256 MB'")
    return int(count)


def _megabytes(count: int) -> str:
    return f"{-(-count // 1_000_000)} MB"


class WindowReader:
    """Reader of windows ahead, in the order in which they are needed."""

    # The rank's thread alone uses these fields. A thread that it starts reads one window, and ends:
    # so a reader that is given up without a word leaves no thread that waits for ever.

    def __init__(self, source: UnitSource) -> None:
        self._source = source
        self._needed: dict[Window, None] = {}  # those whose reading has not begun, in their order
        self._windows: dict[Window, Future[Block]] = {}  # those in memory, or being read
        self._latest: Future[Block] | None = None  # what the latest thread reads
        self._is_full = False  # there is no memory for the next window

    def begin(self, needed: Sequence[Window]) -> None:
        """Read other windows from now on; windows in memory are kept if they are needed."""
        kept = {w: f for w, f in self._windows.items() if not (f.done() and f.exception())}
        self._windows = {window: kept[window] for window in needed if window in kept}
        self._needed = dict.fromkeys(window for window in needed if window not in kept)
        self._is_full = False

    def take(self, window: Window) -> Block:
        """Return a window's rows, or raise its read error; wait if need be."""
        while True:
            self._read_ahead(window)
            found = self._windows.get(window)
            if found is not None and found.done():
                return found.result()
            pending = found or self._latest
            assert pending is not None
            wait([pending], 0.1)  # so that the rank can be interrupted

    def release(self, window: Window) -> None:
        """Give back the memory of a window."""
        del self._windows[window]
        self._is_full = False
        self._read_ahead()

    @property
    def held(self) -> int:
        """Bytes of all windows in memory."""
        blocks = [f.result() for f in self._windows.values() if f.done() and not f.exception()]
        return sum(array.nbytes for block in blocks for array in arrays_in(block))

    def _read_ahead(self, awaited: Window | None = None) -> None:
        """Start a thread on the awaited window, or on the next if there is memory for it."""
        if self._latest is not None and not self._latest.done():
            return
        self._latest, window = None, awaited
        if window is None or window in self._windows:
            window = None if self._is_full else next(iter(self._needed), None)
            if window is None:
                return
            need = self.held + COPIES * int(window.rows * self._source.row_bytes)
            self._is_full = need > self._source.memory
            if self._is_full:
                return
        self._needed.pop(window, None)  # other ones may be needed by now, as by sample()
        self._latest = self._windows[window] = Future()
        work = (window, self._latest)
        threading.Thread(target=self._read, args=work, name="nbelastic-reader", daemon=True).start()

    def _read(self, window: Window, found: Future[Block]) -> None:
        try:
            found.set_result(self._rows_of(window))
        except BaseException as error:  # it would be waited for forever
            found.set_exception(error)

    def _rows_of(self, window: Window) -> Block:
        blocks = []
        for unit, rows in window.ranges:
            block, before = self._source.read(unit), self._source.sizes[unit]
            if (found := len(arrays_in(block)[0])) != before:
                raise DataError(
                    f"{self._source.name}: unit {unit} has {found} rows, and had {before} when the "
                    "job began"
                )
            blocks.append(between(block, rows.start, rows.stop))
        whole, order = joined(blocks, self._source.name), window.order()
        del blocks, block
        return each_array(lambda array: array.take(order, axis=0), whole)
