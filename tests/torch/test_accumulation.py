"""Commits between the backward passes of a step would lose what is accumulated."""

from __future__ import annotations

import pytest
import torch

import nbelastic.torch as hvd
from nbelastic.torch.state.torch_state import TorchState
from tests.support.world import StaticContext, run_ranks


def accumulating(call: str, passes: int = 2) -> None:
    def main(_: StaticContext) -> None:
        model = torch.nn.Linear(3, 1)
        plain = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = hvd.DistributedOptimizer(plain, backward_passes_per_step=passes)
        state = TorchState(model, held={"optimizer": optimizer})
        for number in range(2 * passes):
            model(torch.ones(2, 3)).sum().backward()
            if number % passes == passes - 1:
                optimizer.step()
                optimizer.zero_grad()
            if number % passes == passes - 1 or call != "after step()":
                getattr(state, "commit" if call == "after step()" else call)()

    run_ranks(2, main)


@pytest.mark.parametrize("call", ["commit", "save", "check_host_updates"])
def test_a_commit_between_the_backward_passes_of_a_step_is_refused(call: str) -> None:
    with pytest.raises(RuntimeError, match="between the backward passes of one step"):
        accumulating(call)


@pytest.mark.parametrize(("call", "passes"), [("after step()", 2), ("commit", 1)])
def test_a_commit_after_each_step_is_not(call: str, passes: int) -> None:
    accumulating(call, passes)
