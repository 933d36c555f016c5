from __future__ import annotations

import copy
import time
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from nbelastic.collectives import SoloCommunicator
from nbelastic.elastic.context import activate
from nbelastic.elastic.sampler import SamplerSnapshot, ShardSampler
from nbelastic.elastic.settlement import settle_together
from nbelastic.elastic.shards import choose_root
from tests.support.world import StaticContext, run_ranks


def world_of(rank: int, size: int) -> StaticContext:
    context = StaticContext(SoloCommunicator(generation=1))
    context.rank, context.size = rank, size
    return context


def sampler_at(rank: int, size: int, length: int, **options: object) -> ShardSampler:
    with activate(world_of(rank, size)):
        return ShardSampler(range(length), **options)  # type: ignore[arg-type]


def settle_all(samplers: list[ShardSampler], source: int, behind: set[int]) -> None:
    """Do what the ranks of a new generation do together; sampler i is that of rank i."""
    deals = deals_of_all(samplers, source, behind)
    for rank, (sampler, deal) in enumerate(zip(samplers, deals, strict=True)):
        sampler.install(deal, rank, resumed=True)


def deals_of_all(samplers, source, behind):
    size = len(samplers)
    claims = {r: [s.claim()] for r, s in enumerate(samplers) if r not in behind}
    root, apart = choose_root(claims, source)
    column = [each[0] for each in claims.values()]
    wire = samplers[root].settle(column, size).pack()
    deals = [
        sampler.unpack(wire, size)
        if rank in behind or rank in apart
        else sampler.settle(column, size)
        for rank, sampler in enumerate(samplers)
    ]
    assert len({deal.key for deal in deals}) == 1
    assert len({deal.settled for deal in deals}) == 1
    return deals


# -- one rank ------------------------------------------------------------------------------------


def test_shares_are_disjoint_equally_long_and_complete() -> None:
    for length, size in [(10, 1), (10, 3), (12, 4), (3, 5), (1, 4), (0, 2)]:
        shares = []
        for rank in range(size):
            with activate(world_of(rank, size)):
                sampler = ShardSampler(range(length))
                shares.append(list(sampler))
                assert len(sampler) == len(shares[-1]) == sampler.num_samples
                assert sampler.total_size == size * len(sampler)
        assert len({len(share) for share in shares}) == 1
        dealt = [share[i] for i in range(len(shares[0])) for share in shares]
        assert sorted(dealt[:length]) == list(range(length))
        if length:
            assert dealt[length:] == [dealt[i % length] for i in range(len(dealt) - length)]


def test_order_depends_on_seed_and_epoch_alone() -> None:
    first = sampler_at(0, 1, 100, seed=3)
    second = sampler_at(0, 1, 100, seed=3)
    assert first.remaining_indices == second.remaining_indices
    second.set_epoch(1)
    assert first.remaining_indices != second.remaining_indices
    assert first.remaining_indices != sampler_at(0, 1, 100, seed=4).remaining_indices
    assert sampler_at(0, 1, 5, shuffle=False).remaining_indices == [0, 1, 2, 3, 4]
    # Fixed for good: a rank with another NumPy must deal the same.
    assert sampler_at(0, 1, 8).remaining_indices == [3, 7, 4, 0, 2, 6, 5, 1]


def test_recording_does_not_change_the_share_until_a_change_of_membership() -> None:
    sampler = sampler_at(1, 2, 10, shuffle=False)
    with activate(world_of(1, 2)):
        sampler.record_batch(0, 2)
        assert list(sampler) == [1, 3, 5, 7, 9]
        assert sampler.processed_indices == {1, 3}
        assert sampler.processed_num == 2


def test_last_batch_is_cut_and_batches_beyond_the_end_are_nothing() -> None:
    sampler = sampler_at(0, 1, 5, shuffle=False)
    sampler.record_batch(1, 3)
    assert sampler.processed_indices == {3, 4}
    sampler.record_batch(2, 3)
    sampler.record_batch(-1, 3)
    assert sampler.processed_indices == {3, 4}
    assert sampler.get_indices(1, 3) == [3, 4]


def test_indices_that_do_not_exist_are_refused_when_recorded() -> None:
    sampler = sampler_at(0, 1, 5)
    sampler.record_indices([0, 4])
    with pytest.raises(ValueError, match="0 … 4"):
        sampler.record_indices([5])
    with pytest.raises(ValueError, match="0 … 4"):
        sampler.record_indices([-1])
    assert sampler.processed_indices == {0, 4}


def test_set_epoch_clears_what_was_done() -> None:
    sampler = sampler_at(0, 1, 10)
    sampler.record_batch(0, 4)
    sampler.record_indices([9])
    sampler.set_epoch(0)
    assert sampler.processed_num == 0
    sampler.record_batch(0, 4)
    sampler.set_epoch(1)
    assert (sampler.epoch, sampler.processed_indices, len(sampler)) == (1, set(), 10)


def test_set_epoch_at_the_start_of_a_function_called_again_keeps_what_was_done() -> None:
    sampler = sampler_at(0, 1, 10)
    sampler.record_batch(0, 4)
    settle_all([sampler], 0, set())
    sampler.set_epoch(0)
    assert sampler.processed_num == 4
    sampler.set_epoch(0)
    assert sampler.processed_num == 0


@pytest.mark.parametrize("use", ["iterate", "batch", "indices", "other epoch"])
def test_only_the_first_set_epoch_after_a_change_keeps_what_was_done(use: str) -> None:
    sampler = sampler_at(0, 1, 10)
    sampler.record_batch(0, 4)
    settle_all([sampler], 0, set())
    if use == "iterate":
        list(sampler)
    elif use == "batch":
        sampler.record_batch(0, 1)
    elif use == "indices":
        sampler.record_indices([0])
    else:
        sampler.set_epoch(3)
        sampler.record_batch(0, 4)
    sampler.set_epoch(sampler.epoch)
    assert sampler.processed_num == 0


def test_an_iterator_is_not_disturbed_by_later_changes() -> None:
    sampler = sampler_at(0, 1, 10, shuffle=False)
    iterator = iter(sampler)
    assert next(iterator) == 0
    sampler.record_batch(0, 5)
    settle_all([sampler], 0, set())
    sampler.set_epoch(7)
    assert list(iterator) == list(range(1, 10))


def test_iterating_and_len_use_the_present_rank_and_size() -> None:
    sampler = sampler_at(0, 1, 12, shuffle=False)
    with activate(world_of(1, 3)):
        assert len(sampler) == 4
        assert sampler.num_replicas == 1  # asking for the length deals nothing
        assert list(sampler) == [1, 4, 7, 10]
        assert (sampler.rank, sampler.num_replicas) == (1, 3)


def test_reset_leaves_out_what_is_known_to_all_and_keeps_what_only_this_rank_knows() -> None:
    alone = sampler_at(0, 1, 6, shuffle=False)
    alone.record_batch(0, 2)
    alone.reset()
    assert alone.remaining_indices == [2, 3, 4, 5]
    one_of_two = sampler_at(1, 2, 6, shuffle=False)
    with activate(world_of(1, 2)):
        one_of_two.record_batch(0, 2)
        one_of_two.reset()
        assert one_of_two.remaining_indices == [0, 1, 2, 3, 4, 5]
        assert one_of_two.processed_indices == {1, 3}


def test_checkpoint_goes_on_where_it_was_with_any_number_of_ranks() -> None:
    sampler = sampler_at(0, 1, 10)
    sampler.set_epoch(2)
    sampler.record_batch(0, 4)
    checkpoint = copy.deepcopy(sampler.state_dict())
    shares = []
    for rank in range(2):
        with activate(world_of(rank, 2)):
            again = ShardSampler(range(10))
            again.load_state_dict(checkpoint)
            assert again.epoch == 2
            shares += list(again)
    assert sorted([*shares, *checkpoint["processed_indices"]]) == list(range(10))
    horovods = sampler_at(0, 1, 10)
    horovods.load_state_dict({"epoch": 2, "processed_num": 4})
    assert horovods.processed_indices == checkpoint["processed_indices"]


OPERATIONS = st.one_of(
    st.tuples(st.just("batch"), st.integers(0, 5)),
    st.tuples(st.just("indices"), st.lists(st.integers(0, 19), max_size=3)),
    st.tuples(st.just("epoch"), st.integers(0, 2)),
    st.tuples(st.just("settle"), st.just(0)),
    st.tuples(st.just("save"), st.just(0)),
    st.tuples(st.just("restore"), st.integers(0, 5)),
)


@settings(deadline=None)
@given(st.lists(OPERATIONS, max_size=20))
def test_N6_restore_goes_back_exactly_whatever_happened_since(operations: list) -> None:
    sampler = sampler_at(0, 1, 20)
    seen: list[tuple[SamplerSnapshot, object]] = []

    def view() -> object:
        return (sampler.epoch, sampler.processed_indices, sampler.remaining_indices)

    for what, value in operations:
        if what == "batch":
            sampler.record_batch(value, 3)
        elif what == "indices":
            sampler.record_indices(value)
        elif what == "epoch":
            sampler.set_epoch(value)
        elif what == "settle":
            settle_all([sampler], 0, set())
        elif what == "save":
            seen.append((sampler.snapshot(), view()))
        elif seen:
            snapshot, before = seen[value % len(seen)]
            sampler.go_back(snapshot)
            assert view() == before
    for snapshot, before in seen:
        sampler.go_back(snapshot)
        assert view() == before


def test_a_million_samples_cost_nothing_per_batch_or_commit() -> None:
    sampler = sampler_at(0, 4, 1_000_000)
    sampler.get_indices(0, 1)
    start = time.perf_counter()
    for batch in range(1000):
        sampler.record_batch(batch, 32)
        sampler.snapshot()
    assert time.perf_counter() - start < 0.1  # 100 µs each; walking over all takes 20 ms
    assert sampler.claim().spans == ((0, 32_000),)


# -- many ranks in lockstep: each sample exactly once per epoch ----------------------------------


@dataclass
class Member:
    sampler: ShardSampler
    version: int = -1
    saved: SamplerSnapshot | None = None

    def save(self, version: int) -> None:
        self.saved, self.version = self.sampler.snapshot(), version

    def restore(self) -> None:
        if self.saved is not None:
            self.sampler.go_back(self.saved)


@dataclass
class Model:
    """What training has done: for each epoch how often each sample was used, padding apart."""

    epoch: int = 0
    used: dict[int, Counter] = field(default_factory=dict)


class LockstepTraining(RuleBasedStateMachine):
    """Ranks that do a batch each per step, while anything may happen to them."""

    @initialize(
        length=st.integers(0, 40),
        size=st.integers(1, 5),
        batch=st.integers(1, 4),
        shuffle=st.booleans(),
        torch_style=st.booleans(),
    )
    def begin(self, length: int, size: int, batch: int, shuffle: bool, torch_style: bool) -> None:
        self.length, self.batch, self.shuffle, self.torch_style = (
            length,
            batch,
            shuffle,
            torch_style,
        )
        self.model = Model()
        self.versions = {0: copy.deepcopy(self.model)}
        self.version = 0
        self.members = [self.newcomer(rank, size) for rank in range(size)]
        self.form(source=0, behind=set(range(1, size)))

    def newcomer(self, rank: int, size: int) -> Member:
        return Member(sampler_at(rank, size, self.length, shuffle=self.shuffle, seed=5))

    def form(self, source: int, behind: set[int]) -> None:
        settle_all([member.sampler for member in self.members], source, behind)
        for member in self.members:
            member.save(self.version)
        self.position = 0
        if self.torch_style:
            for member in self.members:
                member.sampler.set_epoch(self.model.epoch)

    @property
    def per_rank(self) -> int:
        return self.members[0].sampler._deal.per_rank

    @rule(steps=st.integers(1, 4))
    def train(self, steps: int) -> None:
        for _ in range(steps):
            if self.position * self.batch >= self.per_rank:
                break
            used = self.model.used.setdefault(self.model.epoch, Counter())
            for rank, member in enumerate(self.members):
                deal = member.sampler._deal
                samples = member.sampler.get_indices(self.position, self.batch)
                for offset, sample in enumerate(samples):
                    place = (self.position * self.batch + offset) * deal.size + rank
                    if place < deal.left:
                        used[sample] += 1
                member.sampler.record_batch(self.position, self.batch)
            self.position += 1

    @rule()
    def commit(self) -> None:
        self.version += 1
        self.versions[self.version] = copy.deepcopy(self.model)
        for member in self.members:
            member.save(self.version)

    @rule()
    def end_epoch(self) -> None:
        self.train(10**6)
        self.model.epoch += 1
        for rank, member in enumerate(self.members):
            with activate(world_of(rank, len(self.members))):
                member.sampler.set_epoch(self.model.epoch)
        self.position = 0

    @rule(data=st.data())
    def planned_change(self, data: st.DataObject) -> None:
        leaving = self.some(data, len(self.members) - 1, "leaving")
        joining = data.draw(st.integers(0, 3), "joining")
        # All leave together while the old generation works; then one more version: the cut.
        settle_all([member.sampler for member in self.members], 0, set())
        self.commit()
        self.regroup(leaving, joining)

    @rule(data=st.data())
    def failure(self, data: st.DataObject) -> None:
        if data.draw(st.booleans(), "while committing"):
            ahead = self.some(data, len(self.members), "ahead")
            if ahead:
                self.version += 1
                self.versions[self.version] = copy.deepcopy(self.model)
                for rank in ahead:
                    self.members[rank].save(self.version)
        dead = self.some(data, len(self.members) - 1, "dead")
        joining = data.draw(st.integers(0, 3), "joining")
        for member in self.members:
            member.restore()
        if data.draw(st.booleans(), "while forming"):
            self.fail_while_forming(data, dead, joining)
            dead, joining = self.some(data, len(self.members) - 1, "dead too"), 0
            if not any(
                member.version >= 0 for rank, member in enumerate(self.members) if rank not in dead
            ):
                dead = set()
        self.regroup(dead, joining)

    def fail_while_forming(self, data: st.DataObject, dead: set[int], joining: int) -> None:
        source, behind = self.replace(dead, joining)
        deals = deals_of_all([member.sampler for member in self.members], source, behind)
        through = self.some(data, len(self.members), "got through")
        for rank, member in enumerate(self.members):
            if rank in through:
                member.sampler.install(deals[rank], rank, resumed=True)
                member.save(self.version)
            else:
                member.restore()

    def regroup(self, gone: set[int], joining: int) -> None:
        source, behind = self.replace(gone, joining)
        self.form(source, behind)

    def replace(self, gone: set[int], joining: int) -> tuple[int, set[int]]:
        stay = [member for rank, member in enumerate(self.members) if rank not in gone]
        size = len(stay) + joining
        self.members = stay + [self.newcomer(len(stay) + i, size) for i in range(joining)]
        self.version = max(member.version for member in stay)
        self.model = copy.deepcopy(self.versions[self.version])
        newest = [r for r, member in enumerate(self.members) if member.version == self.version]
        return newest[0], set(range(size)) - set(newest)

    def some(self, data: st.DataObject, most: int, label: str) -> set[int]:
        ranks = st.integers(0, len(self.members) - 1)
        return set(data.draw(st.lists(ranks, max_size=most, unique=True), label))

    @invariant()
    def all_ranks_deal_the_same(self) -> None:
        assert len({member.sampler._deal.key for member in self.members}) == 1

    @invariant()
    def nothing_is_used_twice(self) -> None:
        for used in self.model.used.values():
            assert all(count == 1 for count in used.values())

    @invariant()
    def finished_epochs_are_complete(self) -> None:
        for epoch in range(self.model.epoch):
            assert len(self.model.used.get(epoch, ())) == self.length

    def teardown(self) -> None:
        if hasattr(self, "members"):
            self.end_epoch()
            self.nothing_is_used_twice()
            self.finished_epochs_are_complete()


TestN4EachSampleOncePerEpoch = LockstepTraining.TestCase
TestN4EachSampleOncePerEpoch.settings = settings(
    max_examples=300, stateful_step_count=20, deadline=None
)


# -- many ranks, each at its own pace: nothing is lost -------------------------------------------


@settings(deadline=None)
@given(
    length=st.integers(1, 60),
    size=st.integers(2, 5),
    rounds=st.lists(
        st.tuples(
            st.lists(st.integers(0, 12), min_size=5, max_size=5),
            st.sampled_from(["leave", "die"]),
            st.integers(0, 4),
            st.integers(0, 2),
        ),
        max_size=6,
    ),
)
def test_N4_nothing_is_lost_out_of_lockstep(length: int, size: int, rounds: list) -> None:
    samplers = [sampler_at(rank, size, length) for rank in range(size)]
    settle_all(samplers, 0, set())
    used: Counter[int] = Counter()
    for paces, how, chosen, wanted in rounds:
        for sampler, pace in zip(samplers, paces, strict=False):
            used.update(sampler.get_indices(0, pace))
            sampler.record_batch(0, pace)
        goner = chosen % len(samplers)
        slowest = min(range(len(samplers)), key=paces.__getitem__)
        if how == "leave":
            settle_all(samplers, 0, set())
        elif goner == slowest:
            goner = (goner + 1) % len(samplers)  # see Notes of settle()
        if len(samplers) > 1:
            del samplers[goner]
        stay = len(samplers)
        joining = min(wanted, 5 - stay)
        samplers += [sampler_at(stay + i, stay + joining, length) for i in range(joining)]
        settle_all(samplers, 0, set(range(stay, stay + joining)))
    for sampler in samplers:
        used.update(sampler.get_indices(0, length))
    assert set(used) == set(range(length))


def test_a_rank_that_was_behind_counts_as_far_as_the_newest() -> None:
    ranks = [sampler_at(rank, 3, 30, shuffle=False) for rank in range(3)]
    settle_all(ranks, 0, set())
    for sampler in ranks:
        sampler.record_batch(0, 4)
    before = ranks[1].snapshot()
    for sampler in ranks:
        sampler.record_batch(1, 4)
    ranks[1].go_back(before)
    del ranks[2]
    settle_all(ranks, 0, {1})
    assert ranks[0].processed_indices == ranks[1].processed_indices == set(range(24))


def test_a_rank_that_has_settled_knows_better_than_one_that_went_back() -> None:
    ranks = [sampler_at(rank, 3, 30, shuffle=False) for rank in range(3)]
    settle_all(ranks, 0, set())
    for sampler, pace in zip(ranks, (5, 2, 4), strict=True):
        sampler.record_batch(0, pace)
    del ranks[2]
    # The next generation fails while it forms: only rank 1 gets through.
    ranks[1].install(deals_of_all(ranks, 0, set())[1], 1)
    settle_all(ranks, 0, set())
    assert ranks[0].processed_indices == {0, 3, 6, 9, 12, 1, 4, 2, 5}


def test_of_ranks_that_know_as_much_the_source_is_right() -> None:
    ranks = [sampler_at(rank, 2, 10) for rank in range(2)]
    for epoch, sampler in enumerate(ranks):
        sampler.set_epoch(epoch)
    settle_all(ranks, 1, set())
    assert [sampler.epoch for sampler in ranks] == [1, 1]


# -- between real ranks --------------------------------------------------------------------------


def test_N4_ranks_settle_on_the_same_rest() -> None:
    def main(context: StaticContext) -> object:
        sampler = ShardSampler(range(1000), seed=1)
        other = ShardSampler(range(10), shuffle=False)
        sampler.record_batch(0, 16)
        other.record_indices([context.rank])
        deals = settle_together([sampler, other], context)
        for each, deal in zip((sampler, other), deals, strict=True):
            each.install(deal, context.rank)
        return sampler.processed_num, other.processed_indices, list(sampler)

    results = run_ranks(3, main)
    assert {result[0] for result in results} == {48}
    assert all(result[1] == {0, 1, 2} for result in results)
    shares = [sample for result in results for sample in result[2]]
    assert len(set(shares)) == 952


def test_N4_ranks_behind_or_apart_take_over_what_the_others_settle() -> None:
    def main(context: StaticContext) -> object:
        sampler = ShardSampler(range(100))
        if context.rank == 0:
            sampler.set_epoch(9)
        else:
            sampler.set_epoch(4)
            sampler.record_batch(0, 5 if context.rank < 3 else 3)
        if context.rank == 2:
            sampler.set_epoch(5)
        [deal] = settle_together([sampler], context, behind=[0])
        sampler.install(deal, context.rank)
        return sampler.epoch, sampler.processed_num, np.packbits(deal.done).tobytes()

    # Rank 0 is behind, 2 has gone its own way: 5 of rank 1, 3 of rank 3, three each for 0, 2.
    results = run_ranks(4, main, source=1)
    assert set(results) == {(4, 14, results[0][2])}
