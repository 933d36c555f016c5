"""One law for all sources: the micro-batches of any world of ranks are those of one rank."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator
from typing import Any

import dask
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data import worlds
from tests.data.worlds import EPOCHS, LENGTHS, ROWS, SOURCES, STREAMED, STREAMS, WEIGHTS, World


@pytest.fixture(scope="module", autouse=True)
def in_this_process() -> Iterator[None]:
    with dask.config.set(scheduler="synchronous"), worlds.fetching():
        yield


@functools.cache
def undisturbed(kind: str) -> dict[Any, Any]:
    world = World.of(kind)
    assert world.train(1)
    return world.seen


def expected(kind: str) -> list[int]:
    """Return the rows of an epoch, in their order in the source."""
    if kind == "shards" or kind in STREAMED:
        lengths = LENGTHS if kind == "shards" else STREAMS
        return [unit * 1000 + row for unit, length in enumerate(lengths) for row in range(length)]
    return [*range(ROWS // 20 * 20 if kind == "in order" else ROWS)]


@pytest.mark.parametrize("kind", sorted({*SOURCES} - {"workers"}))
def test_each_row_is_once_in_each_epoch(kind: str) -> None:
    epochs = []
    for epoch in range(EPOCHS):
        found = [each for key, each in undisturbed(kind).items() if key[0] == epoch and key[2] >= 0]
        epochs.append([row for rows, *_ in found for row in rows])
        if kind == "weights":
            assert len(epochs[-1]) == ROWS
            assert all(WEIGHTS[row] for row in epochs[-1])
        elif kind == "steps":
            whole = undisturbed("tensors")
            assert found == [whole[epoch, step, n] for step in range(3) for n in range(4)]
        else:
            assert sorted(epochs[-1]) == expected(kind)
        if kind in ("parquet", "dask", "tensors"):
            assert all(ys == [row / 2 for row in rows] for rows, ys, *_ in found)
    ordered = kind == "in order" or kind in STREAMED
    assert (epochs[0] == epochs[1]) == ordered


def test_kinds_of_one_source_are_the_same() -> None:
    assert undisturbed("states") == undisturbed("plain") == undisturbed("unmarked")
    assert undisturbed("tensors") == undisturbed("one by one")


GENERATIONS = st.lists(
    st.fixed_dictionaries(
        {
            "size": st.integers(1, 5),
            "survivors": st.integers(0, 5),
            "steps": st.integers(1, 9),
            "commit_every": st.integers(1, 3),
            "slow": st.booleans(),
        }
    ),
    max_size=6,
)


def storm(kind: str, generations: list[dict[str, Any]]) -> dict[Any, Any]:
    world = World.of(kind)
    for generation in generations:
        size, survivors = generation["size"], generation["survivors"]
        random.Random(size).shuffle(world.loaders)  # survivors get other numbers, others are new
        world.loaders = world.loaders[:survivors]
        more = {name: each for name, each in generation.items() if name != "survivors"}
        if world.train(**more):
            return world.seen
    assert world.train(3)
    return world.seen


@pytest.mark.parametrize("kind", sorted({*SOURCES} - {"workers"}))
@given(generations=GENERATIONS)
@settings(max_examples=6, deadline=None)
def test_no_schedule_of_ranks_changes_a_micro_batch(
    kind: str, generations: list[dict[str, Any]]
) -> None:
    assert storm(kind, generations) == undisturbed(kind)


@pytest.mark.slow
def test_workers_of_the_data_loader_change_nothing() -> None:
    first = {"size": 2, "survivors": 0, "steps": 4, "commit_every": 1, "slow": True}
    assert storm("workers", [first]) == undisturbed("noisy")
