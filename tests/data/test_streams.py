"""Sources of unknown length: the same micro-batches for any ranks, and exactly the rest."""

from __future__ import annotations

import copy
import pickle
import random
import threading
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import IterableDataset, default_collate

import nbelastic.torch as hvd
from nbelastic import load_checkpoint
from nbelastic.data import Batch, Loader, Shards, Stateful
from nbelastic.data.sources.stream_reader import StreamReader, row_digest
from nbelastic.elastic.checkpoint.manager import CheckpointManager
from nbelastic.errors import DataError, OptionError, StateMismatch
from nbelastic.torch.state.torch_state import TorchState
from tests.data.lockstep import run_in_turns
from tests.elastic.members import begin, make_member, written
from tests.support.world import StaticContext, run_ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

LENGTHS = [13, 0, 32, 7, 8, 2, 18, 24, 3, 12]
STREAMS = [29, 17, 0, 40, 33, 12]  # rows of each stream
EPOCHS = 2
reads: Counter[str] = Counter()
"""Rows that were read of each kind of data set."""


def drawn() -> float:
    """Return a sum of numbers from all generators."""
    return random.random() + float(np.random.random()) + float(torch.rand(()))


def noisy(unit: int, row: int, opened: float) -> tuple[int, float]:
    """Return a row, and what was drawn for it and for its unit, as augmentation does."""
    return unit * 1000 + row, opened + drawn()


def rows_of(unit: int) -> Iterator[tuple[int, float]]:
    opened = drawn()
    return (noisy(unit, row, opened) for row in range(LENGTHS[unit]))


def collated(rows: list[Any]) -> list[Any]:
    """Return a batch, and what was drawn for it."""
    return [*default_collate(rows), torch.tensor(drawn())]


class Resumable(IterableDataset):
    """A stream that keeps its place, as data sets of torchdata and Hugging Face do."""

    def __init__(self, stream: int, streams: int) -> None:
        assert streams == len(STREAMS)
        self.stream, self.row, self.epoch = stream, 0, 0
        self.opened = drawn()

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[tuple[int, float]]:
        while self.row < STREAMS[self.stream]:
            reads["states"] += 1
            row = self.row
            self.row += 1
            yield noisy(self.stream, row, self.opened)

    def state_dict(self) -> dict[str, int]:
        return {"row": self.row}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.row = state_dict["row"]


class StateInIterator:
    """The same, with the state in the iterator."""

    def __init__(self, stream: int, streams: int) -> None:
        self.arguments = stream, streams

    def __iter__(self) -> Any:
        return _Rows(Resumable(*self.arguments))


class _Rows:
    def __init__(self, source: Resumable) -> None:
        self.source, self.rows = source, iter(source)
        self.state_dict, self.load_state_dict = source.state_dict, source.load_state_dict

    def __iter__(self) -> _Rows:
        return self

    def __next__(self) -> tuple[int, float]:
        return next(self.rows)


class Plain(IterableDataset):
    """The same without states."""

    def __init__(self, stream: int, streams: int) -> None:
        self.stream, self.opened = stream, drawn()

    def __iter__(self) -> Iterator[tuple[int, float]]:
        for row in range(STREAMS[self.stream]):
            reads["plain"] += 1
            yield noisy(self.stream, row, self.opened)


SOURCES: dict[str, Callable[[], Any]] = {
    "shards": lambda: Shards(range(len(LENGTHS)), rows_of),
    "states": lambda: Stateful(Resumable, states_every=3),
    "iterator": lambda: Stateful(StateInIterator, states_every=2),
    "plain": lambda: Stateful(Plain, states_every=4),
    "unmarked": lambda: Stateful(Resumable, states_every=None),
}


def loader_of(kind: str) -> Loader:
    micro_batches = 4 if kind == "shards" else len(STREAMS)
    batch = Batch(5 * micro_batches, micro=5)
    return Loader(SOURCES[kind](), batch, seed=3, collate_fn=collated)


@dataclass
class World:
    """Generations of ranks, each from the last commit of the one before.

    Attributes
    ----------
    seen : dict
        Micro-batches by epoch, step and number: whenever they were read, they were equal.
    saved : dict
        The last commit.
    """

    kind: str
    seen: dict[tuple[int, int, int], Any]
    loaders: list[Loader]
    saved: dict[str, Any]

    @classmethod
    def of(cls, kind: str) -> World:
        return cls(kind, {}, [], loader_of(kind).state_dict())

    def train(self, size: int, *, steps: int, commit_every: int, as_planned: bool = False) -> bool:
        """Train for so many steps; return whether all is done.

        Then a rank fails, and what is not committed is lost; or ranks leave `as_planned`.
        """
        kept, self.loaders = self.loaders, []

        def main(context: StaticContext) -> tuple[bool, Any, Loader]:
            rank = context.rank
            loader = kept[rank] if rank < len(kept) else loader_of(self.kind)
            saved = self.saved
            loader.load_state_dict(copy.deepcopy(saved))
            number = 0
            while loader.epoch < EPOCHS:
                for step in loader:
                    if loader.epoch == EPOCHS:
                        break
                    begun = drawn()
                    for micro_batch, batch in zip(step.numbers, step, strict=True):
                        found = (*(part.tolist() for part in batch), begun, drawn())
                        key = (step.epoch, step.number, micro_batch)
                        assert self.seen.setdefault(key, found) == found
                    number += 1
                    if number % commit_every == 0:
                        saved = copy.deepcopy(loader.state_dict())
                    if number == steps:
                        if as_planned:
                            before = torch.get_rng_state(), random.getstate()
                            loader.exchange_states()
                            assert torch.equal(torch.get_rng_state(), before[0])
                            assert random.getstate() == before[1]
                            saved = copy.deepcopy(loader.state_dict())
                        return False, saved, loader
            return True, saved, loader

        results = run_in_turns(size, main)
        states = [saved for _, saved, _ in results]
        assert all(saved == states[0] for saved in states)
        self.saved = states[0]
        self.loaders = [loader for _, _, loader in results]
        return results[0][0]


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, Any]:
    found = {}
    for kind in SOURCES:
        world = World.of(kind)
        assert world.train(1, steps=1000, commit_every=1)
        found[kind] = world.seen
    return found


@pytest.mark.parametrize("kind", SOURCES)
def test_each_row_is_once_in_each_epoch(undisturbed: dict[str, Any], kind: str) -> None:
    lengths = LENGTHS if kind == "shards" else STREAMS
    right = [unit * 1000 + row for unit, length in enumerate(lengths) for row in range(length)]
    for epoch in range(EPOCHS):
        batches = [found for key, found in undisturbed[kind].items() if key[0] == epoch]
        assert sorted(row for rows, *_ in batches for row in rows) == right
    assert undisturbed["states"] == undisturbed["plain"] == undisturbed["unmarked"]


@pytest.mark.parametrize("kind", SOURCES)
@given(data=st.data())
@settings(max_examples=6, deadline=None)
def test_no_schedule_of_ranks_changes_a_micro_batch(
    undisturbed: dict[str, Any], kind: str, data: Any
) -> None:
    world = World.of(kind)
    for _ in range(6):
        size = data.draw(st.integers(1, 5), label="ranks")
        random.Random(size).shuffle(world.loaders)  # survivors get other numbers, others are new
        world.loaders = world.loaders[: data.draw(st.integers(0, 5), label="survivors")]
        steps = data.draw(st.integers(1, 9), label="steps")
        as_planned = data.draw(st.booleans(), label="as planned")
        commit_every = data.draw(st.integers(1, 3), label="commit every")
        if world.train(size, steps=steps, commit_every=commit_every, as_planned=as_planned):
            break
    else:
        assert world.train(3, steps=1000, commit_every=1)
    assert world.seen == undisturbed[kind]


def test_a_restored_state_has_its_own_table_of_units() -> None:
    loader = loader_of("shards")
    states, rows = [copy.deepcopy(loader.state_dict())], []
    for step in loader:
        rows.append([batch[0].tolist() for batch in step])
        states.append(copy.deepcopy(loader.state_dict()))
    tables = [state["source"]["table"] for state in states[1:]]
    assert len(set(tables)) > 4
    for state, right in [*zip(states, rows, strict=False)][::-1]:
        loader.load_state_dict(state)
        assert [batch[0].tolist() for batch in next(iter(loader))] == right


def test_a_stream_that_is_taken_over_goes_on_from_its_last_state() -> None:
    def rows_read(kind: str, steps: int) -> int:
        world = World.of(kind)
        world.train(2, steps=steps, commit_every=1)
        world.loaders = []
        reads.clear()
        world.train(3, steps=1, commit_every=1)
        return sum(reads.values())

    # Streams of 29, 17, 0, 40, 33, 12 rows; after 4 steps of 5 rows three are left.
    assert rows_read("states", 3) == 3 * (5 + 1) + 2 + 0  # from step 3, with the row after it
    assert rows_read("states", 4) == 3 * (5 + 5 + 1)
    assert rows_read("plain", 4) == 3 * (20 + 5 + 1)


@pytest.mark.parametrize(("steps", "rows"), [(1, 5 * 5), (4, 3 * 5), (5, 5 + 5 + 3)])
def test_after_a_planned_leave_no_row_is_read_again(steps: int, rows: int) -> None:
    world = World.of("states")
    world.train(2, steps=steps, commit_every=1, as_planned=True)
    world.loaders = []
    reads.clear()
    world.train(3, steps=1, commit_every=1)
    assert reads["states"] == rows  # the row that had been read ahead has come with the state


def test_a_rollback_by_one_step_reads_nothing_again() -> None:
    world = World.of("plain")
    world.train(2, steps=4, commit_every=3)
    reads.clear()
    world.train(2, steps=1, commit_every=1)
    assert sum(reads.values()) == 0


def test_streams_that_quotas_move_are_not_read_from_their_start() -> None:
    before = loader_of("unmarked")
    right = {step.number: [batch[0].tolist() for batch in step] for step in before}
    source = Stateful(Resumable, states_every=1000)
    reads.clear()

    def main(context: StaticContext) -> list[tuple[int, ...]]:
        loader = Loader(source, Batch(30, micro=5), seed=3, balance="speed")
        numbers = []
        for step in loader:
            for number, (rows, _) in zip(step.numbers, step, strict=True):
                assert rows.tolist() in right[step.number], number
            numbers.append(step.numbers)
            if step.number == 3:
                share = loader.balancer.timed
                assert share is not None
                share.times = (1.0, 5.0)  # as the reduction of gradients says
                loader.committed()
        return numbers

    first, second = run_in_turns(2, main)
    assert first[4:6] == [(0,), (0, 3, 4)]
    assert second[4:6] == [(3, 4), ()]
    # Step 4 of the two, the row after it, and that after the mark; without states 25 + 1 each.
    assert sum(reads.values()) - sum(STREAMS) <= 2 * (5 + 1)


def test_commits_of_leaves_and_checkpoints_have_the_states_of_all_streams(tmp_path: Path) -> None:
    def rank(context: Any) -> list[set[int]]:
        plan = make_member(context, tmp_path, every=3)
        model = torch.nn.Linear(1, 1)
        optimizer = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters()))
        loader = Loader(Stateful(Resumable, states_every=1000), Batch(30, micro=5), seed=3)
        state = TorchState(model=model, optimizer=optimizer, loader=loader, epoch=0)
        found = []

        def note() -> None:
            packed = loader.state_dict()["source"]["marks"]
            marks = pickle.loads(packed) if packed else {}
            found.append({mark.rows for mark in marks.values()})

        with CheckpointManager(context, state, 1) as checkpoints:
            begin(context, state, checkpoints, plan)
            for step in loader:
                optimizer.zero_grad()
                for rows, _ in step:
                    model(rows[:, None] / 1000).square().mean().backward()
                optimizer.step()
                state.commit()
                note()
                if step.number == 4:
                    break
            assert state._lazy.trusted  # such a commit still copies nothing
            state.leave()
            state.save()
            loader.load_state_dict(loader_of("unmarked").state_dict())
            state.restore()
            note()
            written(checkpoints)
        return found

    results = run_ranks(2, rank)
    assert results == [[set(), set(), {15}, {15}, {15}, {25}]] * 2
    (file,) = tmp_path.rglob("*.safetensors")
    loader = load_checkpoint(str(file))["loader"]
    marks = pickle.loads(loader["source"]["marks"])
    assert {mark.rows for mark in marks.values()} == {15}


class Views:
    """Rows that are views of one large tensor."""

    def __init__(self, *_: int) -> None:
        self.rows, self.place = torch.arange(1 << 20).view(-1, 4), 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self.place < len(self.rows):
            self.place += 1
            yield self.rows[self.place - 1]

    def state_dict(self) -> int:
        return self.place

    def load_state_dict(self, state: int) -> None:
        self.place = state


def test_a_mark_has_a_row_ahead_and_not_the_tensor_around_it() -> None:
    reader = StreamReader("views", Views, seed=0)
    reader.seek(0)
    reader.take(3)
    assert not reader.at_end
    reader.make_mark()
    mark = reader.mark
    assert mark is not None
    assert (mark.rows, mark.read) == (3, 4)
    assert len(pickle.dumps(mark)) < 2000
    other = StreamReader("views", Views, seed=0)
    other.known = mark
    other.seek(3)
    assert [row.tolist() for row in other.take(2)] == [[12, 13, 14, 15], [16, 17, 18, 19]]


def test_a_rollback_goes_on_from_the_last_mark_before_it() -> None:
    reader = StreamReader("rows", lambda: Resumable(4, len(STREAMS)), seed=0)
    reader.seek(0)
    reader.take(3, mark=True)
    reader.known = reader.mark
    reader.take(3)
    for more, position, read in ((0, 4, 3), (1, 8, 2)):
        reader.take(more)
        reader.make_mark()  # before row 6, and before row 7
        reader.take(6)
        reads.clear()
        reader.seek(position)
        rows = reader.take(2 - more)
        assert [row for row, _ in rows] == [4000 + position, 4001 + position][: 2 - more]
        assert sum(reads.values()) == read


def test_rows_that_cannot_be_pickled_are_not_in_marks() -> None:
    class Locks(Views):
        def __iter__(self) -> Iterator[Any]:
            return ((row, threading.Lock()) for row in super().__iter__())

    reader = StreamReader("locks", Locks, seed=0)
    reader.seek(0)
    reader.take(3, mark=True)
    reader.take(3)
    assert not reader.at_end
    reader.make_mark()
    assert reader.mark is not None
    assert reader.mark.rows == 3  # that of before


class Forgetful(Resumable):
    """A stream whose states lack a shuffle buffer."""

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.row = state_dict["row"] + 2


class Hasty(Resumable):
    """A stream whose states lead to its end."""

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.row = 100


class Unsteady(Plain):
    """A stream with other rows each time."""

    def __iter__(self) -> Iterator[tuple[int, float]]:
        start = int.from_bytes(random.SystemRandom().randbytes(4), "little")
        return ((start + row, 0.0) for row in range(STREAMS[self.stream]))


class Shrinking(Plain):
    opened = 0

    def __iter__(self) -> Iterator[tuple[int, float]]:
        Shrinking.opened += 1
        length = 4 if Shrinking.opened > len(STREAMS) else 40
        return ((row, 0.0) for row in range(length))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            Forgetful,
            r"Stateful: stream 0 goes on with another row .* Pass Stateful\(\.\.\., states",
        ),
        (Hasty, r"Stateful: stream 0 goes on with another row .* after 5 rows"),
        (Unsteady, "Stateful: stream 0 has another row 5 than before: it is not the same"),
        (Shrinking, "stream 0 has only 4 rows, and had at least 10: it has changed since"),
    ],
)
def test_a_stream_that_goes_on_elsewhere_is_refused_by_name(make: Any, message: str) -> None:
    every = None if make is Shrinking else 1
    Shrinking.opened = 0

    def loader() -> Loader:
        return Loader(Stateful(make, states_every=every), Batch(30, micro=5))

    first = loader()
    for step in first:
        list(step)
        if step.number == (1 if make is Shrinking else 0):
            break
    second = loader()
    second.load_state_dict(first.state_dict())
    with pytest.raises(DataError, match=message):
        next(iter(second))


def test_an_error_while_rows_are_read_names_the_unit_and_leaves_nothing_out() -> None:
    broken = [True]

    def read(path: str) -> Iterator[int]:
        yield from range(3)
        if path == "b" and broken:
            raise OSError("disk")
        yield from range(3, 6)

    loader = Loader(Shards(["a", "b", "c"], read), Batch(6, micro=2), shuffle=False)
    steps = iter(loader)
    rows = [batch.tolist() for batch in next(steps)]
    with pytest.raises(DataError, match=r"row 3 of Shards: unit 'b' cannot be read: OSError: disk"):
        next(steps)
    broken.clear()  # a generator that has raised looks like one that has ended
    rows += [batch.tolist() for step in loader for batch in step]
    assert sorted(row for batch in rows for row in batch) == sorted([*range(6)] * 3)


class Mute(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


class Clinging(Plain):
    """A stream that cannot be closed, and whose error cannot be shown."""

    def __iter__(self) -> Iterator[tuple[int, float]]:
        return self

    def __next__(self) -> tuple[int, float]:
        raise Mute

    def close(self) -> None:
        raise OSError("close")


def test_an_error_of_a_stream_that_cannot_be_shown_or_closed_names_it() -> None:
    with pytest.raises(DataError, match=r"row 0 of Stateful: stream 0 cannot be read: .*Mute"):
        list(Loader(Stateful(Clinging), Batch(4, micro=2)))


def test_names_of_units_need_not_be_text_of_utf_8() -> None:
    odd = ["a\udce9.txt", "b"]
    loader = Loader(Shards(odd, lambda name: [len(name)] * 2), Batch(4, micro=2))
    assert [sorted(batch.tolist() for batch in step) for step in loader] == [[[1, 1], [6, 6]]]
    assert loader.requirements()["dataset"] != Shards(["a", "b"], list).describe()


def train(kind: str, context: StaticContext) -> str:
    """Train on rows that are uneven at the end, and return the bits of all tensors."""
    model = torch.nn.Sequential(torch.nn.Linear(1, 4), torch.nn.BatchNorm1d(4))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view_as(parameter))
    optimizer = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.01))
    loader = loader_of(kind)
    state = TorchState(model=model, optimizer=optimizer, loader=loader, epoch=0)
    rows = 0
    for step in loader:
        optimizer.zero_grad()
        for ids, *_ in step:
            model(ids[:, None] / 1000).square().mean().backward()
        optimizer.step()
        state.commit()
        rows += step.rows
        (found,) = context.telemetry.data
        assert (found.rows, found.done, found.seen, found.lost) == (0, rows, rows, 0)
    assert rows == sum(LENGTHS if kind == "shards" else STREAMS)
    return "".join(each.numpy().tobytes().hex() for each in model.state_dict().values())


@pytest.mark.parametrize("kind", ["shards", "states"])
def test_parameters_have_the_same_bits_on_any_number_of_ranks(kind: str) -> None:
    found = {size: set(run_ranks(size, lambda c: train(kind, c))) for size in (1, 2, 3)}
    assert len(found[1]) == 1
    assert found == dict.fromkeys(found, found[1])


def test_a_commit_before_ranks_have_agreed_on_a_step_is_refused() -> None:
    loader = Loader(Shards(range(len(LENGTHS)), rows_of), Batch(20, micro=5))
    model = torch.nn.Linear(1, 1)
    hvd.init()
    try:
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        state = TorchState(model=model, optimizer=optimizer, loader=loader)
        for step in loader:
            taken = iter(step)
            for _ in range(len(step)):
                next(taken)
            with pytest.raises(RuntimeError, match=r"commit\(\) was called in a step of the"):
                state.commit()
            break
    finally:
        hvd.shutdown()


def test_what_is_not_known_before_the_end_is_refused() -> None:
    loader = loader_of("shards")
    with pytest.raises(TypeError, match="the number of steps of Shards is not known"):
        len(loader)
    with pytest.raises(OptionError, match="rows of a stream have no indices"):
        loader.rows(0, 0)
    for make, message in (
        (lambda: Loader(Shards(range(3), rows_of), Batch(8, micro=2)), "3 units for 4 micro-b"),
        (lambda: Loader(SOURCES["plain"](), Batch(8, micro=2), drop_last=True), "drop_last=True"),
        (lambda: Loader(SOURCES["plain"](), Batch(8, micro=2), num_workers=2), "num_workers=…"),
        (lambda: Stateful(Plain(0, 6)), r"Stateful\(Plain\): must be a function"),
        (lambda: Stateful(Plain, states_every=0), "a whole number of steps"),
        (lambda: Shards("corpus.txt", open), "must be a sequence of units"),
        (lambda: Shards(["corpus.txt"], None), "read=None"),
    ):
        with pytest.raises(OptionError, match=message):
            make()
    empty = Loader(Shards(range(4), lambda _: ()), Batch(8, micro=2))
    with pytest.raises(DataError, match="Shards: no unit has a row"):
        list(empty)


def test_other_units_are_refused() -> None:
    saved = Loader(Shards(["a", "b"], lambda _: [1]), Batch(2, micro=1)).state_dict()
    other = Loader(Shards(["a", "c"], lambda _: [1]), Batch(2, micro=1))
    with pytest.raises(StateMismatch, match="the units of Shards have changed"):
        other.load_state_dict(saved)


def test_streams_that_are_read_again_are_told() -> None:
    told = []
    loader = Loader(SOURCES["plain"](), Batch(30, micro=5))
    loader._say = told.append  # type: ignore[method-assign]
    next(iter(next(iter(loader))))
    list(loader)
    assert "a dataset has no state_dict" in told[0]
    quiet = loader_of("states")
    quiet._say = told.clear  # type: ignore[method-assign, assignment]
    list(quiet)
    assert told


def test_equal_rows_have_equal_digests() -> None:
    def row() -> dict[str, Any]:
        return {"x": torch.arange(6).view(2, 3), "y": [1, (2.0, None)], "z": np.ones(3), "w": "é"}

    assert row_digest(row()) == row_digest(row())
    for name, value in (
        ("x", torch.arange(6) + 1),
        ("y", [1, 2.0]),
        ("z", np.zeros(3)),
        ("w", "e"),
    ):
        assert row_digest({**row(), name: value}) != row_digest(row())
    assert row_digest(torch.zeros((), dtype=torch.bfloat16)) != row_digest(torch.ones(()))


def _in_itself(kind: str) -> Any:
    outer: Any = {"a": 1} if kind == "dict" else [1]
    inner = (outer, [outer])
    if kind == "dict":
        outer["self"] = inner
    else:
        outer.append(inner if kind == "tuple" else outer)
    return outer


@pytest.mark.parametrize("kind", ["dict", "list", "tuple"])
def test_a_row_that_contains_itself_has_a_digest(kind: str) -> None:
    assert row_digest(_in_itself(kind)) == row_digest(_in_itself(kind))


def test_a_value_that_is_twice_in_a_row_counts_twice() -> None:
    shared = [1, 2]
    assert row_digest([shared, shared]) == row_digest([[1, 2], [1, 2]])
