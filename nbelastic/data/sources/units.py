"""Sources whose rows come in units: row groups, record batches, partitions."""

from __future__ import annotations

import abc
import contextlib
import functools
import json
import math
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from nbelastic.data.plan.dealing import Dealing, Rows
from nbelastic.data.plan.streams import UnitStreams, Window
from nbelastic.data.sources.row_source import RowSource, is_count
from nbelastic.errors import DataError, OptionError, StateMismatch

_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}

COPIES = 3  # copies of a window that exist while it is read: as a table, joined, and permuted

SINGLE, _TUPLE = "a tensor", "a tuple"
Form = str | tuple[Any, ...]


@dataclass(frozen=True)
class RowBlock:
    """Rows of arrays of equal length."""

    arrays: tuple[np.ndarray[Any, Any], ...]
    form: Form = _TUPLE  # of a batch: a tensor, a tuple, or a dict with these keys

    def __len__(self) -> int:
        return len(self.arrays[0])

    @property
    def nbytes(self) -> int:
        """Size in memory."""
        return sum(array.nbytes for array in self.arrays)

    @classmethod
    def of(cls, value: Any, rows: int, where: str) -> RowBlock:
        """Return a block of a ``transform``'s result, which must have `rows` rows."""
        form: Form
        if isinstance(value, Mapping):
            form, values = tuple(value), list(value.values())
        elif isinstance(value, (tuple, list)):
            form, values = _TUPLE, list(value)
        else:
            form, values = SINGLE, [value]
        # Copies, because the function may fill the same memory for the next unit.
        arrays = tuple(np.array(_array(each, where)) for each in values)
        if not arrays or any(not array.ndim or len(array) != rows for array in arrays):
            found = ", ".join(str(list(array.shape)) for array in arrays) or "nothing"
            raise DataError(
                f"{where}: transform got {rows} rows and returned {found}; it must return tensors "
                "with a row for each row"
            )
        return cls(arrays, form)

    def between(self, start: int, stop: int) -> RowBlock:
        """Return rows ``start … stop - 1``, which share their memory with this block."""
        return RowBlock(tuple(array[start:stop] for array in self.arrays), self.form)

    def taken(self, order: Rows) -> RowBlock:
        """Return a copy of the rows in an order."""
        return RowBlock(tuple(array.take(order, axis=0) for array in self.arrays), self.form)

    @staticmethod
    def joined(blocks: Sequence[RowBlock], where: str) -> RowBlock:
        """Return the rows of all blocks, one block after the other."""
        first = blocks[0]
        if len(blocks) == 1:
            return first
        shapes = {(each.form, *(array.shape[1:] for array in each.arrays)) for each in blocks}
        if len(shapes) > 1:
            texts = " and ".join(sorted(str(shape[1:]) for shape in shapes))
            raise DataError(f"{where}: rows of differing shapes {texts} make no batch")
        columns = zip(*(each.arrays for each in blocks), strict=True)
        return RowBlock(tuple(map(np.concatenate, columns)), first.form)

    def batch(self) -> Any:
        """Return the rows as tensors that share memory with nothing else."""
        tensors = [torch.from_numpy(np.array(array, order="C")) for array in self.arrays]
        if isinstance(self.form, tuple):
            return dict(zip(self.form, tensors, strict=True))
        return tensors[0] if self.form == SINGLE else tuple(tensors)


def _array(value: Any, where: str) -> np.ndarray[Any, Any]:
    """Return a value as an array of which PyTorch makes a tensor."""
    kind = f"{value.dtype} values" if hasattr(value, "dtype") else f"a {type(value).__name__}"
    with contextlib.suppress(TypeError, RuntimeError):  # NumPy or PyTorch has no such type, layout
        if isinstance(value, torch.Tensor):
            kind = f"{kind}, {str(value.layout).removeprefix('torch.')}"
            return value.detach().cpu().resolve_conj().resolve_neg().numpy()
        if isinstance(value, np.ma.MaskedArray):
            kind = "masked values, of which the masks would be lost"
        elif isinstance(value, np.ndarray):
            native = value.astype(value.dtype.newbyteorder("="), copy=False)
            torch.from_numpy(native[:0].copy())
            return native
    raise DataError(
        f"{where}: transform returned {kind}; it must return a tensor, or a tuple or dict of "
        "tensors, of a type that NumPy has"
    )


class UnitSource(abc.ABC):
    """Rows in units that can be opened by themselves."""

    name: str  # what the user calls it, for errors
    sizes: Rows  # of each unit
    row_bytes: float  # in memory, about
    shuffle_rows: int  # among which a row is shuffled, over all streams
    memory: int  # bytes that a rank's windows may take

    def __init__(self, name: str, shuffle_rows: int, memory: int | str) -> None:
        self.name = name
        if not is_count(shuffle_rows):
            raise OptionError(
                f"{name}(shuffle_rows={shuffle_rows!r}): must be a whole number, at least 1"
            )
        self.shuffle_rows = shuffle_rows
        self.memory = parse_bytes(memory, f"{name}(memory={memory!r})")

    def __len__(self) -> int:
        return int(self.sizes.sum())

    @abc.abstractmethod
    def read(self, unit: int) -> RowBlock:
        """Return the rows of a unit, in their own order. A background thread calls this."""

    @abc.abstractmethod
    def describe(self) -> dict[str, str]:
        """Return what the rows depend on, as names and texts: a file and its digest."""


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

    def rows(self, dealing: Dealing, step: int, number: int) -> Rows:
        return self._streams(dealing, self.window_rows).rows(step, number)

    def fetch(self, dealing: Dealing, first: int, block: range) -> Iterator[Any]:
        streams = self._streams(dealing, self.window_rows)
        self._reader = reader = self._reader or WindowReader(self._source)
        reader.begin(streams.needed(first, block))

        def batches() -> Iterator[Any]:
            pairs = ((step, number) for step in range(first, dealing.steps) for number in block)
            for step, number in pairs:
                parts = []
                for window, begin, end in streams.pieces(step, number):
                    parts.append(reader.take(window).between(begin, end))
                    if end == window.rows:
                        reader.release(window)
                if parts:
                    yield RowBlock.joined(parts, self._source.name).batch()

        return batches()

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


class WindowReader:
    """Reader of windows, in the order in which they are needed, by a thread."""

    # The thread runs only while there is a window to read and memory for it. `take` starts it
    # again. So a reader that is given up without a word leaves no thread that waits for ever. One
    # lock guards all fields.

    def __init__(self, source: UnitSource) -> None:
        self._source = source
        self._changed = threading.Condition()
        self._needed: dict[Window, None] = {}  # those that are not read yet, in their order
        self._loaded: dict[Window, RowBlock | BaseException] = {}
        self._awaited: Window | None = None
        self._runs = False

    def begin(self, needed: Sequence[Window]) -> None:
        """Read other windows from now on; those in memory are kept if they are among them."""
        with self._changed:
            whole = {w: rows for w, rows in self._loaded.items() if isinstance(rows, RowBlock)}
            self._loaded = {window: whole[window] for window in needed if window in whole}
            self._needed = {window: None for window in needed if window not in whole}

    def take(self, window: Window) -> RowBlock:
        """Return a window's rows, or raise its read error; wait if need be."""
        with self._changed:
            while (found := self._loaded.get(window)) is None:
                self._awaited = window
                self._needed.setdefault(window)  # others may have begun since, as by sample()
                self._start()
                self._changed.wait(0.1)  # so that the rank can be interrupted
            self._awaited = None
        if isinstance(found, BaseException):
            raise found  # again, if it is asked for again
        return found

    def release(self, window: Window) -> None:
        """Give back the memory of a window."""
        with self._changed:
            del self._loaded[window]
            self._start()

    @property
    def held(self) -> int:
        """Bytes of all windows in memory."""
        return sum(each.nbytes for each in self._loaded.values() if isinstance(each, RowBlock))

    def _next(self) -> Window | None:
        """Return the window to read now: the awaited one, or the next if there is memory for it."""
        if self._awaited in self._needed:
            return self._awaited
        window = next(iter(self._needed), None)
        if window is None:
            return None
        need = self.held + COPIES * int(window.rows * self._source.row_bytes)
        return window if need <= self._source.memory else None

    def _read(self, window: Window) -> RowBlock:
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
        return joined.taken(window.order())

    def _start(self) -> None:
        if not self._runs and self._next() is not None:
            self._runs = True
            threading.Thread(target=self._run, name="nbelastic-reader", daemon=True).start()

    def _run(self) -> None:
        while True:
            with self._changed:
                window = self._next()
                if window is None:
                    self._runs = False
                    return
            found: RowBlock | BaseException
            try:
                found = self._read(window)
            except BaseException as error:  # a thread that ended would be waited for forever
                found = error
            with self._changed:
                if window in self._needed:  # and not given up meanwhile
                    del self._needed[window]
                    self._loaded[window] = found
                    if isinstance(found, BaseException):
                        self._needed.clear()  # others would fail alike
                self._changed.notify_all()
            del found
