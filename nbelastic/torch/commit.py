"""A commit: what there is to know of a state at a moment, and how to go back to it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nbelastic.elastic.sampler import ShardSampler
from nbelastic.torch.generators import GeneratorStates
from nbelastic.torch.handlers import change, note, things_in
from nbelastic.torch.snapshot import Builder, Recorder

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from nbelastic.elastic.sampler import SamplerSnapshot
    from nbelastic.torch.snapshot import Node, Thing

__all__ = ["Commit", "put_together", "take_apart"]


@dataclass(frozen=True)
class Commit:
    """All of a state but its tensors' values, which are kept elsewhere or where they are."""

    nodes: dict[str, Node]
    noted: list[Thing]
    things: list[object]
    owners: list[torch.Tensor]
    addresses: list[int]
    samplers: list[tuple[ShardSampler, SamplerSnapshot]]
    generators: GeneratorStates

    def restore(self, tensors: Sequence[torch.Tensor]) -> dict[str, Any]:
        """Make everything as it was; return the values by name.

        Parameters
        ----------
        tensors : sequence of torch.Tensor
            The value of each of `owners`: a copy, or where it is held, the owner.
        """
        builder = Builder(
            tensors, self.things, change, owners=self.owners, addresses=self.addresses
        )
        values = put_together(builder, self.noted, self.nodes)
        for sampler, snapshot in self.samplers:
            sampler.go_back(snapshot)
        self.generators.restore()
        return values


def take_apart(values: Mapping[str, Any]) -> Commit:
    """Return what there is to know of `values` now."""
    things = things_in(values.values())
    recorder = Recorder(things, note)
    nodes = {name: recorder.record(value) for name, value in values.items()}
    return Commit(
        nodes,
        recorder.noted,
        things,
        recorder.tensors,
        [owner.data_ptr() for owner in recorder.tensors],
        [(each, each.snapshot()) for each in things if isinstance(each, ShardSampler)],
        GeneratorStates(),
    )


def put_together(builder: Builder, noted: list[Thing], nodes: dict[str, Node]) -> dict[str, Any]:
    """Return values by name; things are changed in place."""
    for thing in noted:  # first: tensors that they share with values stay theirs
        builder.build(thing)
    built = {name: builder.build(node) for name, node in nodes.items()}
    builder.flush()
    return built
