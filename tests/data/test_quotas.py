"""Quotas: the shortest step, the same on all ranks, and taken only where it is clearly shorter."""

from __future__ import annotations

import itertools
import random
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nbelastic.data import balancer
from nbelastic.data.balancer import Stopwatch
from nbelastic.data.plan.quotas import (
    GAIN,
    LEAST_STEPS,
    PATIENCE,
    Balance,
    Pace,
    is_straggler,
    plan,
    predict,
    slowness,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

seconds = st.floats(1e-6, 1e3)


@st.composite
def worlds(draw: st.DrawFn, unknown: bool = False) -> tuple[tuple[int, ...], list[float]]:
    """Quotas of the present, and a time for each rank."""
    size = draw(st.integers(1, 6))
    quotas = draw(st.lists(st.integers(0, 5), min_size=size, max_size=size).filter(any))
    time = st.one_of(st.just(0.0), seconds) if unknown else seconds
    return tuple(quotas), draw(st.lists(time, min_size=size, max_size=size))


@given(worlds(unknown=True))
def test_a_plan_shares_out_all_micro_batches_and_stays_as_it_is(
    world: tuple[tuple[int, ...], list[float]],
) -> None:
    quotas, times = world
    found = plan(quotas, times)
    assert sum(found) == sum(quotas)
    assert min(found) >= 0
    assert plan(quotas, tuple(times)) == found  # a pure function
    for quota, before, time in zip(found, quotas, times, strict=True):
        assert time or quota <= max(before, 1)  # a rank of unknown speed gets one to be timed
    if all(times):
        assert plan(found, times) == found


def splits(count: int, ranks: int) -> Iterator[tuple[int, ...]]:
    """Yield all ways to share out micro-batches."""
    for bars in itertools.combinations(range(count + ranks - 1), ranks - 1):
        ends = (-1, *bars, count + ranks - 1)
        yield tuple(after - before - 1 for before, after in itertools.pairwise(ends))


@given(worlds())
def test_other_quotas_are_taken_only_if_no_others_are_shorter_and_they_clearly_are(
    world: tuple[tuple[int, ...], list[float]],
) -> None:
    quotas, times = world
    found = plan(quotas, times)
    count = sum(quotas)
    best = None
    if count <= 8:
        best = min(predict(split, times) for split in splits(count, len(quotas)))
    limit = (1 - GAIN) * predict(quotas, times)
    if found == quotas:
        assert best is None or best >= limit * (1 - 1e-12)
    else:
        assert predict(found, times) < limit
        assert best is None or predict(found, times) == pytest.approx(best)


def test_a_rank_that_is_three_times_slower_gets_less() -> None:
    assert plan((4, 4, 4, 4), (1, 1, 1, 3)) == (5, 5, 5, 1)
    assert plan((5, 5, 5, 1), (1, 1, 1, 1)) == (4, 4, 4, 4)
    assert plan((1, 1, 1, 1), (1, 1, 1, 3)) == (2, 1, 1, 0)
    assert plan((4, 4), (1.0, 1.04)) == (4, 4)
    assert plan((2, 2), (0.0, 0.0)) == (2, 2)
    assert is_straggler((1, 1, 1, 3), 3)
    assert not is_straggler((1, 1, 1, 3), 0)
    assert slowness((0, 2.0), 1) == 0.0  # not known


def test_a_time_is_known_after_some_steps_and_pauses_do_not_count() -> None:
    pace = Pace()
    found = []
    for time in (50.0, 1.0, 1.0, 1.0, 80.0, 1.0, 90.0, 1.0):
        pace.note(time)
        found.append(pace.seconds)
    assert found == [0.0, 0.0, *[1.0] * 6]
    for _ in range(3):
        pace.note(3.0)
    assert pace.seconds == 3.0


def test_a_stopwatch_times_what_is_between_start_and_stop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    moments = iter((10.0, 12.0, 50.0, 54.0))
    monkeypatch.setattr(balancer, "clock", lambda: next(moments))
    watch = Stopwatch()
    assert watch.take() is None
    for _ in range(2):
        watch.start()
        watch.stop()
    assert watch.take() == 3.0
    assert watch.take() is None


def test_a_stopwatch_does_not_wait_for_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    class Event:
        moments = itertools.count(0, 1000)
        over = False

        def __init__(self) -> None:
            self.at = next(self.moments)

        def query(self) -> bool:
            return Event.over

        def elapsed_time(self, later: Event) -> float:
            return float(later.at - self.at)

    monkeypatch.setattr(balancer.torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(balancer, "_event", Event)
    watch = Stopwatch()
    watch.start()
    watch.stop()
    assert watch.take() is None
    Event.over = True
    assert watch.take() == 1.0


class World:
    """Ranks that see what real ones see: times of all, after each step, and commits."""

    def __init__(self, size: int, micro_batches: int) -> None:
        self.micro_batches = micro_batches
        self.generation = 0
        self.paces = [Pace() for _ in range(size)]
        self.changes = 0
        self.form(size)

    def form(self, size: int) -> None:
        """Begin a generation; what the one before had fixed is gone."""
        self.generation += 1
        self.paces = [*self.paces[:size], *(Pace() for _ in range(size - len(self.paces)))]
        self.ranks = [
            Balance((self.generation, rank, size), self.micro_batches) for rank in range(size)
        ]
        self.announced: dict[int, list[range]] = {}
        self.number = 0

    def step(self, speeds: Any, commit: bool = True) -> tuple[int, ...]:
        """Take a step, and return the quotas of it."""
        number, self.number = self.number, self.number + 1
        blocks = [balance.begin(number) for balance in self.ranks]
        assert len(set(blocks)) == 1
        quotas = blocks[0].quotas
        for coming in (number, number + 1):  # as fetched, once and for all
            block = [balance.schedule.at(coming) for balance in self.ranks]
            assert self.announced.setdefault(coming, block) == block
            assert [v for each in block for v in each] == list(range(self.micro_batches))
        assert [len(block) for block in self.announced[number]] == list(quotas)
        for pace, quota, speed in zip(self.paces, quotas, speeds, strict=True):
            if quota:
                pace.note(speed)
            else:
                pace.note_idle()
        if commit:
            times = tuple(pace.seconds for pace in self.paces)
            answers = {balance.consider(times, self.number) for balance in self.ranks}
            assert len(answers) == 1
            self.changes += bool(answers.pop())
        return quotas


@given(
    size=st.integers(1, 5),
    micro_batches=st.integers(1, 17),
    seed=st.integers(0, 2**32),
    commit_every=st.integers(1, 4),
)
@settings(max_examples=60, deadline=None)
def test_ranks_never_disagree_whatever_joins_fails_or_slows_down(
    size: int, micro_batches: int, seed: int, commit_every: int
) -> None:
    dice = random.Random(seed)
    world = World(size, micro_batches)
    speeds = [1.0] * size
    for number in range(120):
        if dice.random() < 0.04:
            size = dice.randint(1, 5)
            world.form(size)
            speeds = [dice.choice((1.0, 1.0, 2.5, 9.0)) for _ in range(size)]
        if dice.random() < 0.1:
            speeds[dice.randrange(size)] = dice.uniform(0.5, 8.0)
        world.step([speed * dice.uniform(0.7, 1.4) for speed in speeds], number % commit_every == 0)


@given(
    speeds=st.lists(st.floats(1.0, 4.0), min_size=1, max_size=6),
    micro_batches=st.integers(6, 24),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=60, deadline=None)
def test_quotas_settle_at_once_and_noise_does_not_move_them(
    speeds: list[float], micro_batches: int, seed: int
) -> None:
    dice = random.Random(seed)
    world = World(len(speeds), micro_batches)
    for _ in range(LEAST_STEPS + 2):
        found = world.step(speeds)
    settled = world.changes
    assert settled <= 1
    steps = [world.step([speed * dice.uniform(0.99, 1.01) for speed in speeds]) for _ in range(50)]
    assert settled == 0 or set(steps) == {found}
    assert world.changes <= 1


def test_a_rank_that_has_nothing_is_timed_again_more_and_more_rarely() -> None:
    world = World(4, 4)
    slow = (1.0, 1.0, 1.0, 3.0)
    quotas = [world.step(slow) for _ in range(20 * PATIENCE)]
    assert quotas[LEAST_STEPS + 2] == (2, 1, 1, 0)
    tried = sum(each[3] for each in quotas[LEAST_STEPS + 2 :])
    assert 0 < tried <= 5 * (LEAST_STEPS + 2)  # 64, 128, 256, 512, … steps apart
    while world.step(slow)[3]:
        pass
    again = [world.step((1.0,) * 4) for _ in range(64 * PATIENCE)]
    assert again[-1] == (1, 1, 1, 1)
    recovered = again.index((1, 1, 1, 1))
    assert set(again[recovered:]) == {(1, 1, 1, 1)}


def test_what_is_fixed_ends_with_its_generation() -> None:
    world = World(4, 16)
    while not world.changes:
        world.step((1.0, 1.0, 1.0, 3.0))
    assert world.ranks[0].coming == (5, 5, 5, 1)
    world.form(3)
    assert world.ranks[0].coming == ()
    assert world.step((1.0, 1.0, 1.0)) == (5, 5, 6)


def test_an_epoch_begins_with_what_was_fixed_in_the_one_before() -> None:
    balance = Balance((1, 3, 4), 16)
    assert balance.consider((1, 1, 1, 3), 10) == (4, 4, 4, 4)
    assert balance.consider((1, 1, 1, 1), 10) == ()  # one change at a time
    assert balance.schedule.at(10) == range(12, 16)
    assert balance.schedule.at(11) == range(15, 16)
    balance.begin_epoch()
    assert balance.schedule.at(0) == range(15, 16)
    assert balance.consider((1, 1), 1) == ()  # of another world
