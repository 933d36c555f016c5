"""Samplers of users' own, dealt to ranks that come and go; no job."""

import itertools
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from nbelastic.elastic.ranks.context import activate
from nbelastic.errors import NbelasticError
from nbelastic.trainers.sampler import DealtSampler, obstacle_to
from tests.elastic.test_sampler import settle_all, world_of
from tests.support.world import run_ranks

ROWS = 24


class Curriculum(Sampler):
    """In each epoch it has more rows, and others."""

    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return iter((torch.randperm(8 + 4 * self.epoch) + self.epoch).tolist())

    def __len__(self):
        return 8


class Drawn(Sampler):
    """A sampler of a user's, which has whatever a function draws."""

    def __init__(self, draw, length):
        self.draw, self.length = draw, length

    def __iter__(self):
        return iter(self.draw())

    def __len__(self):
        return self.length


def buckets():
    """Return batches of different lengths."""
    order, start = torch.randperm(ROWS).tolist(), 0
    while start < ROWS:
        length = 1 + start % 4
        yield order[start : start + length]
        start += length


def restless():
    """Return a sampler of which each draw is another, and no seed has a part in it."""
    return Drawn(lambda: np.random.default_rng().permutation(ROWS).tolist(), ROWS)


class Whole(BatchSampler):
    """A batch sampler of a user's, whose batches are dealt as they are."""


class Wrapper(DistributedSampler):
    """As Lightning's."""


SOURCES = {
    "weighted": lambda: WeightedRandomSampler([1.0] * 4 + [9.0] * 20, 30),
    "with a generator": lambda: RandomSampler(
        range(ROWS), replacement=True, num_samples=17, generator=torch.Generator()
    ),
    "subset": lambda: SubsetRandomSampler(range(0, ROWS, 2)),
    "curriculum": Curriculum,
    "buckets": lambda: Drawn(buckets, 10),
    "drop": lambda: Whole(SubsetRandomSampler(range(ROWS)), 5, True),
    "sharded by torch": lambda: Wrapper(range(ROWS), 4, 3, seed=2),
}


def flat(items):
    return [row for each in items for row in (each if isinstance(each, list) else [each])]


def deal(source, rows=ROWS, seed=0, batch=4, batched=False):
    batches = source if batched else BatchSampler(source, batch, False)
    return DealtSampler(range(rows), batches, seed)


def make(kind, rank, size, batch=4):
    with activate(world_of(rank, size)):
        return deal(SOURCES[kind](), 2 * ROWS, 7, batch, kind in ("buckets", "drop"))


@settings(deadline=None, max_examples=60)
@given(
    kind=st.sampled_from(sorted(SOURCES)),
    sizes=st.lists(st.integers(1, 4), min_size=4, max_size=4),
    steps=st.lists(st.integers(0, 5), min_size=3, max_size=3),
    batch=st.integers(1, 3),
    lost=st.booleans(),
)
def test_an_epoch_has_what_the_sampler_drew_once(kind, sizes, steps, batch, lost):
    expected = make(kind, 0, 1)
    with activate(world_of(0, 1)):
        expected.begin_epoch(1)
        drawn = [*expected]
    seen, samplers = [], []
    for size, left in zip(sizes, [*steps, 10**6], strict=True):
        behind = range(len(samplers), size)
        samplers = [*samplers[:size], *(make(kind, rank, size, batch) for rank in behind)]
        if seen:
            settle_all(samplers, 0, behind)
        shares = []
        for rank, sampler in enumerate(samplers):
            with activate(world_of(rank, size)):
                before = sampler.left_in(1)
                sampler.begin_epoch(1)
                shares.append([*sampler])
                assert before <= size * len(shares[-1]) < before + size
        width = samplers[0].width
        assert width == (1 if samplers[0].batched else batch)
        done = min(left, -(-len(shares[0]) // width))
        for rank, sampler in enumerate(samplers):
            with activate(world_of(rank, size)):
                for number in range(done):
                    sampler.record_batch(number, width)
                kept = sampler.snapshot()
                if lost:  # a batch in flight, which the commit does not have
                    sampler.record_batch(done, width)
                    sampler.go_back(kept)
        seen += [row for share in shares for row in share[: done * width]]
    assert not Counter(flat(drawn)) - Counter(flat(seen))
    padding = sum(size - 1 for size in sizes) * max(len(flat([each])) for each in drawn)
    assert len(flat(seen)) <= len(flat(drawn)) + padding


def test_an_epoch_is_drawn_once_and_each_epoch_anew():
    sampler = make("curriculum", 0, 1)
    with activate(world_of(0, 1)):
        for epoch, length in enumerate((8, 12, 16)):
            assert sampler.left_in(epoch) == length
            sampler.begin_epoch(epoch)
            assert sorted(sampler) == list(range(epoch, epoch + length))
            assert sampler.batches_left(epoch) == (length // 4, 0.0)


def test_ranks_that_draw_differently_have_the_draw_of_one_and_newcomers_too():
    def main(context):
        sampler = deal(restless())
        sampler.begin_epoch(0)
        first = sampler.remaining_indices
        context.generation += 1
        if context.rank == 0:  # a newcomer, which has the epoch and the progress from the others
            sampler = deal(restless())
        progress = sampler.progress()._replace(epoch=0, length=ROWS, done=6)
        sampler.install(progress, context.rank, context.size, resumed=True)
        assert sampler.left_in(0) == ROWS - 6
        sampler.begin_epoch(0)
        return first, sampler.remaining_indices

    (first, rest), *others = run_ranks(3, main)
    assert rest == first[6:]
    assert all(each == (first, rest) for each in others)


def test_a_sampler_with_rows_of_its_own_on_each_rank_is_refused():
    def main(context):
        rows = range(context.rank, ROWS, context.size)
        sampler = deal(Drawn(lambda: rows, len(rows)))
        with pytest.raises(NbelasticError, match=r"sampler \(Drawn\) gives each rank rows"):
            sampler.begin_epoch(0)
        return True

    assert run_ranks(2, main) == [True, True]


def test_what_cannot_be_dealt_is_named():
    class Endless(Sampler):
        def __iter__(self):
            return itertools.repeat(0)

    class Ranked(Curriculum):
        rank = 1

    assert obstacle_to(Endless()) == "its sampler (Endless) has no length"
    assert "rows of its own" in obstacle_to(BatchSampler(Ranked(), 2, False))
    assert obstacle_to(Drawn(buckets, 10)) == ""
    with activate(world_of(0, 1)):
        sampler = deal(Drawn(lambda: itertools.repeat(0), 3), 3)
        with pytest.raises(NbelasticError, match="length of 3 and yields more than 1006 items"):
            sampler.begin_epoch(0)


def test_a_permutation_is_drawn_anew_and_all_else_as_the_sampler_has_it():
    def kept(source):
        sampler = deal(source, seed=7)
        return sampler._source is source, sampler.shuffle, sampler.seed

    with activate(world_of(0, 1)):
        assert kept(RandomSampler(range(ROWS))) == (False, True, 7)
        assert kept(RandomSampler(range(ROWS), replacement=True)) == (True, None, 7)
        assert kept(RandomSampler(range(ROWS), num_samples=9)) == (True, None, 7)
        half = DistributedSampler(range(ROWS), 2, 0, shuffle=False, seed=5)
        assert kept(half) == (False, False, 5)
