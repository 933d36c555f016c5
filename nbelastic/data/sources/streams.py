"""Sources of streams and units of unknown length, and their micro-batches."""

from __future__ import annotations

import abc
import functools
import pickle
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any

import msgspec
from torch.utils.data import IterableDataset, default_collate

from nbelastic.data.plan.dealing import Dealing, Permutation, mix
from nbelastic.data.plan.streams import LeaseTable
from nbelastic.data.sources.row_source import COLLATING, RowSource, digest_of, is_count
from nbelastic.data.sources.stream_reader import Mark, StreamReader
from nbelastic.elastic.followed import seed_generators
from nbelastic.elastic.ranks.context import current_or_none
from nbelastic.elastic.state.transfer import allgather_object
from nbelastic.errors import DataError, OptionError

# Kinds of seeds, apart from those of the loader and of units.
_READING, _ORDER, _STEP = 21, 22, 23

STEP_END = "the end of a step of a Loader, whose streams have no known length"


class StreamSource(abc.ABC):
    """Units of unknown length, each read by one stream from its start."""

    name: str  # what the user calls it, for errors
    unit: str  # what a unit is called there
    in_order = False  # units are never permuted
    states_every: int | None = None  # steps from one exchange of marks to the next; None: no marks

    @abc.abstractmethod
    def units(self, streams: int) -> Sequence[Any]:
        """Return the units for so many streams, which must not be fewer."""

    @abc.abstractmethod
    def open(self, unit: Any, streams: int, epoch: int) -> Iterable[Any]:
        """Return the rows of a unit."""


class Stateful(StreamSource):
    """Iterable datasets as the data of a :class:`~nbelastic.data.Loader`, one for each stream.

    A step consists of V micro-batches, and micro-batch v has the next rows of stream v. So which
    rows a step has does not depend on the number of ranks. Ranks read the streams of their
    micro-batches. Streams may have any length. Those that have ended have weight 0 until all have.

    Ranks exchange states every 100 steps. The rank that takes a stream over goes on from the last
    of them, and passes over the rows since then. Datasets without states are read from their start.

    Parameters
    ----------
    make : callable
        ``make(stream, streams)`` returns the dataset of a stream, by its number and that of all
        streams: anything that can be iterated over. It returns the same rows each time.
        ``set_epoch(epoch)`` of the dataset is called if there is one. ``state_dict()`` and
        ``load_state_dict()``, of the dataset or of its iterator, lead to the place after the last
        row that was read.
    states_every : int or None, default 100
        Steps from one exchange of states to the next. None for datasets of which states are not
        complete; then streams are read from their start.

    Raises
    ------
    OptionError
        A value cannot be used.

    Notes
    -----
    Rows are read in the thread of the rank. A dataset that is slow should read ahead by itself.
    Random generators of the process are seeded before each row, by seed, epoch, stream and row.

    Examples
    --------
    >>> def make(stream, streams):
    ...     return dataset.shard(num_shards=streams, index=stream)
    >>> loader = Loader(Stateful(make), Batch(256, micro=32))  # doctest: +SKIP
    """

    name, unit = "Stateful", "stream"
    in_order = True

    def __init__(
        self, make: Callable[[int, int], Iterable[Any]], *, states_every: int | None = 100
    ) -> None:
        if not callable(make) or isinstance(make, IterableDataset):
            raise OptionError(
                f"Stateful({type(make).__name__}): must be a function that returns the dataset of "
                "a stream, as in Stateful(lambda stream, streams: ...)"
            )
        if states_every is not None and not is_count(states_every):
            raise OptionError(
                f"Stateful(states_every={states_every!r}): must be a whole number of steps, at "
                "least 1, or None"
            )
        self._make = make
        self.states_every = states_every

    def units(self, streams: int) -> Sequence[int]:
        return range(streams)

    def open(self, unit: int, streams: int, epoch: int) -> Iterable[Any]:
        made = self._make(unit, streams)
        set_epoch = getattr(made, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)
        return made


class Shards(StreamSource):
    """Files and other units of unknown length as the data of a :class:`~nbelastic.data.Loader`.

    Each of the V micro-batches of a step has the next rows of one unit. When a unit ends, the next
    one goes to its stream; if several end in a step, in the order of their numbers. So which rows a
    step has does not depend on the number of ranks. The last micro-batch of a unit may be smaller.
    Towards the end of an epoch, streams without a unit have weight 0 until all units have ended.

    With ``shuffle=True`` of the loader, units are permuted in each epoch. Rows within a unit keep
    their order.

    Parameters
    ----------
    units : sequence
        What `read` gets: paths, offsets, partitions. All ranks have the same.
    read : callable
        ``read(unit)`` returns an iterable of the rows of a unit, the same rows each time.

    Raises
    ------
    OptionError
        A value cannot be used.

    Notes
    -----
    The rank that takes a stream over reads its unit from the start, and passes over the rows that
    are done. So units should be read in seconds rather than in hours. Rows are read in the thread
    of the rank. Random generators of the process are seeded before each row.

    Examples
    --------
    >>> data = Shards(sorted(glob("corpus/*.txt")), read=open)  # doctest: +SKIP
    >>> loader = Loader(data, Batch(256, micro=32), collate_fn=tokenize)  # doctest: +SKIP
    """

    name, unit = "Shards", "unit"

    def __init__(self, units: Sequence[Any], read: Callable[[Any], Iterable[Any]]) -> None:
        if isinstance(units, (str, bytes)) or not hasattr(units, "__len__"):
            raise OptionError(
                f"Shards({type(units).__name__}): must be a sequence of units, such as a list of "
                "paths"
            )
        if not callable(read):
            raise OptionError(f"Shards(read={read!r}): must be a function")
        self._units = list(units)
        self._read = read

    def units(self, streams: int) -> Sequence[Any]:
        if len(self._units) < streams:
            raise OptionError(
                f"Shards: {len(self._units)} units for {streams} micro-batches of a step; each "
                "needs one at least. Make units smaller, or micro-batches fewer"
            )
        return self._units

    def open(self, unit: Any, streams: int, epoch: int) -> Iterable[Any]:
        return self._read(unit)


class StreamRows(RowSource):
    """Micro-batches of streams; see :mod:`nbelastic.data.plan.streams` for what is in a commit."""

    is_open = True

    def __init__(
        self,
        source: StreamSource,
        micro_batches: int,
        collate_fn: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        self.name = source.name
        self._source = source
        self._streams = micro_batches
        self._units = source.units(micro_batches)
        self._collate: Callable[[list[Any]], Any] = collate_fn or default_collate
        self._table: LeaseTable | None = None
        self._marks: dict[int, Mark] = {}  # by unit, those that all ranks have
        self._packed = b""  # the marks
        self._readers: dict[tuple[int, int], StreamReader] = {}  # by epoch and unit
        self._ready: deque[tuple[int, list[Any]]] = deque()
        self._ended: dict[int, int] = {}
        self._made: dict[int, Mark] = {}

    def __len__(self) -> int:
        return 0

    def has_step(self, dealing: Dealing, step: int) -> bool:
        return not self._table_of(dealing).is_over

    def rows_before(self, dealing: Dealing, step: int) -> int:
        return self._table_of(dealing).rows_before(step, dealing.micro)

    def _table_of(self, dealing: Dealing) -> LeaseTable:
        """Return the present table; in a new epoch, the first step's table."""
        table = self._table
        if table is None or table.epoch != dealing.epoch:
            table = LeaseTable.first(dealing.epoch, len(self._units), self._streams)
            self._keep(table, {})
        return table

    def _keep(self, table: LeaseTable, marks: dict[int, Mark]) -> None:
        leased = {lease.unit for lease in table.leases if lease is not None}
        kept = {unit: mark for unit, mark in marks.items() if unit in leased}
        if kept != self._marks:
            self._packed = pickle.dumps(kept) if kept else b""
        self._table, self._marks = table, kept

    # -- a step ------------------------------------------------------------------------------------

    def fetch(self, dealing: Dealing, first: int, block: range) -> Iterator[Any]:
        while True:
            seed, rows = self._ready.popleft()
            seed_generators(seed)
            yield self._collate(rows)

    def counts(self, dealing: Dealing, step: int, block: range) -> list[int]:
        table, every = self._table_of(dealing), self._source.states_every
        found = [dealing.micro if lease is not None else 0 for lease in table.leases]
        self._ready.clear()
        self._ended, self._made = {}, {}
        kept: dict[tuple[int, int], StreamReader] = {}
        for number in block:
            lease = table.leases[number]
            if lease is None:
                continue
            reader = kept[dealing.epoch, lease.unit] = self._reader(dealing, lease.unit)
            position = table.position(step, number, dealing.micro)
            reader.seek(position)
            rows = reader.take(dealing.micro)
            mark = reader.make_mark() if every is not None and (step + 1) % every == 0 else None
            if reader.at_end:
                self._ended[number] = len(rows)
            elif mark is not None:
                self._made[lease.unit] = mark
            if rows:
                self._ready.append((mix(reader.seed, position, COLLATING), rows))
            found[number] = len(rows)
        for key, reader in self._readers.items():
            if key not in kept:
                reader.close()
        self._readers = kept
        # Reading has drawn random numbers, other ones on each rank.
        seed_generators(mix(dealing.seed, _STEP, dealing.epoch, step))
        return found

    def _reader(self, dealing: Dealing, place: int) -> StreamReader:
        """Return the reader of a unit, by its place in the epoch."""
        number, source, epoch = place, self._source, dealing.epoch
        reader = self._readers.get((epoch, place))
        if reader is None:
            if dealing.shuffle and not source.in_order:
                order = Permutation(len(self._units), mix(dealing.seed, _ORDER, epoch))
                number = int(order.rows([place])[0])
            unit, seed = self._units[number], mix(dealing.seed, _READING, epoch, number)
            make = functools.partial(source.open, unit, self._streams, epoch)
            reader = StreamReader(f"{self.name}: {source.unit} {unit!r:.200}", make, seed)
        reader.mark = self._marks.get(place)
        return reader

    def settle(self, dealing: Dealing, step: int, counts: list[int]) -> None:
        table = self._table_of(dealing)
        ended, made = _of_all(self._ended, self._made)
        for number, rows in ended.items():
            counts[number] = rows
        if ended or made:
            table = table.after(step, ended, dealing.micro)
            self._keep(table, {**self._marks, **made})
        if table.is_over:
            for reader in self._readers.values():
                reader.close()
            if not table.finished:
                raise DataError(f"{self.name}: no unit has a row")

    def describe(self) -> dict[str, str]:
        text = "\n".join(
            str(unit) if isinstance(unit, (str, int, PurePath)) else type(unit).__name__
            for unit in self._units
        )
        return {self.name: f"{len(self._units)} {self._source.unit}s {digest_of(text)}"}

    def state_dict(self) -> dict[str, Any]:
        table = "" if self._table is None else msgspec.json.encode(self._table).decode()
        return {"table": table, "marks": self._packed}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        text, self._packed = state_dict.get("table", ""), state_dict.get("marks", b"")
        self._table = msgspec.json.decode(text, type=LeaseTable) if text else None
        self._marks = pickle.loads(self._packed) if self._packed else {}


def _of_all(ended: dict[int, int], made: dict[int, Mark]) -> tuple[dict[int, int], dict[int, Mark]]:
    """Return all ranks' findings. If no rank has found any, the ranks exchange one number."""
    context = current_or_none()
    if context is None or context.size == 1:
        return ended, made
    communicator = context.communicator()
    if not any(communicator.agree(STEP_END, int(bool(ended or made)))):
        return {}, {}
    every = allgather_object(communicator, (ended, made))
    return (
        {number: rows for theirs, _ in every for number, rows in theirs.items()},
        {unit: mark for _, theirs in every for unit, mark in theirs.items()},
    )
