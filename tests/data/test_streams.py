"""Sources of unknown length: the same micro-batches for any ranks, and exactly the rest."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import nbelastic.torch as hvd
from nbelastic.data import Batch, Loader, Shards, Stateful
from nbelastic.data.sources.stream_reader import row_digest
from nbelastic.elastic.ranks.context import activate
from nbelastic.errors import DataError
from nbelastic.torch.state.torch_state import TorchState
from tests.data.worlds import (
    LENGTHS,
    STREAMS,
    Plain,
    Resumable,
    World,
    loader_of,
    reads,
    rows_of,
    training,
)
from tests.support.world import StaticContext, run_ranks, world_of


@pytest.mark.parametrize(
    ("kind", "steps", "survive", "rows"),
    [
        # Streams of 29, 17, 0, 40, 33, 12 rows; after 4 steps of 5 rows three are left.
        ("states", 3, False, 3 * (5 + 1) + 2),  # from step 3, with the row after it
        ("states", 4, False, 3 * (5 + 5 + 1)),
        ("iterator", 2, False, 4 * (5 + 1) + 2),
        ("plain", 4, False, 3 * (20 + 5 + 1)),
        ("plain", 4, True, 0),  # survivors go back by a step, and have its rows
    ],
)
def test_no_more_rows_are_read_again_than_needed(
    kind: str, steps: int, survive: bool, rows: int
) -> None:
    world = World.of(kind)
    world.train(2, steps=steps, commit_every=3 if survive else 1)
    world.loaders = world.loaders if survive else []
    reads.clear()
    world.train(2 if survive else 3, steps=1)
    assert sum(reads.values()) == rows


class Forgetful(Resumable):
    """A stream whose states lack a shuffle buffer of some rows."""

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
        (Forgetful, r"stream 0 goes on with another row .* Pass Stateful\(\.\.\., states"),
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


def train(kind: str, context: StaticContext) -> str:
    """Train on rows that are uneven at the end, and return the bits of all tensors."""
    rows = 0
    for state, step in training(loader_of(kind)):
        model, rows = state.model, rows + step.rows
        (found,) = context.telemetry.data
        assert (found.left, found.done, found.seen, found.lost) == (None, rows, rows, 0)
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
    with activate(world_of(0, 1)):
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        state = TorchState(model=model, optimizer=optimizer, loader=loader)
        for step in loader:
            taken = iter(step)
            for _ in range(len(step)):
                next(taken)
            with pytest.raises(RuntimeError, match=r"commit\(\) was called in a step of the"):
                state.commit()
            break


def test_equal_rows_have_equal_digests() -> None:
    def row(**other: Any) -> dict[str, Any]:
        found = {"x": torch.arange(6).view(2, 3), "y": [1, (2.0, None)], "z": np.ones(3), "w": "é"}
        return found | {"shared": [[1, 2], [1, 2]]} | other

    shared = [1, 2]
    assert row_digest(row()) == row_digest(row(shared=[shared, shared]))
    for other in ({"x": torch.arange(6) + 1}, {"y": [1, 2.0]}, {"z": np.zeros(3)}, {"w": "e"}):
        assert row_digest(row(**other)) != row_digest(row())
    assert row_digest(torch.zeros((), dtype=torch.bfloat16)) != row_digest(torch.ones(()))
