"""Optimizers that wrap others or keep state of their own: restored, sent and written exactly."""

from __future__ import annotations

import logging
import random
from typing import Any

import pytest
import torch
from torch import nn

import nbelastic.torch as hvd
from nbelastic.elastic.checkpoint.manager import CheckpointManager
from nbelastic.errors import NbelasticError
from nbelastic.torch.identity import same
from nbelastic.torch.state.lazy_commit import LEARNED
from nbelastic.torch.state.torch_state import TorchState
from tests.elastic.members import begin, make_member, written
from tests.support.world import StaticContext, run_ranks
from tests.torch import wrappers
from tests.torch.nets import bits


def sgd(net: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)


def hooked(net: nn.Module) -> torch.optim.SGD:
    """Return an optimizer whose state dict is extended by hooks."""
    optimizer = sgd(net)
    optimizer.scale = 1.0
    optimizer.register_step_post_hook(_halve)
    optimizer.register_state_dict_post_hook(lambda opt, found: {**found, "scale": opt.scale})
    optimizer.register_load_state_dict_pre_hook(_take_scale)
    return optimizer


def _halve(optimizer: Any, *_: Any) -> None:
    optimizer.scale *= 0.7
    optimizer.param_groups[0]["lr"] = 0.1 * optimizer.scale


def _take_scale(optimizer: Any, found: dict) -> None:
    optimizer.scale = found["scale"]


KINDS = {
    "sam": lambda net: wrappers.Sam(net.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9),
    "lookahead by identity": lambda net: wrappers.KeyedLookahead(sgd(net)),
    "lookahead in a state dict": lambda net: wrappers.NestedLookahead(sgd(net)),
    "schedule-free": lambda net: wrappers.ScheduleFree(sgd(net)),
    "averaging": lambda net: wrappers.Averaging(net.parameters(), lr=0.1, momentum=0.9),
    "counting": lambda net: wrappers.Counting(net.parameters(), lr=0.1, momentum=0.9),
    "no optimizer": lambda net: wrappers.Plain(sgd(net)),
    "twice": lambda net: wrappers.NestedLookahead(
        wrappers.Sam(net.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
    ),
    "hooks": hooked,
}

every_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())


class Training:
    def __init__(self, kind: Any, rank: int = 0) -> None:
        self.net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
        with torch.no_grad():
            for number, parameter in enumerate(self.net.parameters()):
                generator = torch.Generator().manual_seed(number + 10 * rank)
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
        self.optimizer = kind(self.net)
        self.state = TorchState(self.net, self.optimizer, batch=0)

    def loss(self) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.state.batch)
        loss = self.net(torch.randn(5, 3, generator=generator)).square().mean()
        loss.backward()
        return loss

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            getattr(self.optimizer, "train", lambda: None)()
            self.optimizer.zero_grad()
            self.loss()
            if isinstance(getattr(self.optimizer, "optimizer", self.optimizer), wrappers.Sam):
                self.optimizer.step(self.loss)
            else:
                self.optimizer.step()
            self.state.batch += 1

    def bits(self) -> object:
        getattr(self.optimizer, "eval", lambda: None)()
        return bits(list(self.net.parameters()))


def undisturbed(kind: Any, steps: int) -> object:
    training = Training(kind)
    training.step(steps)
    return training.bits()


@every_kind
@pytest.mark.parametrize("commits", [0, LEARNED + 2])
@pytest.mark.parametrize("copied", [True, False])
def test_going_back_is_exact(kind: Any, commits: int, copied: bool) -> None:
    hvd.init()
    try:
        training = Training(kind)
        training.state.always_copy = copied
        for _ in range(commits):
            training.step()
            training.state.commit()
        if copied:
            training.step(2)
        else:
            training.loss()
        training.bits()
        training.state.restore()
        training.step(5)
        assert training.state.batch == commits + 5
        assert training.bits() == undisturbed(kind, commits + 5)
    finally:
        hvd.shutdown()


@every_kind
def test_what_stands_in_for_a_commit_is_the_same_on_all_ranks(kind: Any) -> None:
    def main(context: StaticContext) -> object:
        training = Training(kind)
        for _ in range(LEARNED + 2):
            training.step()
            training.state.commit()
        training.step()
        hvd.allreduce(torch.zeros(1))
        training.step()
        training.state.restore()
        training.state.batch = 0
        training.step(3)
        return training.bits()

    first, second = run_ranks(2, main)
    assert first == second


@every_kind
@pytest.mark.parametrize("steps", [0, 4])
def test_a_newcomer_goes_on_exactly(kind: Any, steps: int) -> None:
    def main(context: StaticContext) -> object:
        training = Training(kind, context.rank)
        if context.rank == 0:
            training.step(steps)
        training.state.align([1])
        training.state.save()
        training.step(2)
        training.state.restore()
        training.step(5)
        return training.bits()

    first, second = run_ranks(2, main)
    assert first == second == undisturbed(kind, steps + 5)


@every_kind
def test_a_checkpoint_is_gone_on_from_exactly(kind: Any, tmp_path: Any) -> None:
    def main(context: StaticContext, run: str, steps: int) -> object:
        plan = make_member(context, tmp_path, run=run, resume=True)
        training = Training(kind, rank=0 if run == "a" else 1)
        with CheckpointManager(context, training.state, 1) as checkpoints:
            begin(context, training.state, checkpoints, plan)
            training.step(steps)
            training.state.commit()
            written(checkpoints)
            checkpoints.finish()
        return training.bits()

    run_ranks(1, lambda context: main(context, "a", 4))
    (found,) = run_ranks(1, lambda context: main(context, "b", 5))
    assert found == undisturbed(kind, 9)


def test_what_optimizers_share_stays_shared() -> None:
    training = Training(KINDS["lookahead by identity"])
    training.step(2)
    training.state.save()
    training.step(1)
    training.state.restore()
    outer = training.optimizer
    assert outer.param_groups is outer.optimizer.param_groups
    assert outer.fast_state is outer.optimizer.state
    for group in outer.param_groups:
        assert same(group["params"], list(training.net.parameters()))


class ZeroRedundancyOptimizer(torch.optim.SGD):
    pass


class Kept:
    def __init__(self, value: Any) -> None:
        self.value = value


def with_attribute(value: Any) -> Any:
    def make(net: nn.Module) -> Any:
        class Hiding(torch.optim.SGD):
            rho, note, called = 0.5, ("a", 1), staticmethod(abs)

        optimizer = Hiding(net.parameters(), lr=0.1)
        optimizer.first = next(net.parameters())
        optimizer.kept = value
        return optimizer

    return make


def with_slots(net: nn.Module) -> Any:
    class Slotted(torch.optim.SGD):
        __slots__ = ("means",)

    return Slotted(net.parameters(), lr=0.1)


def without_state_dict(net: nn.Module) -> Any:
    class Bare:
        def __init__(self) -> None:
            self.inner = sgd(net)

    return Bare()


def that_does_not_load(net: nn.Module) -> Any:
    class Refusing(torch.optim.SGD):
        def load_state_dict(self, state_dict: Any) -> None:
            raise KeyError("slow")

    return Refusing(net.parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (with_attribute([0.5]), r"Hiding.kept \(a list\) holds values that a state cannot see"),
        (with_attribute({"m": torch.ones(1)}), r"Hiding.kept \(a dict\) holds values"),
        (with_attribute(torch.ones(1)), r"Hiding.kept \(a Tensor\) holds values"),
        (with_attribute(random.Random(1)), r"Hiding.kept \(a Random\) holds values"),
        (with_attribute(Kept(1)), r"Hiding.kept \(a Kept\) holds values .* give the class state_"),
        (with_slots, r"Slotted keeps attributes in __slots__, which a state cannot see"),
        (
            lambda net: ZeroRedundancyOptimizer(net.parameters(), lr=0.1),
            "a ZeroRedundancyOptimizer keeps of the optimizer's state only this rank's share",
        ),
        (without_state_dict, r"Bare in the state wraps an optimizer \(SGD\) that the state does"),
        (
            that_does_not_load,
            r"Refusing.load_state_dict\(\) does not take what .* has given: KeyError\('slow'\)",
        ),
    ],
)
def test_what_cannot_be_exact_is_refused_by_name(make: Any, message: str) -> None:
    net = nn.Linear(2, 1)
    with pytest.raises(NbelasticError, match=message):
        TorchState(net, make(net))


@pytest.mark.parametrize("value", [0.5, "a", None, (1, 2)])
@pytest.mark.parametrize("other", [{}, abs, logging.getLogger()])
def test_plain_attributes_are_kept_and_what_cannot_change_is_not(value: Any, other: Any) -> None:
    net = nn.Linear(2, 1)
    optimizer = with_attribute(value)(net)
    optimizer.other = other
    state = TorchState(net, optimizer)
    optimizer.kept, optimizer.late = 7, 1
    state.restore()
    assert optimizer.kept == value
    assert not hasattr(optimizer, "late")


def test_a_wrapper_whose_optimizer_is_named_as_well_needs_no_state_dict() -> None:
    net = nn.Linear(2, 1)
    optimizer = sgd(net)

    class Bare:
        def __init__(self) -> None:
            self.inner = optimizer

    state = TorchState(net, optimizer, wrapper=Bare())
    state.restore()
    assert state.wrapper.inner is optimizer


class Quantised(nn.Linear):
    """A module that keeps a number by its state dict alone."""

    scale = 1.0

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "scale"] = torch.tensor(self.scale)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        self.scale = float(state_dict.pop(prefix + "scale"))
        super()._load_from_state_dict(state_dict, prefix, *args)


class Whole(nn.Sequential):
    steps = 0

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return {"inner": super().state_dict(*args, **kwargs), "steps": self.steps}

    def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        self.steps = state_dict["steps"]
        return super().load_state_dict(state_dict["inner"], *args, **kwargs)


def test_modules_that_override_their_state_dict_are_kept_by_it() -> None:
    def main(context: StaticContext) -> object:
        net = Whole(Quantised(2, 2), nn.Linear(2, 1))
        state = TorchState(net)
        if context.rank == 0:
            net.steps, net[0].scale = 3, 0.25
        weight = net[0].weight
        state.align([1])
        state.save()
        net.steps, net[0].scale = 9, 9.0
        weight.data.zero_()
        state.restore()
        assert net[0].weight is weight
        return net.steps, net[0].scale, bits(list(net.parameters()))

    first, second = run_ranks(2, main)
    assert first == second
    assert first[:2] == (3, 0.25)
