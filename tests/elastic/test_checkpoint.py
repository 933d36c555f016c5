"""Commits on disk: what is in them, when they are written, and what goes on from them."""

import contextlib
import threading
from pathlib import Path

import pytest
import torch

import nbelastic.torch as hvd
from nbelastic.elastic import ObjectState, load_checkpoint
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
from tests.elastic.members import (
    begin,
    files_in,
    job,
    keeping,
    make_member,
    resumed,
    written,
)
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
    state = training(seed=context.rank)
    seen = []
    with keeping(context, state, url, every=2) as checkpoints:
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
        state = ObjectState(count=0, sampler=ShardSampler(range(40), shuffle=False))
        listing = []
        with keeping(context, state, tmp_path, every=3) as checkpoints:
            for number in range(8):
                state.count += 1
                state.sampler.record_batch(number, 2)
                state.commit()
                written(checkpoints)
                listing.append(files_in(tmp_path))
            state.count = -1  # not committed: not what a job should go on from
            state.sampler.set_epoch(1)
            checkpoints.finish()
        return listing, context.notes

    (listing, notes), (_, nothing) = run_ranks(2, rank)
    generation = listing[2][0][3:9]
    name = f"01-{generation}-{{:010d}}.safetensors".format
    assert [len(each) for each in listing] == [0, 0, 1, 1, 1, 2, 2, 2]
    assert files_in(tmp_path) == [name(6), name(8)]
    assert notes == [f"commit 3 is in {tmp_path}/run-0001-a/{name(3)}"]
    assert nothing == []
    assert load_checkpoint(tmp_path) == {"count": 8, "sampler": {"epoch": 0, "processed_num": 32}}


def test_a_checkpoint_has_what_all_ranks_have_done(tmp_path):
    def rank(context):
        state = ObjectState(sampler=ShardSampler(range(40), shuffle=False))
        with keeping(context, state, tmp_path) as checkpoints:
            state.sampler.record_batch(0, 4 - context.rank)
            state.commit()
            written(checkpoints)

    run_ranks(2, rank)
    assert load_checkpoint(tmp_path)["sampler"]["processed_num"] == 2 * 3


class Gate:
    """Holds the writing of a file."""

    def __init__(self, monkeypatch):
        self.open = threading.Event()
        self.versions = []
        inner = CheckpointFiles.write

        def write(files, header, tensors, moving):
            self.versions.append(header.version)
            while not self.open.wait(0.01):
                moving()
            return inner(files, header, tensors, moving)

        monkeypatch.setattr(CheckpointFiles, "write", write)


def test_checkpoints_are_left_out_while_one_is_written(tmp_path, monkeypatch):
    gate = Gate(monkeypatch)

    def rank(context):
        state = hvd.elastic.TorchState(count=torch.zeros(3))
        with keeping(context, state, tmp_path) as checkpoints:
            for _ in range(5):
                state.count += 1
                state.commit()
            gate.open.set()
            written(checkpoints)
            assert gate.versions == [1]
            ((*_, path),) = CheckpointFiles(str(tmp_path), "a").candidates(1, others=False)
            checkpoints.finish()
            assert gate.versions == [1, 5]
        return path

    (path,) = run_ranks(1, rank)

    Path(path).with_name("01-999999-0000000001.safetensors").write_bytes(Path(path).read_bytes())
    state, *_ = resumed(tmp_path, lambda: hvd.elastic.TorchState(count=None))
    assert torch.equal(state.count, torch.ones(3)), "later steps got into an earlier one"


ENDS = [  # an order, whether the rank had left at the commit, seconds to write, and what is said
    (Stopped, True, 0.0, [1], ""),
    (Stopped, False, 0.0, [], ""),
    (Leaving, True, 0.0, [], ""),
    (Leaving, True, 30.0, [1], "commit 1 is written: no other rank had the state"),
    (Leaving, False, 0.05, [], "the last one was given up after 0.05 s"),
    (Evicted, False, 0.0, [], ""),  # while one is written
]


@pytest.mark.parametrize(("order", "left", "seconds", "kept", "note"), ENDS)
def test_who_ends_with_a_state_that_others_lack_writes_its_last_commit(
    tmp_path, monkeypatch, order, left, seconds, kept, note
):
    """And leaves neither a thread nor a torn file."""
    if order is Evicted or "given up" in note:
        Gate(monkeypatch)
    notes = []

    def rank(context):
        state = ObjectState(count=0)
        with keeping(context, state, tmp_path, every=1000, notes=notes) as checkpoints:
            state.count = 5
            state.save()
            context.committed()
            if left:
                checkpoints.left = True
            state.count = 6  # not committed
            context.time_to_save = seconds
            if order is Evicted:
                checkpoints._begin(state._progress_at_commit())
            raise order("at a commit")

    with contextlib.suppress(Stopped, Evicted):
        run_ranks(1, rank)
    assert [int(Path(name).stem[-10:]) for name in files_in(tmp_path)] == kept
    assert [each for each in notes if "in /" not in each] == ([note] if note else [])
    assert not [t for t in threading.enumerate() if t.name == "nbelastic-checkpoint"]
    if kept:
        assert resumed(tmp_path, lambda: ObjectState(count=0))[0].count == 5


def test_what_goes_wrong_is_told_once_and_training_goes_on(tmp_path):
    place = tmp_path / "place"
    place.touch()  # a file where a directory should be

    def rank(context):
        state = ObjectState(count=0)
        with keeping(context, state, place) as checkpoints:
            for number in range(6):
                if number == 3:
                    place.unlink()
                state.commit()
                written(checkpoints)
        return context.notes

    (notes,) = run_ranks(1, rank)
    assert len([note for note in notes if "cannot be written" in note]) == 1
    assert notes[-1].startswith(f"commit 4 is in {place}")


def test_a_state_that_cannot_be_copied_is_told_and_training_goes_on(tmp_path):
    class Lock:
        def __deepcopy__(self, memo):
            return self

        def __reduce__(self):
            raise TypeError("a lock cannot be pickled")

    (note,) = job(tmp_path, lambda: ObjectState(lock=Lock()), lambda state: state.commit())[1]
    assert note.startswith("the state cannot be copied: state.lock (a Lock) cannot be sent to")
    assert "a lock cannot be pickled" in note


def test_resume_without_a_checkpoint_starts_from_the_beginning(tmp_path):
    state, notes, _ = resumed(tmp_path, lambda: ObjectState(count=7))
    assert state.count == 7
    assert notes == [f"nothing to resume from in {tmp_path}: it starts from the beginning"]
    assert resumed(tmp_path, lambda: ObjectState(count=7), loop=2)[1] == []


def test_an_unreadable_place_fails_only_a_job_that_resumes(tmp_path):
    place = tmp_path / "file"
    place.touch()
    nowhere = f"{place}/within"
    with pytest.raises(NbelasticError, match="cannot be read"):
        resumed(nowhere, lambda: ObjectState(count=7))
    state, notes, _ = resumed(nowhere, lambda: ObjectState(count=7), resume=False)
    assert state.count == 7
    assert "cannot be read" in notes[0]


def test_a_checkpoint_that_does_not_fit_names_the_file(tmp_path):
    run_ranks(2, lambda context: train_a_while(context, tmp_path, 4))
    with pytest.raises(
        NbelasticError, match=r"\.safetensors .*samplers of \[48\] samples; now they have \[50\]"
    ):
        resumed(tmp_path, lambda: training(0, samples=50))


def test_in_a_later_loop_all_ranks_receive_what_the_source_has_loaded(tmp_path):
    def train(context, run, *versions):
        found = []
        for loop, version in enumerate(versions, 1):
            state, options = ObjectState(count=0), {"resume": run == "b", "version": version}
            with keeping(context, state, tmp_path, loop, run=run, **options) as checkpoints:
                found.append(state.count)
                state.count += 10 * loop
                state.commit()
                checkpoints.finish()
        return found

    assert run_ranks(2, lambda context: train(context, "a", FRESH, FRESH)) == [[0, 0]] * 2
    # All have the same commit after the first loop.
    assert run_ranks(2, lambda context: train(context, "b", FRESH, 3)) == [[10, 20]] * 2


def handled():
    before = get_handler_registry()
    set_handler_registry([(complex, type("Handler", (StateHandler,), {}))])
    try:
        return TorchState(other=1, place=1j)
    finally:
        set_handler_registry(before)


def test_a_state_that_cannot_be_written_is_refused(tmp_path):
    for build, message in (
        (type("OfTheirOwn", (State,), {}), "OfTheirOwn cannot be written to disk"),
        (handled, r"keep state\.place, and"),
    ):
        with pytest.raises(OptionError, match=message):
            job(tmp_path, build)
