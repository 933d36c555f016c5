"""Buckets of an optimizer's gradients, on which its ranks agree."""

from __future__ import annotations

import itertools
import os
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from nbelastic.collectives import Communicator, SoloCommunicator
from nbelastic.elastic.ranks.context import Context
from nbelastic.errors import CollectiveError
from nbelastic.torch.gradients.arrived import ArrivedGradients, same
from nbelastic.torch.gradients.groups import Bucket
from nbelastic.torch.gradients.options import ReduceOptions
from nbelastic.torch.ops.coordination.process_sets import group_in
from nbelastic.torch.ops.operation.tensor_operations import kind_of

BUCKET_BYTES = 25 << 20
# The first of several is small, so that the network has something to do early.
FIRST_BUCKET_BYTES = 1 << 20


def groups_of(
    parameters: Sequence[torch.Tensor],
    order: Sequence[int],
    groups: int | tuple[tuple[torch.Tensor, ...], ...],
) -> list[list[int]]:
    """Return the indices in each group that a user asks for; a number is of about equal ones."""
    if isinstance(groups, int):
        count = min(groups, len(order))
        bounds = [number * len(order) // count for number in range(count + 1)] if count else []
        return [list(order[a:b]) for a, b in itertools.pairwise(bounds)]
    index_of = {id(parameter): index for index, parameter in enumerate(parameters)}
    return [[index_of[id(p)] for p in group if id(p) in index_of] for group in groups]


def fusion_threshold() -> int:
    """Return the size of a full bucket: ``HOROVOD_FUSION_THRESHOLD``, if that is set."""
    text = os.environ.get("HOROVOD_FUSION_THRESHOLD", "")
    return int(text) if text.isdecimal() else BUCKET_BYTES


def plan_buckets(
    parameters: Sequence[torch.Tensor],
    order: Sequence[int],
    full: int,
    wire_dtype: Callable[[torch.dtype], torch.dtype],
    groups: Iterable[Sequence[int]] = (),
) -> list[list[int]]:
    """Distribute parameters over buckets, because each operation has a price of its own.

    `order` has their indices as their gradients are expected; a bucket of `full` bytes is full.
    """
    expected = {index: place for place, index in enumerate(order)}
    group_of = {index: number for number, group in enumerate(groups) for index in group}

    def bytes_of(index: int) -> int:
        return parameters[index].numel() * wire_dtype(parameters[index].dtype).itemsize

    several = sum(bytes_of(index) for index in order if index not in group_of) > full
    done: list[list[int]] = []
    filling: dict[tuple[object, ...], list[int]] = {}
    sizes: dict[tuple[object, ...], int] = {}
    seen: set[tuple[object, ...]] = set()
    for index in order:
        parameter, together = parameters[index], group_of.get(index)
        key = (together, parameter.device, wire_dtype(parameter.dtype))
        filling.setdefault(key, []).append(index)
        if together is None:
            first = several and key not in seen
            sizes[key] = sizes.get(key, 0) + bytes_of(index)
            if sizes[key] >= (min(FIRST_BUCKET_BYTES, full) if first else full):
                seen.add(key)
                done.append(filling.pop(key))
                del sizes[key]
    planned = [*done, *filling.values()]
    # Without a parameter one empty bucket, because the trailer travels all the same.
    return sorted(planned, key=lambda each: max(map(expected.__getitem__, each))) or [[]]


class Layout:
    """Buckets of an optimizer's gradients, on which the ranks of a generation have agreed."""

    def __init__(self, kind: str, options: ReduceOptions, names: Mapping[int, str]) -> None:
        self.options = options
        self.arrived = ArrivedGradients(names, sparse_as_dense=options.sparse_as_dense)
        # In the order of their launch. They have memory, so there are none when it is not used.
        self.buckets: list[Bucket] = []
        self.bucket_of: dict[int, Bucket] = {}  # by the id of a parameter
        # What the ranks have agreed on: whether sums wait for the end of backward, the bytes of a
        # full bucket, and the parameters' indices in the order in which gradients are expected.
        self.manifest: list[int] = []
        self._after_backward = False
        self._kind = kind  # of the optimizer, in messages
        self._number = 0  # of this optimizer in the generation, in the order of first steps
        self._parameters: list[torch.Tensor] = []
        self._generation: int | None = None  # that has agreed
        self._numbered_in: int | None = None
        self._failed: int | None = None

    def communicator(self, context: Context) -> Communicator:
        """Return the communicator of the process set's ranks; a rank that is not in it is alone."""
        if self.options.of_all:
            return context.communicator()
        group = group_in(context, self.options.process_set)
        if context.rank in group.ranks or not group.ranks:  # a set without members raises there
            return group.communicator()
        return SoloCommunicator(context.generation)

    def holds(self, communicator: Communicator, parameters: list[torch.Tensor]) -> bool:
        """Return whether the ranks have agreed on a layout of these parameters."""
        agreed = self._generation == communicator.generation
        return agreed and same(self._parameters, parameters)

    def arrange(self, communicator: Communicator, parameters: list[torch.Tensor]) -> None:
        """Prepare the buckets for the next step; all ranks call it at the same point."""
        if communicator.generation == self._failed:
            raise CollectiveError(
                f"a step of generation {self._failed} was left half-way on this rank; restore the "
                "last commit, as the elastic loop does"
            )
        if not self.holds(communicator, parameters):
            self._generation, self.buckets, self.bucket_of = None, [], {}
            self._failed = communicator.generation  # unless the exchange goes well
            self.manifest = self._exchange(communicator, parameters)
            self._parameters = parameters
            self._generation, self._failed = communicator.generation, None
        if not self.buckets:
            self._make_buckets(communicator, parameters)
        for bucket in self.buckets:
            bucket.begin()

    def _make_buckets(self, communicator: Communicator, parameters: list[torch.Tensor]) -> None:
        options = self.options
        after_backward, full, *order = self.manifest
        asked_for = groups_of(parameters, order, options.groups)
        plan = plan_buckets(parameters, order, full, options.wire_dtype, asked_for)
        for indices in plan:
            members = [parameters[index] for index in indices]
            trailer = 1 + len(parameters) if indices is plan[-1] else 0
            bucket = Bucket(communicator, members, options, self.arrived, trailer)
            self.buckets.append(bucket)
            self.bucket_of.update((id(parameter), bucket) for parameter in members)
        # Sums of gradients that come from an accelerator would wait for it in a hook.
        self._after_backward = bool(after_backward) or any(b.staging for b in self.buckets)

    def is_late(self, communicator: Communicator) -> bool:
        """Return whether no sum begins before backward has ended."""
        # Of several optimizers a rank may have no gradient, so the order is that of step().
        return self._after_backward or _optimizers.get(communicator, 0) > 1

    def deliver(self) -> tuple[float, list[torch.Tensor]]:
        """Deliver all buckets; return the ranks' change, and parameters with sparse gradients."""
        for bucket in self.buckets:
            bucket.wait()
        change, *counts = (number.real for number in self.buckets[-1].sums)
        left, sparse = iter(counts), []
        for bucket in self.buckets:
            own = [next(left) for _ in bucket.parameters]
            sparse += [p for p, count in zip(bucket.parameters, own, strict=True) if count < 0]
            bucket.deliver(own)
        return change, sparse

    def release(self, *, lost: bool = False) -> None:
        """Free the memory of the buckets; gradients in them move out, unless they are lost."""
        for bucket in self.buckets:
            bucket.leave(lost=lost)
        self.buckets, self.bucket_of = [], {}

    def fail(self, generation: int) -> None:
        """Give the memory away, with the gradients in it: the generation has failed here."""
        self.release(lost=True)
        self._failed = generation

    def number_in(self, communicator: Communicator) -> int:
        """Return this optimizer's number in a generation, or the next number if it has none yet."""
        own = self._numbered_in == communicator.generation
        return self._number if own else _optimizers.get(communicator, 0) + 1

    def description(self, communicator: Communicator, parameters: list[torch.Tensor]) -> str:
        """Return what ranks compare before a step; empty if its sums can be for nothing else."""
        if _optimizers.get(communicator, 0) <= 1 and not self.options.apart:
            return ""
        what = self._kind
        if parameters:
            first = self.arrived.name(parameters[0])
            what += f" of {len(parameters)} tensors, of which the first is {first}"
        return f"step() of distributed optimizer {self._number} ({what})"

    def _exchange(self, communicator: Communicator, parameters: list[torch.Tensor]) -> list[int]:
        """Compare parameters and options; return the manifest of a generation, rank 0's."""
        options, by = self.options, self.options.compression
        groups = groups_of(parameters, range(len(parameters)), options.groups)
        lines = [
            "the first step of a DistributedOptimizer, which needs the same model and options on "
            "all ranks",
            f"op={options.op.value}, "
            f"compression={(by if isinstance(by, type) else type(by)).__name__}, "
            f"gradient_predivide_factor={options.predivide}, groups={groups}",
            f"it trains {len(parameters)} tensors",
        ]
        for p in parameters:
            lines.append(f"{self.arrived.name(p)} is {kind_of(p.dtype, p.shape)}")
        communicator.agree("\n".join(lines))
        self._number = number = self.number_in(communicator)
        self._numbered_in = communicator.generation
        _optimizers[communicator] = max(number, _optimizers.get(communicator, 0))
        index_of = {id(parameter): index for index, parameter in enumerate(parameters)}
        first = [index_of[key] for key in self.arrived.noted if key in index_of]
        # Without a gradient in this step, as if backward met them last.
        missing = sorted(set(range(len(parameters))).difference(first), reverse=True)
        late = not communicator.capabilities.overlaps
        its = torch.tensor([late, fusion_threshold(), *first, *missing], dtype=torch.int64)
        communicator.broadcast(its, 0)  # each rank's gradients arrive in an order of its own
        return its.tolist()


# How many optimizers the ranks of a communicator have stepped.
_optimizers: weakref.WeakKeyDictionary[Communicator, int] = weakref.WeakKeyDictionary()
