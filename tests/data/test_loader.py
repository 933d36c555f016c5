"""Loaders: the same micro-batches wherever they are computed, and exactly the rest of an epoch."""

from __future__ import annotations

import gc
import math
import multiprocessing
import pickle
import random
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from nbelastic.collectives import SoloCommunicator
from nbelastic.data import Arrow, Batch, Loader
from nbelastic.data.step import cut
from nbelastic.elastic.ranks.context import activate, current
from nbelastic.errors import DataError, OptionError, StateMismatch
from nbelastic.pickling import dumps
from tests.support.world import StaticContext

if TYPE_CHECKING:
    from collections.abc import Iterator


class Noisy(Dataset):
    """Rows to which a dataset adds noise from each generator, as augmentation does."""

    def __len__(self) -> int:
        return 45

    def __getitem__(self, row: int) -> tuple[int, torch.Tensor]:
        noise = [random.random(), float(np.random.random()), float(torch.rand(()))]
        return row, torch.tensor(noise, dtype=torch.float64)


class Longer(Noisy):
    def __len__(self) -> int:
        return 320


class Stream(IterableDataset):
    def __len__(self) -> int:
        return 8

    def __iter__(self) -> Iterator[int]:
        return iter(range(8))


def rank_of(rank: int, size: int) -> StaticContext:
    context = StaticContext(SoloCommunicator(generation=1))
    context.rank, context.size = rank, size
    return context


def batches_of(size: int, **options: Any) -> dict[tuple[int, int], tuple[Any, float]]:
    """Return each micro-batch of an epoch, by step and number, with a number drawn beside it."""
    found = {}
    for rank in range(size):
        with activate(rank_of(rank, size)):
            loader = Loader(Noisy(), Batch(12, micro=3), seed=5, **options)
            for step in loader:
                for number, (rows, noise) in zip(step.numbers, step, strict=True):
                    assert (step.number, number) not in found
                    drawn = float(torch.rand(())) + random.random() + float(np.random.random())
                    assert rows.tolist() == loader.rows(step.number, number)
                    found[step.number, number] = ([rows.tolist(), noise.tolist()], drawn)
    return found


def test_micro_batches_and_random_numbers_do_not_depend_on_the_number_of_ranks() -> None:
    alone = batches_of(1)
    assert sorted(row for (rows, _), _ in alone.values() for row in rows) == list(range(45))
    for size in (2, 3, 4, 5):
        assert batches_of(size) == alone


def test_numbers_drawn_in_a_micro_batch_do_not_depend_on_the_number_of_ranks() -> None:
    def drawn(size: int) -> dict[tuple[int, int, int], float]:
        found = {}
        for rank in range(size):
            with activate(rank_of(rank, size)):
                loader = Loader(TensorDataset(torch.arange(20)), Batch(8, micro=2))
                for _ in range(2):
                    for step in loader:
                        for number, _ in zip(step.numbers, step, strict=True):
                            numbers = [float(torch.rand(())), random.random(), np.random.random()]
                            found[step.epoch, step.number, number] = sum(numbers)
        return found

    alone = drawn(1)
    assert len(set(alone.values())) == len(alone) == 20
    assert drawn(3) == alone


@pytest.mark.slow
def test_workers_of_the_data_loader_change_nothing() -> None:
    assert batches_of(1, num_workers=2, persistent_workers=True) == batches_of(1)


@pytest.mark.slow
def test_worker_processes_end_with_the_epoch() -> None:
    loader = Loader(Noisy(), Batch(24, micro=3), num_workers=1)
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


def shares_in_turn(rank: int, data: Any, **options: Any) -> dict[tuple[int, int], Any]:
    """Return the batches of a rank whose block changes twice in an epoch, by step and number."""
    times = {1: (1.0, 1.0, 1.0, 3.0), 5: (6.0, 1.0, 1.0, 1.0)}
    found = {}
    with activate(rank_of(rank, 4)):
        loader = Loader(data, Batch(32, micro=2), seed=5, balance="speed", **options)
        for step in loader:
            quotas = (4, 4, 4, 4) if step.number < 3 else (5, 5, 5, 1)
            quotas = quotas if step.number < 7 else (1, 5, 5, 5)
            assert len(loader.block) == quotas[rank]
            for number, batch in zip(step.numbers, step, strict=True):
                found[step.number, number] = batch
                assert loader.block.start <= number < loader.block.stop
            share = current().share
            assert share is not None
            share.times = times.get(step.number, ())  # as the reduction brings them
            loader.committed()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_micro_batches_that_change_ranks_are_the_same(workers: int) -> None:
    options: dict[str, Any] = {"num_workers": workers} | ({"prefetch_factor": 9} if workers else {})
    found: dict[tuple[int, int], Any] = {}
    for rank in range(4):
        for key, (rows, noise) in shares_in_turn(rank, Longer(), **options).items():
            assert key not in found
            found[key] = (rows.tolist(), noise.tolist())
    with activate(rank_of(0, 1)):
        for step in Loader(Longer(), Batch(32, micro=2), seed=5):
            for number, (rows, noise) in zip(step.numbers, step, strict=True):
                assert found.pop((step.number, number)) == (rows.tolist(), noise.tolist())
    assert not found


def test_windows_that_change_ranks_are_the_same() -> None:
    pa = pytest.importorskip("pyarrow")
    table = pa.table({"id": np.arange(333)})
    source = Arrow(table.to_batches(max_chunksize=7), ["id"], shuffle_rows=64)
    found: dict[tuple[int, int], Any] = {}
    for rank in range(4):
        found |= shares_in_turn(rank, source)
    with activate(rank_of(0, 1)):
        for step in Loader(source, Batch(32, micro=2), seed=5):
            for number, (rows,) in zip(step.numbers, step, strict=True):
                assert found.pop((step.number, number))[0].tolist() == rows.tolist()
    assert not found


def test_times_of_another_generation_change_nothing() -> None:
    context = rank_of(0, 2)
    with activate(context):
        loader = Loader(range(64), Batch(8, micro=1), balance="speed")
        for step in loader:
            assert len(step) == 4
            share = context.share
            assert share is not None
            share.times = (1.0, 3.0)
            break
        context.generation += 1
        loader.committed()
        assert [len(step) for step in loader] == [4] * 7


def test_quotas_are_even_unless_asked_for() -> None:
    context = rank_of(1, 2)
    with activate(context):
        for balance, most in (("even", 4), ("speed", 6)):
            lengths = []
            loader = Loader(range(64), Batch(8, micro=1), balance=balance)
            for step in loader:
                list(step)
                assert context.share is not None
                context.share.times = (3.0, 1.0)
                loader.committed()
                lengths.append(len(step))
            assert lengths == [4, 4, *[most] * 6]
            assert context.telemetry.share[1:3] == (8 - most, 8)


def test_tensors_are_taken_at_once_as_one_by_one() -> None:
    data = TensorDataset(torch.arange(20), torch.randn(20, 3))
    sliced = Loader(data, Batch(8, micro=4))
    single = Loader(data, Batch(8, micro=4), collate_fn=torch.utils.data.default_collate)
    for one, other in zip(sliced, single, strict=True):
        for (a, b), (c, d) in zip(one, other, strict=True):
            assert torch.equal(a, c)
            assert torch.equal(b, d)


def test_iteration_goes_on_after_the_last_step_and_into_the_next_epoch() -> None:
    loader = Loader(range(20), Batch(8, micro=4))
    first = [(step.epoch, step.number, step.rows) for step in loader]
    assert first == [(0, 0, 8), (0, 1, 8), (0, 2, 4)]
    for step in loader:
        if step.number == 1:
            break
    assert (loader.epoch, loader.step) == (1, 2)
    assert [(step.epoch, step.number) for step in loader] == [(1, 2)]


def test_the_epoch_is_that_of_the_state() -> None:
    class Holder:
        epoch = 0

    state, loader = Holder(), Loader(range(8), Batch(8, micro=4))
    loader.follow(state)
    assert [step.epoch for step in loader] == [0]
    with pytest.raises(RuntimeError, match=r"epoch 0 is done, and state\.epoch is still 0"):
        list(loader)
    loader.load_state_dict(loader.state_dict())
    assert list(loader) == []  # after a rollback that is right, and nothing is repeated
    state.epoch = 3
    assert [step.epoch for step in loader] == [3]


@pytest.mark.parametrize("epoch", [np.int64(2), 2**70, 10**400, -1])
def test_the_epoch_of_a_state_is_any_whole_number(epoch: Any) -> None:
    class Holder:
        pass

    state, loader = Holder(), Loader(range(8), Batch(8, micro=4), seed=2**70)
    state.epoch = epoch  # type: ignore[attr-defined]
    loader.follow(state)
    for step in loader:
        assert sorted(torch.cat(list(step)).tolist()) == list(range(8))
    assert loader.epoch == epoch
    loader.load_state_dict(loader.state_dict())
    assert list(loader) == []


@pytest.mark.slow
def test_a_state_dict_goes_on_at_another_number_of_ranks_and_workers() -> None:
    with activate(rank_of(0, 1)):
        alone = Loader(range(45), Batch(12, micro=3), seed=4)
        steps = [[batch.tolist() for batch in step] for step in alone]
    with activate(rank_of(0, 3)):
        loader = Loader(range(45), Batch(12, micro=3), seed=4)
        for step in loader:
            list(step)
            if step.number == 1:
                break
        saved = loader.state_dict()
    rest = []
    for rank in range(2):
        with activate(rank_of(rank, 2)):
            other = Loader(range(45), Batch(12, micro=3), seed=99, num_workers=rank)
            other.load_state_dict(saved)
            rest.append([[batch.tolist() for batch in step] for step in other])
    assert [a + b for a, b in zip(*rest, strict=True)] == steps[2:]


@pytest.mark.parametrize("data", [range(46), range(44)])
def test_a_state_dict_of_other_data_is_refused(data: range) -> None:
    saved = Loader(range(45), Batch(12, micro=3)).state_dict()
    loader = Loader(data, Batch(12, micro=3))
    with pytest.raises(StateMismatch, match=f"rows={len(data)}, the state dict rows=45"):
        loader.load_state_dict(saved)
    with pytest.raises(StateMismatch, match="micro_batches=4, the state dict micro_batches=8"):
        Loader(range(8), Batch(8, micro=2)).load_state_dict(
            Loader(range(8), Batch(8, micro=1)).state_dict()
        )


def test_a_state_dict_of_something_else_is_refused() -> None:
    with pytest.raises(StateMismatch, match="the loader has rows=8, the state dict rows=None"):
        Loader(range(8), Batch(8, micro=2)).load_state_dict({"0.weight": torch.ones(1)})


def test_other_kernels_are_refused_or_told_once() -> None:
    strict = Loader(range(8), Batch(8, micro=2, exact=True))
    with pytest.raises(StateMismatch, match="computes other bits"):
        strict.load_state_dict({**strict.state_dict(), "kernels": "torch 0 avx2 00"})
    lenient = Loader(range(8), Batch(8, micro=2))
    lenient.load_state_dict({**lenient.state_dict(), "kernels": "torch 0 avx2 00", "step": 1})
    assert lenient.step == 1
    assert not lenient.exact
    assert "computes other bits" in lenient.why_not_exact


def test_the_number_of_threads_is_that_of_the_state() -> None:
    before = torch.get_num_threads()
    try:
        loader = Loader(range(8), Batch(8, micro=2))
        loader.load_state_dict({**loader.state_dict(), "threads": before + 1})
        assert torch.get_num_threads() == before + 1
        assert loader.state_dict()["threads"] == before + 1
    finally:
        torch.set_num_threads(before)


def test_a_loader_of_the_kernel_is_as_if_made_in_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = dumps(Loader(range(8), Batch(8, micro=2)))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 61)
    monkeypatch.setattr("nbelastic.data.loader.kernel_fingerprint", lambda: "torch 0 avx2 00")
    saved = pickle.loads(packed).state_dict()
    assert (saved["threads"], saved["kernels"]) == (61, "torch 0 avx2 00")


def test_steps_that_are_left_early_or_not_at_all_taken_keep_the_order() -> None:
    loader = Loader(range(24), Batch(8, micro=2), shuffle=False)
    found = []
    for step in loader:
        if step.number == 0:
            continue
        for batch in step:
            found.append(batch.tolist())
            if step.number == 1:
                break
    assert found == [[8, 9], [16, 17], [18, 19], [20, 21], [22, 23]]


class Ending(Noisy):
    """Rows of which one ends an iterator in the place of raising an error."""

    def __getitem__(self, row: int) -> Any:
        return next(iter(())) if row == 30 else row


def end(rows: list[Any]) -> Any:
    return next(iter(()))


@pytest.mark.parametrize("options", [{"dataset": Ending()}, {"collate_fn": end}])
def test_a_dataset_that_raises_stop_iteration_is_an_error(options: dict[str, Any]) -> None:
    loader = Loader(**{"dataset": Noisy(), "batch": Batch(12, micro=3), "shuffle": False} | options)
    place = "2 of step 2" if "dataset" in options else "0 of step 0"
    with pytest.raises(DataError, match=f"micro-batch {place} cannot be fetched: .* StopIteration"):
        _ = [list(step) for step in loader]


def test_a_step_that_the_loop_has_left_has_no_micro_batches() -> None:
    first, *_ = list(Loader(range(24), Batch(8, micro=2)))
    with pytest.raises(RuntimeError, match="the loop over the loader has gone on from this step"):
        list(first)
    assert len(list(next(iter(Loader(range(24), Batch(8, micro=2)))))) == 4  # to look at


@pytest.mark.parametrize("weight", [None, "many", 10**400, torch.ones(2), math.nan])
def test_a_weight_that_is_no_number_is_refused(weight: Any) -> None:
    steps = iter(Loader(range(8), Batch(8, micro=2)))
    micro_batches = next(steps).weighted(lambda _: weight)
    with pytest.raises(ValueError, match=r"weight of a micro-batch is .*; it must be a number"):
        next(micro_batches)


def in_thread(call: Any) -> Any:
    with ThreadPoolExecutor(1, "prefetcher") as pool:
        return pool.submit(call).result()


def test_a_thread_acts_for_the_only_rank_of_its_process() -> None:
    with activate(rank_of(1, 2)):
        steps = iter(Loader(range(8), Batch(8, micro=2)))
        assert in_thread(lambda: next(steps)).numbers == (2, 3)


def test_a_loop_ends_when_a_newer_one_begins() -> None:
    loader = Loader(range(24), Batch(8, micro=2))
    first = iter(loader)
    step = next(first)
    next(iter(loader))
    for go_on in (lambda: list(step), lambda: next(first)):
        with pytest.raises(RuntimeError, match="a newer loop over the same loader has begun"):
            go_on()


def test_a_loop_that_is_over_leaves_the_step_of_another_alone() -> None:
    with activate(rank_of(0, 1)):
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


def test_numbers_drawn_after_the_micro_batches_are_those_of_all_ranks() -> None:
    def drawn(rank: int, size: int) -> list[float]:
        found = []
        with activate(rank_of(rank, size)):
            for step in Loader(range(20), Batch(8, micro=2)):
                for _ in step:
                    torch.rand(3)
                found.append(float(torch.rand(())) + random.random() + np.random.random())
        return found

    assert len(set(drawn(0, 1))) == 3
    assert drawn(0, 3) == drawn(1, 3) == drawn(0, 1)


def test_a_step_is_iterated_over_once() -> None:
    for step in Loader(range(4), Batch(4, micro=2)):
        assert len(step) == 2
        list(step)
        with pytest.raises(RuntimeError, match="only once"):
            list(step)


def test_weights_are_rows_or_what_the_user_says() -> None:
    with activate(rank_of(0, 1)):
        for step in Loader(range(6), Batch(4, micro=2), shuffle=False):
            list(step.weighted(lambda batch: batch.sum()) if step.number == 0 else step)
            share = current().share
            assert share is not None
            if step.number == 0:
                assert share.weights == {0: 1.0, 1: 5.0}
            else:
                assert share.weights == {0: 1.0}
        assert current().share is None
        for step in Loader(range(6), Batch(4, micro=2)):
            with pytest.raises(ValueError, match="at least 0"):
                list(step.weighted(lambda _: -1.0))


def test_rows_and_steps_are_counted() -> None:
    context = rank_of(1, 3)
    context.telemetry.total = (5, 0)
    with activate(context):
        for step in Loader(range(16), Batch(8, micro=2)):
            list(step)
    assert (context.telemetry.steps, context.telemetry.samples) == (2, 4)
    assert context.telemetry.total == (5, 2)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Batch(0), "must be a whole number, at least 1"),
        (lambda: Batch(8, micro=True), "must be a whole number"),
        (lambda: Batch(8, micro=3), "must divide the global batch"),
        (lambda: Batch(8, exact="yes"), "must be True, False or 'auto'"),
        (lambda: Loader(range(8), Batch(8)), "this job has no max_np"),
        (lambda: Batch(8, exact=1), "must be True, False or 'auto'"),
        (lambda: Loader(range(8), 8), "must be a Batch"),
        (lambda: Loader(range(8), Batch(8, micro=2), seed=None), "must be a whole number"),
        (lambda: Loader(range(8), Batch(8, micro=2), balance="fast"), "must be 'even' or 'speed'"),
        (lambda: Loader(Stream(), Batch(8, micro=2)), "an IterableDataset has no rows"),
        (lambda: Loader(iter(range(8)), Batch(8, micro=2)), "has no length"),
        (lambda: Loader(range(8), Batch(8, micro=2), batch_size=3), "leave it out"),
        (lambda: Loader(range(8), Batch(8, micro=2), in_order=False), r"in_order=…\): the loader"),
        (lambda: Loader(range(8), Batch(8, micro=2), num_worker=2), "argument 'num_worker'"),
        (lambda: Loader(range(8), Batch(8, micro=2), prefetch_factor=2), "Loader: prefetch_factor"),
        (lambda: Loader(range(8), Batch(8, micro=2), num_workers="2"), "Loader: '<' not supported"),
        (lambda: Loader(range(8), Batch(8, micro=2), buffers=["*.min_val"]), "must be a dict"),
        (lambda: Loader(range(8), Batch(8, micro=2), balance=np.ones(2)), "must be 'even' or"),
        (lambda: Loader(range(8), Batch(8, micro=2), seed=np.ones(2)), "must be a whole number"),
        (lambda: Loader(range(8), Batch(8, micro=2), seed=torch.tensor(1.5)), "a whole number"),
        (lambda: Batch(8, exact=np.ones(2)), "must be True, False or 'auto'"),
        (lambda: Loader(range(7), Batch(8, micro=2), drop_last=True), "make no step of 8"),
    ],
)
def test_wrong_values_are_refused(make: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        make()


def test_without_micro_there_is_one_micro_batch_for_each_of_max_np_ranks() -> None:
    context = rank_of(0, 1)
    context.max_np = 4
    with activate(context):
        assert Loader(range(8), Batch(8)).batch == Batch(8, micro=2)
        with pytest.raises(OptionError, match="does not divide by max_np=4; pass micro="):
            Loader(range(8), Batch(6))


def _wrong_datasets() -> dict[str, tuple[Any, str]]:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"x": [1.0] * 20})
    return {
        "frame": (frame, "columns and no rows by number"),
        "series": (frame["x"], "columns and no rows by number"),
        "loader": (
            torch.utils.data.DataLoader(TensorDataset(torch.ones(20))),
            "the dataset itself",
        ),
        "path": ("digits.parquet", "Parquet"),
        "tensors": ({"x": torch.ones(20)}, "TensorDataset"),
        "set": (set(range(20)), "cannot be chosen by number"),
    }


@pytest.mark.parametrize("name", ["frame", "series", "loader", "path", "tensors", "set"])
def test_what_is_no_dataset_is_named_with_what_to_write(name: str) -> None:
    dataset, message = _wrong_datasets()[name]
    with pytest.raises(OptionError, match=message):
        Loader(dataset, Batch(4, micro=2))


def test_a_dict_of_rows_by_number_is_a_dataset() -> None:
    rows = {number: torch.ones(1) for number in range(8)}
    assert len(list(Loader(rows, Batch(4, micro=2)))) == 2


class Pair(NamedTuple):
    x: Any
    y: Any


@given(st.integers(1, 9), st.integers(1, 12))
def test_the_parts_of_a_batch_are_the_batch(rows, parts):
    x, names = torch.rand(rows, 2), [f"row {row}" for row in range(rows)]
    batch = Pair({"x": x, "names": names, "rate": 0.5}, [np.arange(rows), torch.tensor(3)])
    found = list(cut(batch, parts))
    assert len(found) == min(parts, rows)
    assert sum(fraction for _, fraction in found) == pytest.approx(1)
    pieces = [piece for piece, _ in found]
    assert all(type(piece) is Pair and type(piece.y) is list for piece in pieces)
    assert torch.equal(torch.cat([piece.x["x"] for piece in pieces]), x)
    assert [name for piece in pieces for name in piece.x["names"]] == names
    assert np.concatenate([piece.y[0] for piece in pieces]).tolist() == [*range(rows)]
    assert {(piece.x["rate"], int(piece.y[1])) for piece in pieces} == {(0.5, 3)}
    lengths = {len(piece.x["x"]) for piece in pieces}
    assert max(lengths) - min(lengths) <= 1
    assert [fraction for _, fraction in found] == [len(p.x["x"]) / rows for p in pieces]


def test_a_newcomer_begins_with_the_parts_of_a_device_that_ran_out_of_memory():
    loader = Loader(Noisy(), Batch(15, micro=3))
    step = next(steps := iter(loader))
    next(iter(step))
    assert loader.can_make_room
    loader.make_room()
    newcomer, other = (Loader(Noisy(), Batch(15, micro=3)) for _ in range(2))
    other.device = "a larger one"
    for each in (newcomer, other):
        each.load_state_dict(loader.state_dict())
    assert (newcomer.parts, other.parts) == (2, 1)
    assert "needs 2 parts" in newcomer.why_not_exact
    assert other.parts_by_device == {"cpu": 2}
    loader.load_state_dict(other.state_dict())
    assert loader.parts == 2, "a restore keeps it"
    steps.close()
