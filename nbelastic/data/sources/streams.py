"""Sources of streams and units of unknown length, and their micro-batches."""

from __future__ import annotations

import abc
import functools
import pickle
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any

from torch.utils.data import IterableDataset, default_collate

from nbelastic.data.plan.dealing import Dealing, Permutation, Rows, mix
from nbelastic.data.plan.streams import LeaseTable
from nbelastic.data.sources.row_source import COLLATING, RowSource, digest_of, is_count
from nbelastic.data.sources.stream_reader import Mark, StreamReader
from nbelastic.elastic.followed import generators_kept, seed_generators
from nbelastic.elastic.ranks.context import current_or_none
from nbelastic.elastic.state.transfer import allgather_object
from nbelastic.errors import DataError, OptionError, StateMismatch

# Kinds of seeds, apart from those of the loader and of units.
_READING, _ORDER, _STEP = 21, 22, 23

STEP_END = "the end of a step of a Loader, whose streams have no known length"
STATES = "the states of the streams of a Loader"
WITHOUT_STATES = (
    "{name}: a dataset has no state_dict and load_state_dict, so streams that change ranks are "
    "read again\n"
    "After a fault or a change of ranks, the rank that takes a stream over reads it from its "
    "start and passes over the rows that are done. Other ranks wait for it.\n"
    "Give the dataset state_dict() and load_state_dict(), or use more and smaller units: "
    "hvd.elastic.Shards(units, read)."
)


class StreamSource(abc.ABC):
    """Units of unknown length, each read by one stream from its start."""

    name: str  # what the user calls it, for errors
    in_order = False  # units are never permuted
    states_every: int | None = None  # steps from one exchange of marks to the next; None: no marks

    @abc.abstractmethod
    def count(self, streams: int) -> int:
        """Return the number of units for so many streams, which must not be fewer."""

    @abc.abstractmethod
    def open(self, unit: int, streams: int, epoch: int) -> Iterable[Any]:
        """Return the rows of a unit."""

    @abc.abstractmethod
    def name_of(self, unit: int) -> str:
        """Return what a unit is called in errors."""

    @abc.abstractmethod
    def describe(self) -> str:
        """Return a text on the units, equal on all ranks."""


class Stateful(StreamSource):
    """Iterable datasets as the data of a :class:`~nbelastic.data.Loader`, one for each stream.

    A step consists of V micro-batches, and micro-batch v has the next rows of stream v. So which
    rows a step has does not depend on the number of ranks. Ranks read the streams of their
    micro-batches. Streams may have any length. Those that have ended have weight 0 until all have.

    Ranks exchange states every 100 steps, at checkpoints, and when ranks join or leave as planned.
    The rank that takes a stream over goes on from the last of them, and passes over the rows since
    then. Datasets without states are read from their start.

    Parameters
    ----------
    make : callable
        ``make(stream, streams)`` returns the dataset of a stream, by its number and that of all
        streams: anything that can be iterated over. It returns the same rows each time.
        ``set_epoch(epoch)`` of the dataset is called if there is one. ``state_dict()`` and
        ``load_state_dict()``, of the dataset or of its iterator, lead to the place after the last
        row that was read.
    states_every : int or None, default 100
        Steps from one regular exchange of states to the next. None for datasets of which states
        are not complete; then streams are read from their start.

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

    name = "Stateful"
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

    def count(self, streams: int) -> int:
        return streams

    def open(self, unit: int, streams: int, epoch: int) -> Iterable[Any]:
        made = self._make(unit, streams)
        set_epoch = getattr(made, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)
        return made

    def name_of(self, unit: int) -> str:
        return f"stream {unit}"

    def describe(self) -> str:
        return "a stream for each micro-batch"


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

    name = "Shards"

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

    def count(self, streams: int) -> int:
        if len(self._units) < streams:
            raise OptionError(
                f"Shards: {len(self._units)} units for {streams} micro-batches of a step; each "
                "needs one at least. Make units smaller, or micro-batches fewer"
            )
        return len(self._units)

    def open(self, unit: int, streams: int, epoch: int) -> Iterable[Any]:
        return self._read(self._units[unit])

    def name_of(self, unit: int) -> str:
        return f"unit {self._units[unit]!r:.200}"

    def describe(self) -> str:
        text = "\n".join(
            str(unit) if isinstance(unit, (str, int, PurePath)) else type(unit).__name__
            for unit in self._units
        )
        return f"{len(self._units)} units {digest_of(text)}"


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
        self._units = source.count(micro_batches)
        self._collate: Callable[[list[Any]], Any] = collate_fn or default_collate
        self._table: LeaseTable | None = None
        self._marks: dict[int, Mark] = {}  # by unit, those that all ranks have
        self._packed = b""  # the marks
        self._described = source.describe()
        self._readers: dict[tuple[int, int], StreamReader] = {}  # by epoch and unit
        self._ready: deque[tuple[int, list[Any]]] = deque()
        self._ended: dict[int, int] = {}
        self._made: dict[int, Mark] = {}
        self._is_plain = False

    def __len__(self) -> int:
        return 0

    def rows(self, dealing: Dealing, step: int, number: int) -> Rows:
        raise OptionError(f"{self.name}: rows of a stream have no indices in the source")

    def has_step(self, dealing: Dealing, step: int) -> bool:
        return not self._table_of(dealing).is_over

    def rows_before(self, dealing: Dealing, step: int) -> int:
        return self._table_of(dealing).rows_before(step, dealing.micro)

    def _table_of(self, dealing: Dealing) -> LeaseTable:
        """Return the present table; in a new epoch, the first step's table."""
        table = self._table
        if table is None or table.epoch != dealing.epoch:
            table = LeaseTable.first(dealing.epoch, self._units, self._streams)
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
            self._is_plain |= every is not None and not reader.has_states
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
        unit, source, epoch = place, self._source, dealing.epoch
        if dealing.shuffle and not source.in_order:
            order = Permutation(self._units, mix(dealing.seed, _ORDER, epoch))
            unit = int(order.rows([place])[0])
        reader = self._readers.get((epoch, place))
        if reader is None:
            make = functools.partial(source.open, unit, self._streams, epoch)
            name, seed = source.name_of(unit), mix(dealing.seed, _READING, epoch, unit)
            reader = StreamReader(f"{self.name}: {name}", make, seed)
        reader.mark = self._marks.get(place)
        return reader

    def settle(self, dealing: Dealing, step: int, counts: list[int]) -> str:
        table = self._table_of(dealing)
        ended, made = _of_all(STEP_END, self._ended, self._made)
        for number, rows in ended.items():
            counts[number] = rows
        if ended or made:
            self._keep(table.after(step, ended, dealing.micro), {**self._marks, **made})
        assert self._table is not None
        if self._table.is_over:
            for reader in self._readers.values():
                reader.close()
            if not self._table.finished:
                raise DataError(f"{self.name}: no unit has a row")
        return WITHOUT_STATES.format(name=self.name) if self._is_plain else ""

    def exchange_states(self, dealing: Dealing, step: int) -> bool:
        if self._source.states_every is None:
            return False
        table, made = self._table, {}
        if table is not None and table.epoch == dealing.epoch:
            with generators_kept():
                made = self._marks_at(table, step, dealing.micro)
        _, made = _of_all(STATES, {}, made)
        if table is not None and made:
            self._keep(table, {**self._marks, **made})
        return bool(made)

    def _marks_at(self, table: LeaseTable, step: int, micro: int) -> dict[int, Mark]:
        """Return marks before a step of this rank's streams, except marks that all ranks have."""
        found = {}
        for stream, lease in enumerate(table.leases):
            reader = None if lease is None else self._readers.get((table.epoch, lease.unit))
            if lease is None or reader is None or not reader.has_states:
                continue
            position, known = table.position(step, stream, micro), self._marks.get(lease.unit)
            if reader.position != position or (known is not None and known.rows == position):
                continue
            mark = reader.make_mark()
            if mark is not None:
                found[lease.unit] = mark
        return found

    # -- the state ---------------------------------------------------------------------------------

    def requirements(self) -> dict[str, str]:
        return {"dataset": self._described}

    def state_dict(self) -> dict[str, Any]:
        table = "" if self._table is None else self._table.to_text()
        return {"table": table, "marks": self._packed, "units": self._described}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        units = state_dict.get("units", self._described)
        if units != self._described:
            raise StateMismatch(
                f"the units of {self.name} have changed since the state was saved: they were "
                f"{units}, and are {self._described}"
            )
        text, self._packed = state_dict.get("table", ""), state_dict.get("marks", b"")
        self._table = LeaseTable.from_text(text) if text else None
        self._marks = pickle.loads(self._packed) if self._packed else {}


def _of_all(
    what: str, ended: dict[int, int], made: dict[int, Mark]
) -> tuple[dict[int, int], dict[int, Mark]]:
    """Return all ranks' findings. If no rank has found any, the ranks exchange one number."""
    context = current_or_none()
    if context is None or context.size == 1:
        return ended, made
    communicator = context.communicator()
    if not any(communicator.agree(what, int(bool(ended or made)))):
        return {}, {}
    every = allgather_object(communicator, (ended, made))
    return (
        {number: rows for theirs, _ in every for number, rows in theirs.items()},
        {unit: mark for _, theirs in every for unit, mark in theirs.items()},
    )
