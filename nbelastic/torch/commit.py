"""A commit: what there is to know of a state at a moment, and how to go back to it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from nbelastic.elastic.sampler import ShardSampler
from nbelastic.torch.generators import GeneratorStates
from nbelastic.torch.handlers import change, labels_of, models_first, note, things_in
from nbelastic.torch.identity import same
from nbelastic.torch.outline import Outlined, renote
from nbelastic.torch.snapshot import ATOMS, Builder, Recorder, Thing

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from nbelastic.elastic.sampler import SamplerSnapshot
    from nbelastic.torch.snapshot import Node

__all__ = ["Commit", "put_together", "take_apart"]


_address_of = torch.Tensor.data_ptr


@dataclass(slots=True)
class Commit:
    """All of a state but its tensors' values, which are kept elsewhere or where they are.

    The tensors of models and optimizers that are `outlined` come first; so much of a commit need
    not be looked for again in the next one.
    """

    nodes: dict[str, Node]
    noted: list[Thing]
    outlined: Outlined
    owners: list[torch.Tensor]
    addresses: list[int]
    samplers: list[tuple[ShardSampler, SamplerSnapshot]]
    generators: GeneratorStates

    @property
    def things(self) -> list[object]:
        """Models, optimizers and all else with a handler."""
        return self.outlined.things

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


def take_apart(values: Mapping[str, Any], before: Commit | None = None) -> Commit:
    """Return what there is to know of `values` now; `before` is a commit to learn from."""
    known = None if before is None else before.outlined
    things: list[object] = [each for each in values.values() if type(each) not in ATOMS]
    if known is None or not same(things, known.things):
        things = things_in(values.values())
    recorder = Recorder(things, note)
    if known is not None and known.still(things):
        recorder.resume(known.tensors, known.slots)
        for node, options in zip(known.noted, known.options, strict=True):
            thing = things[node.number]
            recorder.adopt(thing, renote(recorder, thing, node, options))
    else:
        known = Outlined(things, labels_of(things, values))
        for thing, told in zip(things, known.told, strict=True):
            if told:
                recorder.record(thing)
        known.fill(recorder.noted, recorder.tensors)
    nodes = {name: recorder.record(value) for name, value in values.items()}
    return Commit(
        nodes,
        recorder.noted,
        known,
        recorder.tensors,
        list(map(_address_of, recorder.tensors)),
        [(each, each.snapshot()) for each in things if isinstance(each, ShardSampler)],
        GeneratorStates(None if before is None else before.generators),
    )


def put_together(builder: Builder, noted: list[Thing], nodes: dict[str, Node]) -> dict[str, Any]:
    """Return values by name; things are changed in place."""
    for thing in models_first(noted, builder.things):  # tensors that others share stay theirs
        builder.build(thing)
    built = {name: builder.build(node) for name, node in nodes.items()}
    builder.flush()
    return built
