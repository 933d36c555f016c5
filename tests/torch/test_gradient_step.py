"""The contract between the reducer and a step, with a step of a reader's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import nbelastic.torch as hvd
from nbelastic.elastic.ranks.context import activate
from nbelastic.errors import CollectiveError
from nbelastic.torch.gradients.step import GradientStep
from tests.torch.fakes import ChangingContext, TwinCommunicator
from tests.torch.training import loss_of, make_model


class DoublingStep(GradientStep):
    """Doubles each gradient when it is delivered, and records what the reducer calls."""

    calls: list[str]
    fails = False

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.calls, self.arrived = [], []

    @property
    def has_gradients(self) -> bool:
        return bool(self.arrived)

    @property
    def concerns_peers(self) -> bool:
        return "finish" in self.calls

    def arrive(self, parameters: Any) -> None:
        self.arrived += parameters

    def check(self, trained: list[torch.Tensor]) -> None:
        self.calls.append("check")

    def prepare(self) -> None:
        self.calls.append("prepare")

    def finish(self) -> None:
        self.calls.append("finish")
        if self.fails:
            raise CollectiveError("a peer is gone")
        for parameter in self.arrived:
            parameter.grad.mul_(2)


@pytest.mark.parametrize("fails", [False, True])
def test_a_step_is_driven_by_its_contract_alone(fails, monkeypatch):
    monkeypatch.setattr(DoublingStep, "fails", fails)
    with activate(ChangingContext(TwinCommunicator(generation=1))):
        model = make_model()
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1))
        made = []

        def new_step(*args):
            made.append(DoublingStep(*args))
            return made[-1]

        optimizer._reducer._new_step = new_step
        loss_of(model, 0).backward()
        local = model[0].bias.grad.clone()
        assert optimizer._reducer.pending
        if fails:
            with pytest.raises(CollectiveError, match="a peer is gone"):
                optimizer.synchronize()
            assert all(parameter.grad is None for parameter in model.parameters())
        else:
            optimizer.synchronize()
            assert torch.equal(model[0].bias.grad, 2 * local)
        assert not optimizer._reducer.pending
    (step,) = made
    assert step.calls == ["check", "prepare", "finish"]
    assert len(step.arrived) == len(list(model.parameters()))
