from __future__ import annotations

import random
import sys
from collections import OrderedDict
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

from nbelastic.torch.state.torch_state import TorchState
from tests.torch.nets import Net, adam, bits, generator_bits


@pytest.fixture(autouse=True, scope="module")
def _dask_has_random_numbers_of_its_own() -> Iterator[None]:
    """Dask's thread (of another test's cluster) draws from Python's generator when it likes."""
    with pytest.MonkeyPatch.context() as patch:
        for name, module in list(sys.modules.items()):
            if name.startswith(("dask", "distributed")) and vars(module).get("random") is random:
                patch.setattr(module, "random", random.Random())
        yield


class Training:
    """All that a state may hold, what can happen to it, and an independent view of its bits."""

    def __init__(self, kind: str, *, extra: bool = True) -> None:
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        self.net = Net()
        if not extra:  # then all of the model is parameters and buffers
            del self.net.extra
            self.net.extra = SimpleNamespace(calls=0)
        if kind == "adam":
            self.optimizer: torch.optim.Optimizer = adam(self.net, amsgrad=True)
        elif kind == "tensor lr":
            self.optimizer = adam(self.net, lr=torch.tensor(0.1), capturable=False, foreach=False)
        elif kind == "lbfgs":
            self.optimizer = torch.optim.LBFGS(
                [p for p in self.net.parameters() if p.requires_grad], lr=0.01, history_size=2
            )
        else:
            self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.5)
        self.warm = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1 / (1 + step))
        self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
        self.state = TorchState(
            self.net,
            self.optimizer,
            schedulers=[self.scheduler, {"warm": self.warm}],
            scaler=self.scaler,
            epoch=0,
            history=[{"loss": [1.0]}],
            table=OrderedDict(a=torch.zeros(2), b=(1, "x")),
            generator=torch.Generator().manual_seed(1),
        )

    def bits(self) -> list[object]:
        return [bits(self.state._values()), *generator_bits()]

    def happen(self, what: str, how: int) -> None:
        getattr(self, what)(how)

    def step(self, how: int) -> None:
        def loss() -> torch.Tensor:
            self.optimizer.zero_grad()
            return self.net(torch.randn(4, 4)).square().sum()

        def closure() -> torch.Tensor:
            found = loss()
            found.backward()
            return found

        if isinstance(self.optimizer, torch.optim.LBFGS):
            self.optimizer.step(closure)
        else:
            self.scaler.scale(loss()).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
        if how % 2:
            self.scheduler.step()
            self.warm.step()

    def values(self, how: int) -> None:
        state = self.state
        state.epoch += how
        state.history.append({"loss": [how]})
        state.history[0]["loss"].append(how)
        state.table["a"].add_(1)
        state.table["c"] = torch.ones(how)
        state.table.move_to_end("a")

    def draw(self, how: int) -> None:
        if how == 0:
            np.random.rand(1000)
        elif how == 1:
            random.gauss(0, 1)  # half of a pair: the next one draws no bits
            np.random.randn()
        elif how == 2:
            random.seed(7)
            np.random.seed(7)
        else:
            random.random()
            np.random.rand()
            torch.rand(1)
            torch.rand(1, generator=self.state.generator)

    def buffers(self, how: int) -> None:
        net = self.net
        if how == 0:
            net.seen = torch.full((2,), 7.0)
        elif how == 1:
            net.seen.resize_(4).fill_(1.5)
        elif how == 2:
            net.nothing = torch.ones(2)
        elif how == 3:
            net.nothing = None
        elif how == 4:
            net.register_buffer("late", torch.ones(3, dtype=torch.bfloat16))
        else:
            net.stretched = torch.full((1,), float(how)).expand(3)

    def parameters(self, how: int) -> None:
        net = self.net
        with torch.no_grad():
            if how == 0:
                net.frozen.add_(1)
            elif how == 1:
                moved = net.first.weight.data.clone()
                lbfgs = isinstance(self.optimizer, torch.optim.LBFGS)  # cannot do with strides
                net.first.weight.data = moved if lbfgs else moved.t()
            elif how == 2:
                net.frozen.data = net.first.bias.data  # now both look at the same memory
            elif how == 3:
                net.frozen.requires_grad_(not net.frozen.requires_grad)
            elif how == 4:
                net.first.bias = nn.Parameter(torch.zeros(4))
            else:
                net.register_parameter("late_weight", nn.Parameter(torch.ones(2)))

    def group(self, how: int) -> None:
        self.optimizer.param_groups[0]["lr"] *= 0.5
        self.optimizer.param_groups[0]["note"] = [how]


HAPPENINGS = ["step", "values", "draw", "buffers", "parameters", "group"]


@settings(deadline=None, max_examples=60)
@given(
    kind=st.sampled_from(["adam", "sgd", "tensor lr", "lbfgs"]),
    extra=st.booleans(),
    events=st.lists(
        st.one_of(
            st.tuples(st.sampled_from(HAPPENINGS), st.integers(0, 5)),
            st.tuples(st.sampled_from(["commit", "restore"]), st.just(0)),
        ),
        max_size=14,
    ),
)
@example("sgd", True, [("draw", 1), ("commit", 0), ("draw", 1), ("commit", 0), ("draw", 1)])
def test_N7_restore_is_exact_whatever_happened_since(kind: str, extra: bool, events: list) -> None:
    training = Training(kind, extra=extra)
    committed = training.bits()
    identities = [id(p) for p in training.net.parameters()]
    for what, how in [*events, ("restore", 0)]:
        if what == "commit":
            training.state.save()
            committed = training.bits()
            identities = [id(p) for p in training.net.parameters()]
        elif what == "restore":
            training.state.restore()
            assert training.bits() == committed
            assert [id(p) for p in training.net.parameters()] == identities
            assert all(p.grad is None for p in training.net.parameters())
        else:
            training.happen(what, how)


def test_a_state_of_numpys_generator_is_taken_anew_once_another_one_is_put_back() -> None:
    one, other = TorchState(), TorchState()
    drawn = []
    for state in (one, other):  # the second number of a pair of normal ones leaves no mark
        np.random.randn()
        state.save()
    one.restore()
    for _ in range(2):
        one.save()
        drawn.append(np.random.randn())
        one.restore()
    assert drawn[0] == drawn[1]
