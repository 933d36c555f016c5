"""Sources whose rows come in units: row groups, record batches, partitions."""

from __future__ import annotations

import abc
import functools
import json
import math
import re
import threading
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from nbelastic.data.plan import UnitStreams
from nbelastic.data.sources.row_block import RowBlock
from nbelastic.data.sources.row_source import RowSource
from nbelastic.errors import DataError, OptionError, StateMismatch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from nbelastic.data.plan import BlockSchedule, Dealing, Rows, Window

_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


class UnitSource(abc.ABC):
    """Rows in units that can be opened by themselves."""

    name: str  # what the user calls it, for errors
    sizes: Rows  # of each unit
    row_bytes: float  # in memory, about
    shuffle_rows: int  # among which a row is shuffled, over all streams
    memory: int  # bytes that a rank's windows may take

    def __init__(self, name: str, shuffle_rows: int, memory: int | str) -> None:
        self.name = name
        if isinstance(shuffle_rows, bool) or not isinstance(shuffle_rows, int) or shuffle_rows < 1:
            raise OptionError(
                f"{name}(shuffle_rows={shuffle_rows!r}): must be a whole number, at least 1"
            )
        self.shuffle_rows = shuffle_rows
        self.memory = parse_bytes(memory, f"{name}(memory={memory!r})")

    def __len__(self) -> int:
        """Return the number of rows."""
        return int(self.sizes.sum())

    def prepare(self) -> None:  # noqa: B027 - most have nothing to take
        """Take what is the rank's own. The rank's thread calls this before units are read."""

    @abc.abstractmethod
    def read(self, unit: int) -> RowBlock:
        """Return the rows of a unit, in their own order. A background thread calls this.

        A DataError says which cannot be read.
        """

    @abc.abstractmethod
    def describe(self) -> dict[str, str]:
        """Return what the rows depend on, as names and texts: a file and its digest."""


class WindowedRows(RowSource):
    """Rows of a source of units, in the order of the windows.

    Windows that are in memory when an iterator is given up are kept. After a reset only streams
    that this rank did not have are read. There is a stream for each micro-batch of a step.
    """

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
        self._order: tuple[Dealing, int] | None = None
        self._kept: dict[tuple[int, int], LoadedWindow] = {}
        self._present: dict[int, LoadedWindow] = {}

    def __len__(self) -> int:
        return len(self._source)

    @functools.lru_cache(maxsize=2)  # noqa: B019 - a loader has one source for all its life
    def _streams(self, dealing: Dealing, window_rows: int) -> UnitStreams:
        return UnitStreams(self._source.sizes, dealing, window_rows)

    def rows(self, dealing: Dealing, step: int, number: int) -> Rows:
        return self._streams(dealing, self.window_rows).rows(step, number)

    def fetch(self, dealing: Dealing, first: int, blocks: BlockSchedule) -> Iterator[Any]:
        self._give_up()
        self._source.prepare()
        streams, order = self._streams(dealing, self.window_rows), (dealing, self.window_rows)
        kept = self._kept if order == self._order else {}
        needed = {(each.stream, each.number) for each in streams.needed(first, blocks)}
        kept = {key: loaded for key, loaded in kept.items() if key in needed}
        self._order, self._kept = order, {}
        reader = self._reader = WindowReader(
            streams.needed(first, blocks), self._read, self._size_of, self._source.memory, kept
        )
        return self._batches(streams, reader, first, blocks)

    def _batches(
        self, streams: UnitStreams, reader: WindowReader, first: int, blocks: BlockSchedule
    ) -> Iterator[Any]:
        try:
            for step in range(first, streams.steps):
                block = blocks.at(step)
                for number in [each for each in self._present if each not in block]:
                    reader.release(self._present.pop(number))
                for number in block:
                    places = streams.place(step, number)
                    if places:
                        yield self._batch(reader, number, places)
        finally:
            if self._reader is reader:
                self._give_up()

    def _batch(self, reader: WindowReader, number: int, places: range) -> Any:
        parts, present = [], self._present
        place = places.start
        while place < places.stop:
            loaded = present.get(number)
            if loaded is None or loaded.window.stop <= place:
                if loaded is not None:
                    reader.release(present.pop(number))
                loaded = present[number] = reader.take()
                assert loaded.window.stream == number and place in loaded.window.places
            start = loaded.window.start
            stop = min(places.stop, loaded.window.stop)
            parts.append(loaded.rows.between(place - start, stop - start))
            place = stop
        return RowBlock.joined(parts, self._source.name).batch()

    def _give_up(self) -> None:
        """End the present reader, and keep its windows."""
        reader, self._reader = self._reader, None
        if reader is not None:
            for loaded in [*reader.stop(), *self._present.values()]:
                self._kept[loaded.window.stream, loaded.window.number] = loaded
            self._present = {}

    def _size_of(self, window: Window) -> int:
        return int(window.rows * self._source.row_bytes)

    def _read(self, window: Window) -> LoadedWindow:
        blocks = []
        for each in window.ranges:
            block = self._source.read(each.unit)
            if len(block) != self._source.sizes[each.unit]:
                raise DataError(
                    f"{self._source.name}: unit {each.unit} has {len(block)} rows, and had "
                    f"{self._source.sizes[each.unit]} when the job began"
                )
            blocks.append(block.between(each.start, each.stop))
        joined = RowBlock.joined(blocks, self._source.name)
        del blocks, block
        return LoadedWindow(window, joined.taken(None if window.key is None else window.order()))

    def requirements(self) -> dict[str, str]:
        return {"dataset": f"{len(self)} rows", **self._source.describe()}

    def state_dict(self) -> dict[str, Any]:
        return {"window_rows": self.window_rows, "units": self._description}

    @functools.cached_property
    def _description(self) -> str:
        """One text, because a state is looked through in each commit."""
        return json.dumps(self._source.describe())

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        units = state_dict.get("units", "")
        if units != self._description:
            then = json.loads(units) if units else {}
            now = self._source.describe()
            for name in [*then, *now]:
                if then.get(name) != now.get(name):
                    raise StateMismatch(
                        f"{name} has changed since the state was saved: it was "
                        f"{then.get(name, 'not there')}, and is {now.get(name, 'gone')}"
                    )
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


COPIES = 3
"""Copies of a window that exist while it is read: as a table, joined, and permuted."""

JOIN_LIMIT = 5.0
"""Most seconds to wait for the thread at the end: a file system may never return."""


@dataclass(frozen=True)
class LoadedWindow:
    """A window and its rows, in their order."""

    window: Window
    rows: RowBlock


# The thread runs only while there is a window to read and memory for it. `take` starts it again.
# So a reader that is given up without a word leaves no thread that waits for ever: the thread ends
# when memory is full. One lock guards all fields. Windows become ready in the order in which they
# are needed, thus `take` needs no key, and an error is raised at the batch that needs its window.


class WindowReader:
    """Reader of windows, in the order in which they are needed."""

    def __init__(
        self,
        windows: Iterator[Window],
        read: Callable[[Window], LoadedWindow],
        size_of: Callable[[Window], int],
        memory: int,
        kept: dict[tuple[int, int], LoadedWindow],
    ) -> None:
        self._windows = windows  # the thread advances it
        self._read = read  # the thread calls it
        self._size_of = size_of  # bytes that a window will probably take
        # Bytes for windows, those that were taken and are not released included. A window that is
        # waited for is read regardless.
        self._memory = memory
        self._kept = kept  # windows in memory, by stream and number
        self._held = sum(each.rows.nbytes for each in kept.values())
        self._changed = threading.Condition()
        self._ready: deque[LoadedWindow | BaseException] = deque()
        self._next = next(windows, None)
        self._awaited = False
        self._stopped = False
        self._thread: threading.Thread | None = None

    def take(self) -> LoadedWindow:
        """Return the next window, or raise its read error; wait if need be."""
        with self._changed:
            self._awaited = True
            self._start()
            while not self._ready:
                self._changed.wait(0.1)  # so that the rank can be interrupted
            self._awaited = False
            found = self._ready[0]
            if isinstance(found, BaseException):
                raise found  # again, if it is asked for again
            self._ready.popleft()
            self._start()
            return found

    def release(self, taken: LoadedWindow) -> None:
        """Give back the memory of a window that was taken."""
        with self._changed:
            self._held -= taken.rows.nbytes
            self._start()

    def stop(self) -> list[LoadedWindow]:
        """End the thread, and return the windows that were read and not taken."""
        with self._changed:
            self._stopped = True
            thread = self._thread
        # The collector of garbage may end an iterator, and with it its reader, in any thread.
        if thread is not None and thread is not threading.current_thread():
            thread.join(JOIN_LIMIT)
        with self._changed:
            left = [each for each in self._ready if isinstance(each, LoadedWindow)]
            return [*left, *self._kept.values()]

    def _may_read(self) -> bool:
        if self._next is None or self._stopped:
            return False
        if (self._next.stream, self._next.number) in self._kept:
            return True
        fits = self._held + COPIES * self._size_of(self._next) <= self._memory
        return fits or (self._awaited and not self._ready)

    def _start(self) -> None:
        if self._thread is None and self._may_read():
            self._thread = threading.Thread(target=self._run, name="nbelastic-reader", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        try:
            self._read_ahead()
        except BaseException as error:  # a thread that ended would be waited for forever
            with self._changed:
                self._next = None
                self._ready.append(error)
                self._changed.notify_all()

    def _read_ahead(self) -> None:
        while True:
            with self._changed:
                window = self._next
                if window is None or not self._may_read():
                    self._thread = None
                    return
                found: LoadedWindow | BaseException | None
                found = self._kept.pop((window.stream, window.number), None)
                known = found is not None
            if found is None:
                try:
                    found = self._read(window)
                except BaseException as error:  # a thread that ended would be waited for forever
                    found = error
            with self._changed:
                self._ready.append(found)
                if isinstance(found, BaseException):
                    self._next = None
                else:
                    self._held += 0 if known else found.rows.nbytes
                    self._next = next(self._windows, None)
                self._changed.notify_all()
