"""Torch's ``DistributedSampler`` follows the ranks, and deals the rest of an epoch."""

import itertools
from collections import Counter
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader
from torch.utils.data.distributed import DistributedSampler

from nbelastic.elastic.followed import samplers_of
from nbelastic.elastic.ranks.context import activate
from nbelastic.errors import NbelasticError
from nbelastic.torch import distributed_sampler
from tests.support.world import world_of

distributed_sampler.install()


class Wrapper(DistributedSampler):
    """A sampler that deals what another draws, as Lightning's wrapper does."""

    def __iter__(self):
        drawn = torch.randperm(len(self.dataset)).tolist()
        return (drawn[place] for place in super().__iter__())


class Stateful(DistributedSampler):
    """A sampler as torchdata's, which counts what it yields."""

    __module__ = "torchdata.stateful"
    yielded = 0

    def __iter__(self):
        for row in super().__iter__():
            self.yielded += 1
            yield row

    def state_dict(self):
        raise AssertionError("the job keeps its progress")

    load_state_dict = state_dict


class Rank:
    """A rank that has made a sampler and a loader before its first generation."""

    def __init__(self, rank, size, make, rows, batch):
        self.context = world_of(rank, size)
        self.context.generation = 0
        with activate(self.context):
            self.sampler = make(range(rows), num_replicas=size, rank=rank)
            self.loader = DataLoader(range(rows), batch, sampler=self.sampler)
        self.batches = iter(())

    def form(self, rank, size):
        self.context.rank, self.context.size, self.context.generation = rank, size, 1
        for call in self.context.after_forming:
            call()

    def begin(self, epoch):
        with activate(self.context):
            self.sampler.set_epoch(epoch)
            self.batches = iter(self.loader)

    def step(self):
        with activate(self.context):
            batch = next(self.batches, None)
        return None if batch is None else batch.tolist()


def train(sizes, steps, make, rows, batch):
    """Train three epochs, each of the worlds but the last for some steps that are committed.

    Return the rows of each epoch that were trained, and not rolled back.
    """
    epochs = [[], [], []]
    ranks = [Rank(rank, sizes[0], make, rows, batch) for rank in range(sizes[0])]
    epoch = 0
    for size, most in zip(sizes, [*steps, 10**6], strict=True):
        left = most
        newcomers = [Rank(rank, size, make, rows, batch) for rank in range(len(ranks), size)]
        ranks = [*ranks[-size:], *newcomers] if size < len(ranks) else [*ranks, *newcomers]
        for number, each in enumerate(ranks):
            each.form(number, size)
        for each in newcomers:
            with activate(each.context):
                samplers_of(each.context).go_back(samplers_of(ranks[0].context).saved)
        while epoch < 3:
            for each in ranks:
                each.begin(epoch)
            while left:
                found = [each.step() for each in ranks]
                assert len({each is None for each in found}) == 1
                if found[0] is None:
                    break
                epochs[epoch].extend(itertools.chain(*found))
                left -= 1
                for each in ranks:
                    samplers_of(each.context).save()
            if not left:  # a batch in flight is lost with the generation
                for each in ranks:
                    each.step()
                    each.batches = iter(())
                break
            epoch += 1
    return epochs


@settings(deadline=None, max_examples=60)
@given(
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    steps=st.lists(st.integers(1, 9), min_size=3, max_size=3),
    make=st.sampled_from([DistributedSampler, Wrapper, Stateful]),
    rows=st.integers(4, 40),
    batch=st.integers(1, 4),
)
def test_each_row_is_trained_once_an_epoch(sizes, steps, make, rows, batch):
    padding = sum(size - 1 for size in sizes)
    for epoch in train(sizes, steps[: len(sizes) - 1], make, rows, batch):
        counts = Counter(epoch)
        assert set(counts) == set(range(rows))
        assert sum(counts.values()) <= rows + padding


def test_an_epoch_without_a_reset_is_torchs_own():
    for options in ({}, {"shuffle": False}, {"drop_last": True}, {"seed": 5}):
        for rank in range(3):
            expected = list(DistributedSampler(range(11), 3, rank, **options))
            with activate(world_of(rank, 3)):
                sampler = DistributedSampler(range(11), 3, rank, **options)
                assert list(sampler) == expected
                loaded = DataLoader(range(11), 1, sampler=sampler)
                assert [int(each) for each in loaded] == expected


@pytest.mark.parametrize(
    ("make", "each"),
    [(DistributedSampler, 4), (partial(DistributedSampler, drop_last=True), 3)],
)
def test_a_sampler_has_the_sizes_of_the_present_ranks(make, each):
    rank = Rank(1, 2, make, 10, 2)
    rank.form(2, 3)
    with activate(rank.context):
        assert (rank.sampler.num_replicas, rank.sampler.rank) == (3, 2)
        assert len(rank.sampler) == len(list(rank.sampler)) == each
        assert len(rank.loader) == 2


def test_an_iteration_that_was_over_begins_again_and_one_under_way_goes_on():
    """An evaluation is whole each time; so is an epoch that the function does not name."""
    rank = Rank(0, 1, DistributedSampler, 6, 2)
    samplers = samplers_of(rank.context)
    rank.form(0, 1)
    with activate(rank.context):
        assert len(list(rank.loader)) == 3
        samplers.save()
        rank.form(0, 1)
        rank.sampler.set_epoch(0)
        assert len(rank.loader) == len(list(rank.loader)) == 3  # no commit was within it
        for _ in rank.loader:
            samplers.save()
        samplers.save()
        rank.form(0, 1)
        assert len(list(rank.loader)) == 3
        rank.form(0, 1)
        rank.sampler.set_epoch(0)  # the function names an epoch that it has trained
        assert list(rank.loader) == []
        assert len(list(rank.loader)) == 3
        next(iter(rank.loader))  # a look at the first batch is no epoch
        samplers.save()
        rank.form(0, 1)
        assert len(list(rank.loader)) == 3


def test_one_made_in_each_generation_goes_on_with_the_epoch_once(alone):
    seen = []

    def run(stop):
        sampler = DistributedSampler(range(9), 1, 0)
        loader = DataLoader(range(9), 2, sampler=sampler)
        for number, batch in enumerate(loader):
            if number == stop:
                return
            seen.extend(batch.tolist())
            samplers_of(alone).save()

    run(2)
    samplers_of(alone).formed()
    run(9)
    run(9)
    assert sorted(seen) == sorted([*range(9)] * 2)


def test_a_sampler_for_other_ranks_than_the_jobs_is_left_alone_until_they_change(alone):
    alone.rank, alone.size = 3, 4
    sampler = DistributedSampler(range(8), 2, 1, shuffle=False)
    loader = DataLoader(range(8), 1, sampler=sampler)
    assert [int(row) for row in loader] == [1, 3, 5, 7]
    alone.rank, alone.size = 1, 2
    samplers_of(alone).formed()
    alone.size = 3
    with pytest.raises(NbelasticError, match="was made for rank 1 of 2, the job had 4 ranks"):
        list(loader)


class Batches(BatchSampler):
    """A class of a user's."""


def test_rows_that_cannot_be_counted_are_told_of(monkeypatch, alone):
    told = []
    monkeypatch.setattr(alone, "warn", told.append)
    batches = Batches(DistributedSampler(range(8), 1, 0), 2, False)
    loader = DataLoader(range(8), batch_sampler=batches)
    for _ in loader:
        samplers_of(alone).save()
        break
    rest = iter(loader)
    next(rest)
    samplers_of(alone).save()
    samplers_of(alone).formed()
    assert len(list(loader)) == 4
    assert len(told) == 1
