"""Commits without copies: exact while the pattern lasts, whole when it breaks."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

import nbelastic.torch as hvd
from nbelastic.elastic.ranks.context import current
from nbelastic.torch.state import lazy_commit
from nbelastic.torch.state.lazy_commit import LEARNED
from nbelastic.torch.state.torch_state import TorchState
from tests.torch.nets import bits
from tests.torch.test_torch_restore import Training


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


@settings(deadline=None, max_examples=30)
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


STEP = ("exchange", "step")
EACH, FOURTH = (*STEP, "commit"), (*STEP * 4, "commit")


# What happens, and which commits are copied (c) or not (-).
PATTERNS: dict[str, tuple[tuple[str, ...], str]] = {
    "each fourth step": (FOURTH * 9, "ccccccccc"),
    "each fourth step of a large state": (FOURTH * 9, "ccccccccc"),
    "at first as if of each step": (EACH + FOURTH * 9, "cccccccccc"),
    "at first as if of each step of a large state": (EACH + FOURTH * 9, "-ccccccccc"),
    "after an operation": ((*STEP, "exchange", "commit") * 9, "ccccccccc"),
    "tensors are changed": (("exchange", "touch", "step", "commit") * 9, "ccccccccc"),
    "copies are wanted": (EACH * 9, "ccccccccc"),
    "each step": (EACH * 4, "cc--"),
    "trusted once in vain": (
        EACH * 4 + (*STEP, "exchange", "commit") + EACH * 15,
        "cc--cccccccccccccccc",
    ),
    "some without a step": (("exchange", "commit", "step", "commit") * 3, "ccccc-"),
}


@pytest.mark.parametrize("name", PATTERNS)
def test_which_commits_are_copied(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if "large" in name:
        monkeypatch.setattr(lazy_commit, "LARGE", 1)
    training = Watched("adam")
    training.state.always_copy = name == "copies are wanted"
    actions, expected = PATTERNS[name]
    found = ""
    for what in actions:
        training.happen(what, 1)
        if what == "commit":
            found += "-" if training.uncopied else "c"
    assert found == expected


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


# -- changes through .data, which leave no mark ----------------------------------------------------


def _decay(net: nn.Module) -> None:
    for parameter in net.parameters():
        parameter.data.mul_(0.9)


def _row(net: nn.Module) -> None:
    net[0].weight.data[1] /= 2


def train_and_fail(steps: int, change: Any, fail_at: int = -1) -> Any:
    """Train and commit each step; fail once between the change and the step, and go back."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    state = TorchState(net, optimizer, step=0)
    state.save()
    failed = False
    while state.step < steps:
        optimizer.zero_grad()
        net(torch.full((2, 4), float(state.step))).sum().backward()
        change(net)
        if state.step == fail_at and not failed:
            failed = True
            state.restore()
            continue
        optimizer.step()
        state.step += 1
        state.commit()
    return bits(net), state._lazy.uncopied


@pytest.mark.parametrize("change", [_decay, _row])
@pytest.mark.parametrize(("fail_at", "large"), [(1, False), (3, False), (11, False), (5, True)])
def test_a_failure_does_not_apply_them_twice(
    change: Any, fail_at: int, large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lazy_commit, "LARGE", 1 if large else lazy_commit.LARGE)
    assert train_and_fail(14, change, fail_at)[0] == train_and_fail(14, change)[0]


def test_changes_that_begin_later_are_noticed_sometime() -> None:
    calls: list[int] = []

    def late(net: nn.Module) -> None:
        calls.append(1)
        if len(calls) > 6:
            _decay(net)

    assert not train_and_fail(12, late)[1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.complex64])
@pytest.mark.parametrize("value", [1.0, float("nan")])
def test_values_of_any_type_and_no_numbers_are_no_change(dtype: torch.dtype, value: float) -> None:
    weight = nn.Parameter(torch.full((3,), value, dtype=dtype))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    state = TorchState(None, optimizer)
    for _ in range(6):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        state.commit()
    assert state._lazy.uncopied
