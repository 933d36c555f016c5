"""An operation of a reader's own: of each tensor, its sum over this rank and those before it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import pytest
import torch

import nbelastic.torch as hvd
from nbelastic.errors import RanksDisagree
from nbelastic.torch.ops.coordination.comparison import begin
from nbelastic.torch.ops.coordination.process_sets import group_of
from nbelastic.torch.ops.operation.tensor_operations import (
    Pending,
    TensorOperation,
    called,
    check_dense,
    kinds,
)
from tests.collectives.worlds import SOME_KINDS
from tests.support.world import StaticContext
from tests.torch.ranks import on_ranks

if TYPE_CHECKING:
    from nbelastic.collectives import Communicator, Handle


class PrefixSum(TensorOperation[torch.Tensor]):
    verb = "prefix_sum"

    def __init__(self, tensor: torch.Tensor, name: str | None = None) -> None:
        check_dense(tensor)
        self._tensor = tensor
        self._everyone: list[torch.Tensor] = []
        self.pattern = called("prefix_sum", name), kinds([tensor])

    def load(self) -> None:
        self._tensor = self._tensor.detach().clone(memory_format=torch.contiguous_format)

    def launch(self, communicator: Communicator, _numbers: object) -> Sequence[Handle]:
        self._everyone = [torch.empty_like(self._tensor) for _ in range(communicator.size)]
        return [communicator.allgather_async(self._everyone, self._tensor)]

    def store(self) -> torch.Tensor:
        return torch.stack(self._everyone[: self.rank + 1]).sum(0, dtype=self._tensor.dtype)


def prefix_sum_async(
    tensor: torch.Tensor, name: str | None = None, process_set: object = None
) -> Pending[torch.Tensor]:
    return begin(group_of(process_set), PrefixSum(tensor, name), name)


@pytest.mark.parametrize("name", [None, "sum"])
@on_ranks(3, kinds=SOME_KINDS)
def test_each_rank_has_the_sum_of_the_ranks_up_to_its_own(
    context: StaticContext, name: str | None
) -> str:
    """Ranks with different shapes all get the error, and go on."""
    with pytest.raises(RanksDisagree) as error:
        prefix_sum_async(torch.ones(2, 3 + context.rank), name).wait()
    assert all(f"of float32[2, {3 + rank}]" in str(error.value) for rank in range(3))
    tensor = torch.tensor([[1.0, 10.0], [2.0, 20.0]]).t() * (context.rank + 1)  # not contiguous
    pending = prefix_sum_async(tensor, name, process_set=hvd.global_process_set)
    tensor.zero_()
    n = (1.0, 3.0, 6.0)[context.rank]
    assert pending.wait().tolist() == [[n, 2 * n], [10 * n, 20 * n]]
    return str(error.value)
