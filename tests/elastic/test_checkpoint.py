"""Commits on disk: what is in them, when they are written, and what goes on from them."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path

import pytest
import torch

import nbelastic.torch as hvd
from nbelastic.elastic import ObjectState
from nbelastic.elastic.checkpoint.files import CheckpointFiles
from nbelastic.elastic.checkpoint.manager import CheckpointManager
from nbelastic.elastic.sampler import ShardSampler
from nbelastic.elastic.state import State
from nbelastic.errors import Evicted, Leaving, NbelasticError, OptionError, Stopped
from nbelastic.messages import FRESH
from nbelastic.torch.state.handlers import (
    StateHandler,
    get_handler_registry,
    set_handler_registry,
)
from nbelastic.torch.state.torch_state import TorchState
from tests.elastic.members import begin, files_in, make_member, written
from tests.support.world import run_ranks


def training(seed, samples=48):
    torch.manual_seed(seed)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    sampler = hvd.elastic.ElasticSampler(range(samples))
    return hvd.elastic.TorchState(model, optimizer, sampler=sampler, batch=0, seen=[])


def step(state):
    """Train on a batch of two; ranks see different samples and have equal models."""
    taken = state.sampler.get_indices(state.batch, 2)
    state.optimizer.zero_grad()
    state.model(torch.full((1, 3), float(state.batch))).sum().backward()
    state.optimizer.step()
    state.sampler.record_batch(state.batch, 2)
    state.batch += 1
    return taken


def tensors_of(state):
    momenta = [each["momentum_buffer"] for each in state.optimizer.state.values()]
    return [*state.model.parameters(), *momenta]


def train_a_while(context, url, steps):
    """Train with a checkpoint every other step; return what has been seen, and the tensors."""
    plan = make_member(context, url, every=2)
    state = training(seed=context.rank)
    seen = []
    with CheckpointManager(context, state, 1) as checkpoints:
        begin(context, state, checkpoints, plan)
        for number in range(1, steps + 1):
            seen.append(step(state))
            state.commit()
            written(checkpoints)
            if number == 4:
                tensors = [tensor.detach().clone() for tensor in tensors_of(state)]
    return seen, tensors


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_resumed_job_deals_exactly_the_samples_that_are_left(tmp_path, size):
    before = run_ranks(2, lambda context: train_a_while(context, tmp_path, 5))
    done = {index for seen, _ in before for batch in seen[:4] for index in batch}
    assert len(done) == 16

    def go_on(context):
        plan = make_member(context, tmp_path, run="b", resume=True)
        state = training(seed=100 + context.rank)
        with CheckpointManager(context, state, 1) as checkpoints:
            resized = begin(context, state, checkpoints, plan)
        assert resized == (size != 2 and context.rank == 0)
        assert (context.moves > 0) == (context.rank == 0), "long reading must not look like a stall"
        left = [state.sampler.get_indices(0, 100)]
        return state.batch, [t.detach().clone() for t in tensors_of(state)], left

    after = run_ranks(size, go_on)
    for batch, tensors, _ in after:
        assert batch == 4
        assert all(map(torch.equal, tensors, before[0][1]))
    dealt = [index for _, _, (left,) in after for index in left]
    assert set(dealt) == set(range(48)) - done
    assert len(dealt) - len(set(dealt)) < size, "dealt twice"


def test_every_nth_commit_and_the_last_one_are_written(tmp_path):
    def rank(context):
        plan = make_member(context, tmp_path, every=3)
        state = ObjectState(count=0, sampler=ShardSampler(range(40), shuffle=False))
        listing = []
        with CheckpointManager(context, state, 1) as checkpoints:
            begin(context, state, checkpoints, plan)
            for number in range(8):
                state.count += 1
                state.sampler.record_batch(number, 2)
                state.commit()
                written(checkpoints)
                listing.append(files_in(tmp_path))
            state.count = -1  # not committed: not what a job should go on from
            state.sampler.set_epoch(1)
            checkpoints.finish()
        return listing, context.port

    (listing, notes), (_, nothing) = run_ranks(2, rank)
    generation = listing[2][0][3:9]
    name = f"01-{generation}-{{:010d}}.safetensors".format
    assert [len(each) for each in listing] == [0, 0, 1, 1, 1, 2, 2, 2]
    assert files_in(tmp_path) == [name(6), name(8)]
    assert notes == [f"commit 3 is in {tmp_path}/run-0001-a/{name(3)}"]
    assert nothing == []

    def go_on(context):
        plan = make_member(context, tmp_path, run="b", resume=True)
        state = ObjectState(count=0, sampler=ShardSampler(range(40), shuffle=False))
        with CheckpointManager(context, state, 1) as checkpoints:
            begin(context, state, checkpoints, plan)
        return state.count, state.sampler.epoch, state.sampler.remaining_indices

    assert run_ranks(2, go_on) == [(8, 0, list(range(32, 40)))] * 2


class Gate:
    """Holds the writing of a file."""

    def __init__(self, monkeypatch):
        self.entered, self.open = threading.Event(), threading.Event()
        self.versions = []
        inner = CheckpointFiles.write

        def write(files, header, tensors, moving):
            self.versions.append(header.version)
            self.entered.set()
            while not self.open.wait(0.01):
                moving()
            return inner(files, header, tensors, moving)

        monkeypatch.setattr(CheckpointFiles, "write", write)


def test_checkpoints_are_left_out_while_one_is_written(tmp_path, monkeypatch):
    gate = Gate(monkeypatch)

    def rank(context):
        plan = make_member(context, tmp_path)
        state = hvd.elastic.TorchState(count=torch.zeros(3))
        with CheckpointManager(context, state, 1) as checkpoints:
            begin(context, state, checkpoints, plan)
            for _ in range(5):
                state.count += 1
                state.commit()
            gate.open.set()
            written(checkpoints)
            assert gate.versions == [1]
            ((_, _, _, _, path),) = CheckpointFiles(str(tmp_path), "a").candidates(1, others=False)
            checkpoints.finish()
            assert gate.versions == [1, 5]
        return path

    (path,) = run_ranks(1, rank)

    def go_on(context):
        plan = make_member(context, tmp_path, run="b", resume=True)
        Path(path).with_name("01-999999-0000000001.safetensors").write_bytes(
            Path(path).read_bytes()
        )
        state = hvd.elastic.TorchState(count=None)
        with CheckpointManager(context, state, 1) as checkpoints:
            begin(context, state, checkpoints, plan)
        return state.count

    assert torch.equal(run_ranks(1, go_on)[0], torch.ones(3)), "later steps got into an earlier one"


@pytest.mark.parametrize("order", [Evicted, Stopped])
def test_an_order_to_end_leaves_neither_a_thread_nor_a_torn_file(tmp_path, monkeypatch, order):
    gate = Gate(monkeypatch)

    def rank(context):
        plan = make_member(context, tmp_path)
        state = ObjectState(count=0)
        with CheckpointManager(context, state, 1) as checkpoints:
            begin(context, state, checkpoints, plan)
            state.commit()
            gate.entered.wait()
            raise order("by the test")

    with pytest.raises(order):
        run_ranks(1, rank)
    assert files_in(tmp_path) == []
    assert not [t for t in threading.enumerate() if t.name == "nbelastic-checkpoint"]


def test_a_job_that_stops_at_a_commit_leaves_that_commit_on_disk(tmp_path):
    def rank(context):
        plan = make_member(context, tmp_path, every=1000)
        state = ObjectState(count=0)
        with CheckpointManager(context, state, 1) as checkpoints:
            begin(context, state, checkpoints, plan)
            state.count = 5
            state.save()
            context.committed()
            checkpoints.left()
            state.count = 6  # not committed
            raise Stopped("at a commit")

    with pytest.raises(Stopped):
        run_ranks(1, rank)
    assert [Path(name).stem[-10:] for name in files_in(tmp_path)] == ["0000000001"]


@pytest.mark.parametrize("others", [True, False])
def test_the_last_rank_with_the_state_writes_it_before_it_leaves(tmp_path, others):
    def rank(context):
        plan = make_member(context, tmp_path, every=1000)
        state = ObjectState(count=0)
        with contextlib.suppress(Leaving), CheckpointManager(context, state, 1) as checkpoints:
            begin(context, state, checkpoints, plan)
            state.count = 5
            state.save()
            context.committed()
            checkpoints.left()
            context.time_to_save = 0.0 if others else 30.0
            raise Leaving("its worker was asked to leave")
        return list(context.port)

    (notes,) = run_ranks(1, rank)
    names = [Path(name).stem[-10:] for name in files_in(tmp_path)]
    assert names == ([] if others else ["0000000001"])
    assert ("commit 1 is written: no other rank had the state" in notes) is not others
    assert not [t for t in threading.enumerate() if t.name == "nbelastic-checkpoint"]


def test_a_rank_that_leaves_has_no_longer_than_it_has_to_write(tmp_path, monkeypatch):
    Gate(monkeypatch)

    def rank(context):
        plan = make_member(context, tmp_path, every=1000)
        state = ObjectState(count=0)
        with contextlib.suppress(Leaving), CheckpointManager(context, state, 1) as checkpoints:
            begin(context, state, checkpoints, plan)
            state.save()
            context.committed()
            context.time_to_save = 0.05
            raise Leaving("its worker was asked to leave")
        return list(context.port)

    (notes,) = run_ranks(1, rank)
    assert "the last one was given up after 0.05 s" in notes
    assert files_in(tmp_path) == []


def test_what_goes_wrong_is_told_once_and_training_goes_on(tmp_path):
    place = tmp_path / "place"
    place.touch()  # a file where a directory should be

    def rank(context):
        plan = make_member(context, place)
        state = ObjectState(count=0)
        with CheckpointManager(context, state, 1) as checkpoints:
            begin(context, state, checkpoints, plan)
            for number in range(6):
                if number == 3:
                    place.unlink()
                state.commit()
                written(checkpoints)
        return context.port

    (notes,) = run_ranks(1, rank)
    assert len([note for note in notes if "cannot be written" in note]) == 1
    assert notes[-1].startswith(f"commit 4 is in {place}")


def test_a_state_that_cannot_be_copied_is_told_and_training_goes_on(tmp_path):
    class Lock:
        def __deepcopy__(self, memo):
            return self

        def __reduce__(self):
            raise TypeError("a lock cannot be pickled")

    def rank(context):
        plan = make_member(context, tmp_path)
        state = ObjectState(lock=Lock())
        with CheckpointManager(context, state, 1) as checkpoints:
            begin(context, state, checkpoints, plan)
            for _ in range(3):
                state.commit()
            checkpoints.finish()
        return context.port

    (notes,) = run_ranks(1, rank)
    (note,) = notes
    assert note.startswith("the state cannot be copied: state.lock (a Lock) cannot be sent to")
    assert "a lock cannot be pickled" in note


def resumed(url, state_of, *, resume=True):
    """Begin a job of one rank that is to go on from `url`; return its notes."""

    def rank(context):
        plan = make_member(context, url, run="z", resume=resume)
        state = state_of()
        with CheckpointManager(context, state, 1) as checkpoints:
            begin(context, state, checkpoints, plan)
        return context.port, state

    return run_ranks(1, rank)[0]


def test_resume_without_a_checkpoint_starts_from_the_beginning(tmp_path):
    notes, state = resumed(tmp_path, lambda: ObjectState(count=7))
    assert state.count == 7
    assert notes == [f"nothing to resume from in {tmp_path}: it starts from the beginning"]


def test_an_unreadable_place_fails_only_a_job_that_resumes(tmp_path):
    place = tmp_path / "file"
    place.touch()
    nowhere = f"{place}/within"
    with pytest.raises(NbelasticError, match="cannot be read"):
        resumed(nowhere, lambda: ObjectState(count=7))
    notes, state = resumed(nowhere, lambda: ObjectState(count=7), resume=False)
    assert state.count == 7
    assert "cannot be read" in notes[0]


def test_a_checkpoint_that_does_not_fit_names_the_file(tmp_path):
    run_ranks(2, lambda context: train_a_while(context, tmp_path, 4))
    with pytest.raises(NbelasticError, match=r"\.safetensors does not fit the state"):
        resumed(tmp_path, lambda: _other(torch.nn.Sequential(torch.nn.Linear(3, 1))))
    with pytest.raises(NbelasticError, match=r"samplers of \[48\] samples; now they have \[50\]"):
        resumed(tmp_path, lambda: training(0, samples=50))


def _other(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    sampler = hvd.elastic.ElasticSampler(range(48))
    return hvd.elastic.TorchState(model, optimizer, sampler=sampler, batch=0, seen=[])


def test_in_a_later_loop_all_ranks_receive_what_the_source_has_loaded(tmp_path):
    def first(context):
        plan = make_member(context, tmp_path)
        for loop in (1, 2):
            state = ObjectState(loop=loop, count=0)
            with CheckpointManager(context, state, loop) as checkpoints:
                begin(context, state, checkpoints, plan)
                state.count = 10 * loop
                state.commit()
                checkpoints.finish()
        return True

    def again(context):
        counts = []
        for loop in (1, 2):
            version = FRESH if loop == 1 else 3  # all have the same commit after the first loop
            plan = make_member(context, tmp_path, run="b", resume=True, version=version)
            state = ObjectState(loop=0, count=0)
            with CheckpointManager(context, state, loop) as checkpoints:
                begin(context, state, checkpoints, plan)
                counts.append((state.loop, state.count))
                state.commit()
                checkpoints.finish()
        return counts

    assert all(run_ranks(2, first))
    assert run_ranks(2, again) == [[(1, 10), (2, 20)]] * 2


def test_a_state_that_cannot_be_written_is_refused(tmp_path):
    class OfTheirOwn(State):
        pass

    def rank(context):
        make_member(context, tmp_path)
        with CheckpointManager(context, OfTheirOwn(), 1):
            pass

    with pytest.raises(OptionError, match="OfTheirOwn cannot be written to disk"):
        run_ranks(1, rank)


def test_a_state_with_a_handler_of_the_users_is_refused(tmp_path):
    class Handler(StateHandler):
        pass

    before = get_handler_registry()
    set_handler_registry([(complex, Handler)])
    try:
        state = TorchState(other=1, place=1j)
    finally:
        set_handler_registry(before)

    def rank(context):
        make_member(context, tmp_path)
        with CheckpointManager(context, state, 1):
            pass

    with pytest.raises(OptionError, match=r"keep state\.place, and"):
        run_ranks(1, rank)
