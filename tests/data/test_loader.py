"""Loaders: the same micro-batches wherever they are computed, and exactly the rest of an epoch."""

from __future__ import annotations

import gc
import math
import multiprocessing
import pickle
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, TensorDataset

from nbelastic.data import Batch, Loader, Shards, Stateful
from nbelastic.data.step import cut
from nbelastic.elastic import ObjectState
from nbelastic.elastic.ranks.context import activate, current
from nbelastic.errors import DataError, OptionError, StateMismatch
from nbelastic.pickling import dumps
from tests.data.worlds import Plain
from tests.support.world import world_of


def loader_of(dataset: Any = range(8), **options: Any) -> Loader:
    return Loader(dataset, Batch(8, micro=2), **options)


# -- steps and epochs ------------------------------------------------------------------------------


@pytest.mark.slow
def test_worker_processes_end_with_the_epoch() -> None:
    loader = Loader(range(45), Batch(24, micro=3), num_workers=1)
    gc.collect()
    before = {*multiprocessing.active_children()}
    gc.disable()
    try:
        for step in loader:
            assert len(list(step)) == len(step)
            assert {*multiprocessing.active_children()} - before
        assert not {*multiprocessing.active_children()} - before
    finally:
        gc.enable()


def test_quotas_are_even_unless_asked_for_and_end_with_their_generation() -> None:
    context = world_of(1, 2)

    def lengths(loader: Loader) -> Iterator[int]:
        for step in loader:
            list(step)
            assert context.share is not None
            context.share.times = (3.0, 1.0)
            loader.balancer.committed()
            yield len(step)

    with activate(context):
        for balance, most in (("even", 4), ("speed", 6)):
            loader = Loader(range(64), Batch(8, micro=1), balance=balance)
            assert [*lengths(loader)] == [4, *[most] * 7]
            assert context.telemetry.share[1:3] == (8 - most, 8)
        context.generation += 1
        loader.balancer.committed()  # with times of the generation before
        assert next(lengths(loader)) == 4


def test_iteration_goes_on_after_the_last_step_and_into_the_next_epoch() -> None:
    loader = Loader(range(20), Batch(8, micro=4))
    first = [(step.epoch, step.number, step.rows) for step in loader]
    assert first == [(0, 0, 8), (0, 1, 8), (0, 2, 4)]
    for step in loader:
        if step.number == 1:
            break
    assert (loader.epoch, loader.step) == (1, 2)
    assert [(step.epoch, step.number) for step in loader] == [(1, 2)]


@pytest.mark.parametrize("epoch", [0, np.int64(2), 2**70, 10**400, -1])
def test_the_epoch_is_that_of_the_state(epoch: Any) -> None:
    state, loader = ObjectState(epoch=epoch), loader_of(seed=2**70)
    loader.follow(state)
    for step in loader:
        assert sorted(torch.cat(list(step)).tolist()) == list(range(8))
    assert loader.epoch == epoch
    with pytest.raises(RuntimeError, match=r"epoch .* is done, and state\.epoch is still"):
        list(loader)
    loader.load_state_dict(loader.state_dict())
    assert list(loader) == []  # after a rollback that is right, and nothing is repeated
    state.epoch = 3
    assert [step.epoch for step in loader] == [3]


def test_steps_that_are_left_early_or_not_at_all_taken_keep_the_order() -> None:
    found = []
    rows = dict(enumerate(range(24)))  # a dict of rows by number is a dataset
    for step in loader_of(rows, shuffle=False):
        if step.number == 0:
            continue
        for batch in step:
            found.append(batch.tolist())
            if step.number == 1:
                break
    assert found == [[8, 9], [16, 17], [18, 19], [20, 21], [22, 23]]


def test_a_step_is_iterated_over_once_within_its_loop_which_ends_with_a_newer_one() -> None:
    last = next(iter(loader_of()))
    assert len(list(last)) == len(last) == 4  # to look at
    loader = loader_of(range(24))
    older = iter(loader)
    step = next(older)
    next(iter(loader))
    for go_on, message in (
        (lambda: list(last), "only once"),
        (lambda: [*map(list, list(loader_of()))], "loop over the loader has gone on from"),
        (lambda: list(step), "a newer loop over the same loader has begun"),
        (lambda: next(older), "a newer loop over the same loader has begun"),
    ):
        with pytest.raises(RuntimeError, match=message):
            go_on()


def test_a_loop_that_is_over_leaves_the_step_of_another_alone() -> None:
    with activate(world_of(0, 1)):
        context = current()
        abandoned: Any = iter(Loader(range(8), Batch(4, micro=2)))
        next(abandoned)
        for _ in Loader(range(8), Batch(4, micro=2)):
            outer = context.share
            for _ in Loader(range(8), Batch(4, micro=2)):
                assert context.share is not outer
            assert context.share is outer
            abandoned.close()
            assert context.share is outer
        assert context.share is None


def test_weights_are_rows_or_what_the_user_says_and_rows_and_steps_are_counted() -> None:
    with activate(context := world_of(0, 1)):
        context.telemetry.total = (5, 0)
        loader = Loader(range(6), Batch(4, micro=2), shuffle=False)
        loader.parts = 2
        for step in loader:
            list(step.weighted(lambda batch: batch.sum()) if step.number == 0 else step)
            assert context.share is not None
            assert context.share.weights == ({0: 1.0, 1: 5.0} if step.number == 0 else {0: 1.0})
    assert (context.telemetry.steps, context.telemetry.samples) == (2, 6)
    assert context.telemetry.total == (5, 2)


# -- the state -------------------------------------------------------------------------------------


def loaded(exact: bool | str = "auto", **saved: Any) -> Loader:
    """Return a loader that has loaded its own state dict with some other values."""
    loader = Loader(range(8), Batch(8, micro=2, exact=exact))  # type: ignore[arg-type]
    loader.load_state_dict({**loader.state_dict(), **saved})
    return loader


def test_other_kernels_are_told_and_the_number_of_threads_is_that_of_the_state() -> None:
    before = torch.get_num_threads()
    try:
        loader = loaded(kernels="torch 0 avx2 00", step=1, threads=before + 1)
        assert torch.get_num_threads() == loader.state_dict()["threads"] == before + 1
    finally:
        torch.set_num_threads(before)
    assert loader.step == 1
    assert "computes other bits" in loader.why_not_exact


def test_a_loader_of_the_kernel_is_as_if_made_in_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = dumps(loader_of())
    monkeypatch.setattr(torch, "get_num_threads", lambda: 61)
    monkeypatch.setattr("nbelastic.data.loader.kernel_fingerprint", lambda: "torch 0 avx2 00")
    saved = pickle.loads(packed).state_dict()
    assert (saved["threads"], saved["kernels"]) == (61, "torch 0 avx2 00")


# -- what can be given -----------------------------------------------------------------------------


class Ending(Dataset):
    """Rows of which one ends an iterator in the place of raising an error."""

    def __len__(self) -> int:
        return 45

    def __getitem__(self, row: int) -> Any:
        return next(iter(())) if row == 30 else row


def read(dataset: Any, **options: Any) -> None:
    for step in loader_of(dataset, **options):
        list(step)


SHARDS = Shards(range(4), lambda unit: ())
REFUSED: dict[type[Exception], list[tuple[Any, str]]] = {
    OptionError: [
        (lambda: Batch(0), "must be a whole number, at least 1"),
        (lambda: Batch(8, micro=True), "must be a whole number"),
        (lambda: Batch(8, micro=3), "must divide the global batch"),
        (lambda: Batch(8, exact=1), "must be True, False or 'auto'"),
        (lambda: Loader(range(8), Batch(8)), "this job has no max_np"),
        (lambda: Loader(range(8), 8), "must be a Batch"),
        (lambda: Loader(range(7), Batch(8, micro=2), drop_last=True), "make no step of 8"),
        (lambda: loader_of(seed=None), "must be a whole number"),
        (lambda: loader_of(balance="fast"), "must be 'even' or 'speed'"),
        (lambda: loader_of(buffers=["*.min_val"]), "must be a dict"),
        (lambda: loader_of(buffers={"x": 3}), "must be a dict of functions by name"),
        (lambda: loader_of(batch_size=3), "leave it out"),
        (lambda: loader_of(in_order=False), r"in_order=…\): the loader"),
        (lambda: loader_of(num_worker=2), "argument 'num_worker'"),
        (lambda: loader_of(prefetch_factor=2), "Loader: prefetch_factor"),
        (lambda: loader_of(steps=0), r"Loader\(steps=.*at least 1"),
        (lambda: loader_of(steps=True), r"Loader\(steps=.*at least 1"),
        # Rows that cannot be chosen.
        *(
            (lambda dataset=each: loader_of(dataset), "must be a map-style dataset, with len")
            for each in (
                Plain(0, 6),
                iter(range(8)),
                pd.DataFrame({"x": [1.0] * 20}),
                DataLoader(TensorDataset(torch.ones(20))),
                "digits.parquet",
                {"x": torch.ones(20)},
                set(range(20)),
            )
        ),
        # Weights of rows.
        (lambda: loader_of(weights=[1.0] * 7), "must be 8 numbers, one for each row; got shape"),
        (lambda: loader_of(weights=[-1.0] + [1.0] * 7), "at least 0"),
        (lambda: loader_of(weights=[math.nan] * 8), "finite"),
        (lambda: loader_of(weights=[0.0] * 8), "not all 0"),
        (lambda: loader_of(weights=[1.0] * 8, shuffle=False), "draws have no order"),
        (lambda: loader_of(SHARDS, weights=[1.0] * 8), "only rows of a map-style dataset"),
        # Streams, whose end is not known.
        (lambda: loader_of(SHARDS, steps=3), "its epoch lasts as long as its streams"),
        (lambda: loader_of(SHARDS, drop_last=True), "drop_last=…"),
        (lambda: loader_of(SHARDS, num_workers=2), "num_workers=…"),
        (lambda: loader_of(Shards(range(3), iter)), "3 units for 4 micro-b"),
        (lambda: Shards("corpus.txt", open), "must be a sequence of units"),
        (lambda: Shards(["corpus.txt"], None), "read=None"),
        (lambda: Stateful(Plain(0, 6)), r"Stateful\(Plain\): must be a function"),
        (lambda: Stateful(Plain, states_every=0), "a whole number of steps"),
    ],
    TypeError: [(lambda: len(loader_of(SHARDS)), "the number of steps of Shards is not known")],
    ValueError: [
        (
            lambda weight=weight: next(next(iter(loader_of())).weighted(lambda _: weight)),
            "weight of a micro-batch is .*; it must be a number",
        )
        for weight in (math.nan, -1.0)
    ],
    DataError: [
        (lambda: read(SHARDS), "Shards: no unit has a row"),
        (lambda: read(Ending(), shuffle=False), "micro-batch 3 of step 3 cannot .* StopIteration"),
        (
            lambda: read(range(8), collate_fn=lambda rows: next(iter(()))),
            "micro-batch 0 of step 0 cannot be fetched: .* StopIteration",
        ),
    ],
    StateMismatch: [
        (lambda: loaded(rows=45), "the loader has rows=8, the state dict rows=45"),
        (lambda: loaded(rows=None), "rows=8, the state dict rows=None"),  # something else's
        (lambda: loaded(micro_batches=8), "micro_batches=4, the state dict micro_batches=8"),
        (lambda: loaded(exact=True, kernels="torch 0 avx2 00"), "computes other bits"),
        (
            lambda: loader_of(Shards(["no UTF-8: \udce9", *"bcd"], list)).load_state_dict(
                loader_of(Shards([*"abcd"], list)).state_dict()
            ),
            "Shards has changed since the state was saved: it was 4 units",
        ),
    ],
}


@pytest.mark.parametrize(
    ("kind", "make", "message"), [(kind, *each) for kind in REFUSED for each in REFUSED[kind]]
)
def test_wrong_values_are_refused(kind: type[Exception], make: Any, message: str) -> None:
    with pytest.raises(kind, match=message):
        make()


def test_without_micro_there_is_one_micro_batch_for_each_of_max_np_ranks() -> None:
    context = world_of(0, 1)
    context.max_np = 4
    with activate(context):
        assert Loader(range(8), Batch(8)).batch == Batch(8, micro=2)
        with pytest.raises(OptionError, match="max_np=4, which does not divide it"):
            Loader(range(8), Batch(6))


# -- micro-batches in parts ------------------------------------------------------------------------


class Pair(NamedTuple):
    x: Any
    y: Any


@given(st.integers(1, 9), st.integers(1, 12))
def test_the_parts_of_a_batch_are_the_batch(rows, parts):
    x, names = torch.rand(rows, 2), [f"row {row}" for row in range(rows)]
    batch = Pair({"x": x, "names": names, "rate": 0.5}, [np.arange(rows), torch.tensor(3)])
    found = list(cut(batch, parts))
    assert len(found) == min(parts, rows)
    pieces = [piece for piece, _ in found]
    assert all(type(piece) is Pair and type(piece.y) is list for piece in pieces)
    assert torch.equal(torch.cat([piece.x["x"] for piece in pieces]), x)
    assert [name for piece in pieces for name in piece.x["names"]] == names
    assert np.concatenate([piece.y[0] for piece in pieces]).tolist() == [*range(rows)]
    assert {(piece.x["rate"], int(piece.y[1])) for piece in pieces} == {(0.5, 3)}
    lengths = [len(piece.x["x"]) for piece in pieces]
    assert max(lengths) - min(lengths) <= 1
    assert [fraction for _, fraction in found] == [length / rows for length in lengths]


def test_a_rank_keeps_its_parts_when_it_goes_back() -> None:
    loader = Loader(range(45), Batch(15, micro=3))
    saved, steps = loader.state_dict(), iter(loader)
    next(iter(next(steps)))
    assert loader.can_make_room
    loader.make_room("cpu")
    loader.load_state_dict(saved)
    assert loader.parts == 2
    assert "in 2 parts" in loader.why_not_exact
    steps.close()
