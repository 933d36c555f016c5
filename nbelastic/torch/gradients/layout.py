"""Gradient groups of a model, a pure function of what ranks have agreed on."""

from __future__ import annotations

import functools
import itertools
import math
import os
import weakref
from typing import TYPE_CHECKING, NamedTuple

import torch

from nbelastic.collectives import Op
from nbelastic.torch.gradients.groups import (
    HOT_BYTES,
    Bucket,
    GradientGroup,
    InPlaceGroup,
    Scaling,
    is_accelerator,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from nbelastic.collectives import Communicator
    from nbelastic.torch.gradients.arrived import ArrivedGradients
    from nbelastic.torch.gradients.options import ReduceOptions

BUCKET_BYTES = 25 << 20
# The first of several is small, so that the network has something to do early.
FIRST_BUCKET_BYTES = 1 << 20
# More than a processor's own cache holds: what is copied is fetched from memory again.
LARGE_BYTES = 8 << 20
# For one operation on many while backward runs: to copy less costs less than to handle it alone.
PIECE_BYTES = 16 << 10
# The gradients of a smaller model are all copied together: that takes one operation.
SMALL_MODEL_BYTES = 256 << 10
# Presence of a sparse gradient, which no number of dense ones makes up for.
SPARSE = -1000.0
# Types in which a gradient divided by the number of ranks loses nothing.
_ROOMY = (torch.float32, torch.float64, torch.complex64, torch.complex128)


class Manifest(NamedTuple):
    """All that decides on a layout, in addition to the parameters: equal on all ranks."""

    order: list[int]  # indices of the parameters, as their gradients are expected
    after_backward: bool  # sums do not run while a rank computes
    bucket_bytes: int = BUCKET_BYTES  # from which a bucket is full, as rank 0 has it


class Layout:
    """Groups of the gradients of some parameters, in the order in which they are launched.

    The last group is a bucket. Its trailer has the rank's :func:`~.step.change_of`, and for each
    gradient in the order of the groups whether this rank has one. Buckets have memory of the
    communicator.
    """

    def __init__(
        self,
        communicator: Communicator,
        parameters: list[torch.Tensor],
        manifest: Manifest,
        options: ReduceOptions,
        arrived: ArrivedGradients,
    ) -> None:
        self.communicator = weakref.ref(communicator)
        self.parameters = parameters  # in the order of the optimizer
        self.manifest = manifest
        in_place_bytes = _in_place_bytes(communicator, parameters, manifest)
        devices = communicator.capabilities.devices
        gathered = not isinstance(options.op, Op)  # not the communicator's, and on the host
        if gathered:
            in_place_bytes, devices = math.inf, frozenset()
        asynchronous = [each for each in parameters if is_accelerator(each.device)]
        staged = any(each.device.type not in devices for each in asynchronous)
        # No sum begins before backward has ended; those of gradients that come from an accelerator
        # would wait for it in a hook.
        self.after_backward = manifest.after_backward or staged
        # One operation of each type then reduces all groups.
        self.coalesced = manifest.after_backward and not gathered and not asynchronous
        self.found_sparse: list[torch.Tensor] = []  # on any rank, in the last step
        self._arrived = arrived
        wire_dtype = options.wire_dtype
        asked_for = groups_of(parameters, manifest.order, options.groups)
        plan = plan_groups(parameters, manifest, wire_dtype, asked_for, in_place_bytes)
        self.groups: list[GradientGroup] = []
        # By the id of a parameter: its group, and its position there.
        self.places: dict[int, tuple[GradientGroup, int]] = {}
        for planned in plan:
            members = [parameters[index] for index in planned.indices]
            last = self.groups[-1].dtype if self.groups else torch.float32
            dtype = wire_dtype(members[0].dtype) if members else last
            scaling = _scaling(options, communicator, members, dtype)
            group: GradientGroup
            if planned.in_place:
                group = InPlaceGroup(members, dtype, arrived, scaling)
            else:
                trailer = 1 + len(parameters) if planned is plan[-1] else 0
                group = Bucket(communicator, members, dtype, arrived, scaling, trailer, devices)
            self.groups.append(group)
            for position, parameter in enumerate(members):
                self.places[id(parameter)] = (group, position)

    @functools.cached_property
    def deferrable(self) -> set[int]:
        """The ids of parameters whose gradients can be handled together with a later one.

        Not among them are the last gradient of all, the last of each group that is launched then,
        and each with which enough bytes have arrived to be copied while they are in the cache.
        """
        deferrable: set[int] = set()
        left = {id(group): len(group.parameters) for group in self.groups}
        gathered = 0
        for index in self.manifest.order[:-1]:
            parameter = self.parameters[index]
            key = id(parameter)
            group, _ = self.places[key]
            if not (self.coalesced and isinstance(group, InPlaceGroup)):
                left[id(group)] -= 1
                if isinstance(group, Bucket) and not group.asynchronous:
                    gathered += parameter.nbytes
                if left[id(group)] == 0 or gathered >= HOT_BYTES:
                    gathered = 0
                    continue
            deferrable.add(key)
        return deferrable

    def begin(self) -> None:
        """Prepare all groups for a new step."""
        for group in self.groups:
            group.begin()

    def launch(self, number: int, communicator: Communicator, change: Callable[[], float]) -> None:
        """Begin the reduction of the group with a number; the last takes the change along."""
        group = self.groups[number]
        trailer: Sequence[float] = ()
        if number == len(self.groups) - 1:
            group.complete()
            trailer = self._trailer(change())
        group.launch(communicator, trailer)

    def launch_all(self, communicator: Communicator, change: Callable[[], float]) -> None:
        """Reduce all groups, in one operation for each type and op, and wait."""
        for group in self.groups:
            group.complete()
        values: dict[tuple[torch.dtype, Op], list[torch.Tensor]] = {}
        for group in self.groups:
            closing = group is self.groups[-1]
            its = group.values(self._trailer(change()) if closing else ())
            op = group.scaling.op
            assert isinstance(op, Op)  # gradients that stay where they are have no other
            values.setdefault((its[0].dtype, op), []).extend(its)
        for (_, op), tensors in values.items():
            communicator.allreduce_coalesced(tensors, op)

    def _trailer(self, change: float) -> list[float]:
        present = (float(there) for group in self.groups for there in group.present)
        if not self._arrived.any_sparse:
            return [change, *present]
        parameters = [each for group in self.groups for each in group.parameters]
        sparse = [p.grad is not None and p.grad.layout is not torch.strided for p in parameters]
        pairs = zip(present, sparse, strict=True)
        return [change, *(SPARSE if is_sparse else there for there, is_sparse in pairs)]

    def deliver(self) -> float:
        """Wait for all groups and deliver them; return the sum or average of the ranks' change."""
        for group in self.groups:
            group.wait()
        closing = self.groups[-1]
        assert isinstance(closing, Bucket)
        self.found_sparse = []
        change, *counts = closing.sums
        start = 0
        for group in self.groups:
            end = start + len(group.parameters)
            own = counts[start:end]
            if any(count.real < 0 for count in own):
                pairs = zip(group.parameters, own, strict=True)
                self.found_sparse += [each for each, count in pairs if count.real < 0]
                own = [max(count.real, 0.0) for count in own]
            group.deliver(own)
            start = end
        return float(change.real)

    def leave(self, *, lost: bool = False) -> None:
        """Move gradients out of the buffers, which are no longer used, or drop lost gradients."""
        for group in self.groups:
            for parameter, view in zip(group.parameters, group.views, strict=True):
                if view is not None and parameter.grad is view:
                    parameter.grad = None if lost else view.clone()


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


def _scaling(
    options: ReduceOptions,
    communicator: Communicator,
    parameters: Sequence[torch.Tensor],
    dtype: torch.dtype,
) -> Scaling:
    """Return how gradients become an average, on all ranks in the same way.

    They are divided in the reduction or when they are copied, in no pass over memory of its own.
    """
    if options.op is not Op.AVERAGE:
        return Scaling(op=options.op)
    if options.predivide == 1.0:
        if communicator.capabilities.averages:
            return Scaling(op=Op.AVERAGE)
        if dtype in _ROOMY and all(parameter.dtype == dtype for parameter in parameters):
            return Scaling(before=communicator.size)
    return Scaling(before=options.predivide, after=communicator.size / options.predivide)


def _in_place_bytes(
    communicator: Communicator, parameters: Sequence[torch.Tensor], manifest: Manifest
) -> float:
    """Return from how many bytes on gradients are reduced where they are."""
    if not communicator.capabilities.reduces_in_place:
        return math.inf
    if not communicator.capabilities.coalesces:
        return LARGE_BYTES
    if sum(parameter.nbytes for parameter in parameters) <= SMALL_MODEL_BYTES:
        return math.inf
    return 0 if manifest.after_backward else PIECE_BYTES


class PlannedGroup(NamedTuple):
    """Indices of the parameters of one group, and whether their gradients stay where they are."""

    indices: list[int]
    in_place: bool = False


def fusion_threshold() -> int:
    """Return the size of a full bucket: ``HOROVOD_FUSION_THRESHOLD``, if that is set."""
    text = os.environ.get("HOROVOD_FUSION_THRESHOLD", "")
    return int(text) if text.isdecimal() else BUCKET_BYTES


def plan_groups(
    parameters: Sequence[torch.Tensor],
    manifest: Manifest,
    wire_dtype: Callable[[torch.dtype], torch.dtype],
    groups: Iterable[Sequence[int]] = (),
    in_place_bytes: float = math.inf,
) -> list[PlannedGroup]:
    """Distribute parameters over buckets.

    Gradients share buckets because each operation has a price of its own. A large one is reduced
    where it is: it has nothing to gain from a bucket, and a copy to lose. Where one operation
    reduces many tensors wherever they are, all but small ones stay where they are, in groups.

    The given `groups` of indices share a bucket whatever their size. From `in_place_bytes` on, a
    gradient is reduced where it is, if it is on the CPU, in no
    group, and travels as what it is.

    Groups are in the order in which they are expected to be complete, except that the last bucket
    comes after all others. If there is none, an empty one does.
    """
    order, full = manifest.order, manifest.bucket_bytes
    expected = {index: place for place, index in enumerate(order)}
    group_of = {index: number for number, group in enumerate(groups) for index in group}

    def bytes_of(index: int) -> int:
        return parameters[index].numel() * wire_dtype(parameters[index].dtype).itemsize

    def stays(index: int) -> bool:
        parameter = parameters[index]
        as_it_is = wire_dtype(parameter.dtype) == parameter.dtype and not parameter.is_complex()
        large = index not in group_of and bytes_of(index) >= in_place_bytes
        return as_it_is and large and parameter.device.type == "cpu"

    shared = [index for index in order if index not in group_of and not stays(index)]
    several = sum(map(bytes_of, shared)) > full
    done: list[PlannedGroup] = []
    filling: dict[tuple[object, ...], PlannedGroup] = {}
    seen: set[tuple[object, ...]] = set()
    for index in order:
        parameter, together, in_place = parameters[index], group_of.get(index), stays(index)
        key = (together, parameter.device, wire_dtype(parameter.dtype), in_place)
        bucket = filling.setdefault(key, PlannedGroup([], in_place))
        bucket.indices.append(index)
        if together is None:
            first = several and key not in seen
            most = LARGE_BYTES if in_place else FIRST_BUCKET_BYTES if first else full
            if sum(map(bytes_of, bucket.indices)) >= min(most, full):
                seen.add(key)
                done.append(filling.pop(key))

    def when_full(planned: PlannedGroup) -> int:
        return max(expected[index] for index in planned.indices)

    planned = sorted([*done, *filling.values()], key=when_full)
    closing = next((each for each in reversed(planned) if not each.in_place), PlannedGroup([]))
    return [*(each for each in planned if each is not closing), closing]
