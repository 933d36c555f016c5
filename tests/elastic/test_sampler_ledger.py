"""A ledger of every sample that is used, while anything may happen to the ranks (N4)."""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from nbelastic.elastic.ranks.context import activate
from nbelastic.elastic.sampler import SamplerSnapshot, ShardSampler
from tests.elastic.worlds import progress_of_all, sampler_at, settle_all, world_of


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
        progress = progress_of_all([member.sampler for member in self.members], source, behind)
        through = self.some(data, len(self.members), "got through")
        for rank, member in enumerate(self.members):
            if rank in through:
                member.sampler.install(progress, rank, len(self.members), resumed=True)
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
        assert len({member.sampler._deal for member in self.members}) == 1

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
            goner = (goner + 1) % len(samplers)  # else what only others have done would count
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


def test_a_rank_that_has_settled_and_one_that_went_back_deal_the_same() -> None:
    ranks = [sampler_at(rank, 3, 30, shuffle=False) for rank in range(3)]
    settle_all(ranks, 0, set())
    for sampler, pace in zip(ranks, (5, 2, 4), strict=True):
        sampler.record_batch(0, pace)
    del ranks[2]
    # The next generation fails while it forms: only rank 1 gets through.
    ranks[1].install(progress_of_all(ranks, 0, set()), 1, 2)
    settle_all(ranks, 0, set())
    assert ranks[0].processed_indices == ranks[1].processed_indices == set(range(6))


def test_of_ranks_in_different_epochs_the_earlier_counts() -> None:
    ranks = [sampler_at(rank, 2, 10) for rank in range(2)]
    for epoch, sampler in enumerate(ranks):
        sampler.set_epoch(epoch)
    settle_all(ranks, 1, set())
    assert [sampler.epoch for sampler in ranks] == [0, 0]
