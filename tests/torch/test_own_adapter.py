"""An adapter of a reader's own: an object of a foreign class in a state, in place and exactly."""

from __future__ import annotations

from typing import Any

import torch

from nbelastic.torch.state.flatten import Adapter, Flattener, Unflattener, mapping
from nbelastic.torch.state.torch_state import TorchState
from tests.support.world import StaticContext, run_ranks


class LedgerAdapter(Adapter):
    def capture(self, flattener: Flattener, obj: Ledger) -> Any:
        return mapping({"sums": flattener.flatten(obj.sums), "count": flattener.flatten(obj.count)})

    def restore(self, unflattener: Unflattener, obj: Ledger, content: Any) -> None:
        sums, count = content.nodes
        obj.sums = unflattener.tensor(sums, obj.sums)
        obj.count = unflattener.unflatten(count)

    def parts(self, label: str, content: Any, names: Any) -> Any:
        return {("ledger", label): names.words[content.nodes[0]]}


class Ledger:
    nbelastic_adapter = LedgerAdapter

    def __init__(self, number: int) -> None:
        self.sums = torch.full((3,), float(number))
        self.count = number
        self.lines = (number for number in range(3))  # can neither be copied nor sent


def test_an_object_is_restored_and_sent_in_place() -> None:
    def main(context: StaticContext) -> object:
        ledger = Ledger(context.rank)
        sums = ledger.sums
        state = TorchState(ledger=ledger)
        if context.rank == 0:
            ledger.count = 7
            ledger.sums.add_(5)
        state.align([1])
        state.save()
        ledger.count = 9
        ledger.sums.zero_()
        state.restore()
        assert state.ledger is ledger
        assert ledger.sums is sums
        return ledger.count, ledger.sums.tolist()

    assert run_ranks(2, main) == [(7, [5.0, 5.0, 5.0])] * 2


def test_a_checkpoint_has_it_as_a_state_dict() -> None:
    state = TorchState(ledger=Ledger(2))
    found = state._as_dict(state._pack_commit(), [])
    assert found["ledger"]["count"] == 2
    assert found["ledger"]["sums"].tolist() == [2.0, 2.0, 2.0]
