"""Commits without copies: exact while the pattern lasts, whole when it breaks."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import nbelastic.torch as hvd
from nbelastic.elastic.ranks.context import current
from nbelastic.torch.state import lazy_commit
from nbelastic.torch.state.lazy_commit import LEARNED
from nbelastic.torch.state.torch_state import TorchState
from tests.torch.test_torch_restore import Training

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True, scope="module")
def _a_world_of_one() -> Iterator[None]:
    hvd.init()
    yield
    hvd.shutdown()


class Watched(Training):
    """A training with an independent account of what a restore must give."""

    def __init__(self, kind: str, *, extra: bool = False) -> None:
        super().__init__(kind, extra=extra)
        self.context = current()
        self.context.ahead = False
        self.account(self.bits())

    def account(self, committed: object) -> None:
        self.expected = committed
        self.copied = not self.uncopied
        self.stepped = self.touched = self.replaced = False
        self.after_step: object = None

    @property
    def uncopied(self) -> bool:
        return self.state._lazy.uncopied

    def _break(self) -> None:
        """The commit's values are gone: what is there stands in, if anything has changed."""
        changed = self.stepped or self.touched
        if changed and not self.copied and not self.replaced:
            self.expected = self.bits() if self.touched else self.after_step
            self.replaced = True

    def commit(self, how: int) -> None:
        self.state.commit()
        self.account(self.bits())

    def exchange(self, how: int) -> None:
        self._break()
        self.context.communicator()

    def step(self, how: int) -> None:
        def stepping(*_: object) -> None:
            if self.touched:
                self._break()

        hook = self.optimizer.register_step_pre_hook(stepping)
        self.optimizer._optimizer_step_pre_hooks.move_to_end(hook.id, last=False)
        done = self.optimizer.register_step_post_hook(lambda *_: self._step_done())
        try:
            super().step(0)
        finally:
            hook.remove()
            done.remove()

    def _step_done(self) -> None:
        self.stepped, self.touched = True, False
        self.after_step = self.bits()

    def forward(self, how: int) -> None:
        self.net(torch.randn(4, 4))

    def touch(self, how: int) -> None:
        weight = self.net.first.weight
        self.touched = True
        with torch.no_grad():
            if how % 2:
                weight.add_(1)
            else:
                weight.data = weight.data.clone() + 1

    def restore(self, how: int) -> None:
        self._break()
        self.state.restore()
        assert self.bits() == self.expected
        assert self.context.ahead == self.replaced
        assert all(p.grad is None for p in self.net.parameters())
        self.stepped = self.touched = False


ACTIONS = st.tuples(
    st.sampled_from(
        ["exchange", "step", "forward", "touch", "values", "draw", "commit", "restore"]
    ),
    st.integers(0, 5),
)


@settings(deadline=None, max_examples=150)
@given(
    kind=st.sampled_from(["adam", "sgd", "tensor lr"]),
    extra=st.booleans(),
    learned=st.integers(0, LEARNED + 2),
    actions=st.lists(ACTIONS, max_size=14),
)
@example("adam", False, 3, [("exchange", 0), ("touch", 0), ("exchange", 0), ("step", 0)])
def test_restore_gives_the_commit_or_what_stands_in_for_it(
    kind: str, extra: bool, learned: int, actions: list[tuple[str, int]]
) -> None:
    training = Watched(kind, extra=extra)
    for _ in range(learned):
        for what in ("exchange", "forward", "step", "values", "commit"):
            training.happen(what, 1)
    assert training.uncopied == (learned >= LEARNED)
    for what, how in [*actions, ("restore", 0), ("restore", 0)]:
        training.happen(what, how)


@pytest.mark.parametrize("place", range(6))
def test_a_failure_at_any_point_of_a_step_takes_training_back_to_the_commit_before(
    place: int,
) -> None:
    """As commits follow each step, nothing can fail between a step and its commit."""
    training = Watched("adam")
    for _ in range(2 * LEARNED):
        for what in ("values", "exchange", "forward", "exchange", "step", "commit"):
            training.happen(what, 1)
    assert training.uncopied
    committed = training.bits()
    for what in ("values", "exchange", "forward", "exchange", "draw")[:place]:
        training.happen(what, 1)
    training.happen("restore", 0)
    assert training.bits() == committed
    assert not training.context.ahead
    for what in ("exchange", "step", "commit"):
        training.happen(what, 1)
    assert training.uncopied


def test_commits_at_another_pattern_are_copied() -> None:
    training = Watched("adam")
    for number in range(40):
        training.happen("exchange", 1)
        training.happen("step", 1)
        if number % 4 == 3:
            training.happen("commit", 1)
            assert not training.uncopied


def test_an_operation_between_step_and_commit_has_commits_copied() -> None:
    training = Watched("adam")
    for _ in range(3 * LEARNED):
        for what in ("exchange", "step", "exchange", "commit"):
            training.happen(what, 1)
        assert not training.uncopied


def test_tensors_that_others_change_between_commit_and_step_are_copied() -> None:
    training = Watched("adam")
    for _ in range(3 * LEARNED):
        for what in ("exchange", "touch", "step", "commit"):
            training.happen(what, 1)
        assert not training.uncopied


def test_who_wants_copies_has_them() -> None:
    training = Watched("adam")
    training.state.always_copy = True
    for _ in range(3 * LEARNED):
        for what in ("exchange", "step", "commit"):
            training.happen(what, 1)
        assert not training.uncopied


def test_nothing_is_copied_once_the_pattern_is_trusted() -> None:
    training = Watched("sgd")
    before = training.state._copies.nbytes
    for _ in range(LEARNED + 1):
        for what in ("exchange", "step", "commit"):
            training.happen(what, 1)
    small = sum(b.numel() * b.element_size() for b in training.net.buffers())
    assert training.state._copies.nbytes < before
    assert training.state._copies.nbytes < small + 20_000  # generators


def test_of_a_large_state_no_more_than_the_parameters_is_ever_copied(monkeypatch) -> None:
    monkeypatch.setattr(lazy_commit, "LARGE", 1)
    training = Watched("adam")
    stepped = [p for group in training.optimizer.param_groups for p in group["params"]]
    parameters = sum(p.numel() * p.element_size() for p in stepped)
    copied = []
    for _ in range(5):
        copied.append(training.state._copies.nbytes)
        for what in ("exchange", "step", "commit"):
            training.happen(what, 1)
    assert set(copied[1:]) == {copied[0] - parameters}


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("large", [False, True])
def test_a_pattern_that_only_begins_as_if_each_step_were_committed_is_seen_through(
    first: int, large: bool, monkeypatch
) -> None:
    monkeypatch.setattr(lazy_commit, "LARGE", 1 if large else lazy_commit.LARGE)
    training = Watched("adam")
    uncopied = []
    for number in range(first, 40):
        training.happen("exchange", 1)
        training.happen("step", 1)
        if number % 4 == 0:
            training.happen("commit", 1)
            uncopied.append(training.uncopied)
    assert uncopied == [first == 0 and large] + [False] * (len(uncopied) - 1)


def regular_commits(training: Watched, count: int) -> list[bool]:
    uncopied = []
    for _ in range(count):
        for what in ("exchange", "step", "commit"):
            training.happen(what, 1)
        uncopied.append(training.uncopied)
    return uncopied


def test_after_a_commit_that_was_not_what_it_was_trusted_to_be_all_are_copied() -> None:
    training = Watched("adam")
    assert regular_commits(training, LEARNED + 1)[-1]
    for what in ("exchange", "step", "exchange", "commit"):
        training.happen(what, 1)
    assert not any(regular_commits(training, 5 * LEARNED))


def test_a_commit_without_a_step_says_nothing() -> None:
    training = Watched("adam")
    for _ in range(LEARNED):
        assert not training.uncopied
        for what in ("exchange", "commit", "step", "commit"):
            training.happen(what, 1)
    training.happen("commit", 1)
    assert training.uncopied


def test_two_states_watch_at_once() -> None:
    some, others = Watched("adam"), Watched("sgd")
    for _ in range(LEARNED + 1):
        for what in ("exchange", "step", "commit"):
            some.happen(what, 1)
            others.happen(what, 1)
    assert some.uncopied
    assert others.uncopied
    for training in (some, others):
        training.happen("step", 1)
    some._break()
    others.happen("exchange", 1)
    for training in (some, others):
        training.happen("restore", 1)


def test_a_state_is_not_kept_alive_by_its_optimizer_and_a_copied_optimizer_is_not_watched() -> None:
    net = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    state = TorchState(net, optimizer)
    other = copy.deepcopy(optimizer)
    state.save()
    other.step()
    assert not state._lazy.stepped
    optimizer.step()
    assert state._lazy.stepped
    alive = weakref.ref(state)
    del state
    gc.collect()
    assert alive() is None
    optimizer.step()
