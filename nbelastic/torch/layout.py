"""Which gradient goes into which bucket, the same on all ranks.

See :mod:`nbelastic.torch.layout_keeper` for how ranks come to share it.
"""

from __future__ import annotations

import functools
import itertools
import math
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from nbelastic.collectives import Op
from nbelastic.torch.bucket_plan import plan_buckets
from nbelastic.torch.buckets import Bucket, Scaling
from nbelastic.torch.in_place import InPlaceBucket
from nbelastic.torch.staging import is_staged

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from nbelastic.collectives import Communicator
    from nbelastic.torch.adasum import GradientOp
    from nbelastic.torch.compression import Compressor

__all__ = ["HOT_BYTES", "Layout", "Manner", "ReduceOptions", "groups_of"]

# Communicators that average as they add, at no cost.
_AVERAGING = ("shm", "hierarchical")
# So many bytes are still in the processor's cache when they are copied.
HOT_BYTES = 256 << 10
_ROOMY = (torch.float32, torch.float64, torch.complex64, torch.complex128)


@dataclass(frozen=True, kw_only=True)
class ReduceOptions:
    """How gradients are reduced.

    Attributes
    ----------
    op : Op or GradientOp
        ``AVERAGE``, ``SUM`` or ``ADASUM``.
    compression : type of Compressor
        What they are on the wire.
    predivide : float
        With ``AVERAGE``: what to divide by before the sum is formed; the rest is divided by after.
    passes : int
        Backward passes per step.
    groups : int or tuple of tuples of Tensor
        How many groups to form, 0 for none; or the groups. A group is reduced in one operation.
    sparse_as_dense : bool
        Whether to make sparse gradients dense, or refuse them.
    """

    op: Op | GradientOp
    compression: type[Compressor]
    predivide: float
    passes: int
    groups: int | tuple[tuple[torch.Tensor, ...], ...]
    sparse_as_dense: bool

    def scaling(self, communicator: Communicator, bucket: Bucket | InPlaceBucket) -> Scaling:
        """Return how the gradients in `bucket` become an average, on all ranks in the same way.

        Without a passage over memory of its own: in the reduction, or when they are copied.
        """
        if self.op is not Op.AVERAGE:
            return Scaling(op=self.op)
        if self.predivide == 1.0:
            if communicator.name in _AVERAGING:
                return Scaling(op=Op.AVERAGE)
            if bucket.plain and bucket.dtype in _ROOMY:
                return Scaling(before=communicator.size)
        return Scaling(before=self.predivide, after=communicator.size / self.predivide)


class Manner(NamedTuple):
    """What decides how gradients share buckets, the same on all ranks.

    Attributes
    ----------
    in_place_bytes : float
        From what size on they are reduced where they are.
    coalesces : bool
        Whether one operation reduces many of those.
    late : bool
        Whether it reduces all of a step, when backward has ended: nothing would go on beside it.
    """

    in_place_bytes: float
    coalesces: bool
    late: bool


class Layout:
    """Buckets for some parameters, in the order in which they are launched.

    Attributes
    ----------
    parameters : list of Tensor
        In the order of the optimizer.
    order : list of int
        Their indices in the order in which gradients are expected.
    made_for : Manner
        What was known of the ranks when it was laid out.
    staged : bool
        Whether any gradients have to be brought to the host first.
    together : bool
        Whether all buckets are reduced at once, when backward has ended.
    idle : bool
        Whether nothing is to be done with any gradient before that: it stays where it is.
    buckets : list of Bucket or InPlaceBucket
        The last is a Bucket and has riders: the flag of a change, and of each gradient that is
        reduced where it is, in turn, whether there is one.
    places : dict
        From the id of a parameter to its bucket, and its position there.
    """

    def __init__(
        self,
        parameters: list[torch.Tensor],
        order: list[int],
        options: ReduceOptions,
        manner: Manner,
    ) -> None:
        self.parameters = parameters
        self.order = order
        self.made_for = manner
        wire_dtype = options.compression.wire_dtype
        groups = groups_of(parameters, order, options.groups)
        self.staged = any(is_staged(parameter.device) for parameter in parameters)
        plan = plan_buckets(
            parameters,
            order,
            wire_dtype,
            groups,
            in_place_bytes=manner.in_place_bytes if isinstance(options.op, Op) else math.inf,
            coalesces=manner.coalesces,
        )
        count = sum(len(planned.indices) for planned in plan if planned.in_place)
        self.buckets: list[Bucket | InPlaceBucket] = []
        self.places: dict[int, tuple[Bucket | InPlaceBucket, int]] = {}
        for planned in plan:
            members = [parameters[index] for index in planned.indices]
            bucket: Bucket | InPlaceBucket
            if planned.in_place:
                bucket = InPlaceBucket(members)
            else:
                riders = 1 + count if planned is plan[-1] else 0
                dtype = wire_dtype(members[0].dtype) if members else self._type_before()
                bucket = Bucket(members, dtype, riders)
            self.buckets.append(bucket)
            for position, parameter in enumerate(members):
                self.places[id(parameter)] = (bucket, position)
        self._begun_for: Callable[[], Communicator | None] = lambda: None
        self._scalings: list[Scaling] = []
        self._in_place = [each for each in self.buckets if isinstance(each, InPlaceBucket)]
        self.together = bool(self._in_place) and manner.late and not self.staged
        self.idle = self.together and all(
            isinstance(each, InPlaceBucket) or not each.parameters for each in self.buckets
        )

    def _type_before(self) -> torch.dtype:
        """Return the type of the last bucket so far, that one without gradients goes with."""
        return self.buckets[-1].dtype if self.buckets else torch.float32

    @functools.cached_property
    def quiet(self) -> set[int]:
        """The ids of parameters after whose gradients nothing is to be done at once.

        After the others there is: the last of all, the last of each bucket, and where as much has
        come together as is copied while it is in the processor's cache.
        """
        if self.idle:
            return {id(self.parameters[index]) for index in self.order[:-1]}
        quiet: set[int] = set()
        left = {id(bucket): len(bucket.parameters) for bucket in self.buckets}
        gathered = 0
        for index in self.order[:-1]:
            parameter = self.parameters[index]
            bucket, _ = self.places[id(parameter)]
            left[id(bucket)] -= 1
            gathered += parameter.nbytes if isinstance(bucket, Bucket) and not bucket.staged else 0
            if left[id(bucket)] == 0 or gathered >= HOT_BYTES:
                gathered = 0
            else:
                quiet.add(id(parameter))
        return quiet

    def view_of(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """Return what a parameter's gradient is to be, if that is part of a buffer."""
        bucket, position = self.places[id(parameter)]
        return bucket.views[position]

    def riders(self, change_flag: bool) -> list[float]:
        """Return what the last bucket says beside its gradients, once the others are launched."""
        filled = [float(each) for bucket in self._in_place for each in bucket.filled()]
        return [float(change_flag), *filled]

    def reduce(self, communicator: Communicator, change_flag: bool) -> None:
        """Reduce all buckets at once, those of one type in one operation, and wait for it.

        Raises
        ------
        CollectiveError
            It failed; the layout must be dropped.
        """
        values: dict[tuple[torch.dtype, Op], list[torch.Tensor]] = {}
        for bucket in self.buckets:
            riders = self.riders(change_flag) if bucket is self.buckets[-1] else []
            its = bucket.values(riders)
            assert isinstance(bucket.op, Op)  # gradients that stay where they are have no other
            values.setdefault((its[0].dtype, bucket.op), []).extend(its)
        for (_, op), tensors in values.items():
            communicator.allreduce_coalesced(tensors, op)

    def deliver(self) -> bool:
        """Make the reduced gradients those of the parameters; return whether any flag was set."""
        closing = self.buckets[-1]
        assert isinstance(closing, Bucket)
        number = 1
        for each in self._in_place:
            each.used = {i: closing.rider(number + i) > 0 for i in each.moved}
            number += len(each.parameters)
        for bucket in self.buckets:
            bucket.deliver()
        return closing.rider(0) > 0

    def begin(self, communicator: Communicator, options: ReduceOptions) -> None:
        """Have all buckets be empty, for a new round."""
        if self._begun_for() is not communicator:
            self._begun_for = weakref.ref(communicator)
            self._scalings = [options.scaling(communicator, bucket) for bucket in self.buckets]
        for bucket, scaling in zip(self.buckets, self._scalings, strict=True):
            bucket.begin(communicator, scaling)

    def drop(self) -> None:
        """Give all buffers away, with the gradients in them."""
        for bucket in self.buckets:
            bucket.drop()

    def release(self) -> None:
        """Let go of all buffers; gradients in them move out."""
        for bucket in self.buckets:
            bucket.release()


def groups_of(
    parameters: Sequence[torch.Tensor],
    order: Sequence[int],
    groups: int | tuple[tuple[torch.Tensor, ...], ...],
) -> list[list[int]]:
    """Return the indices in each group: as asked for, or so many of about equally many."""
    if isinstance(groups, int):
        count = min(groups, len(order))
        bounds = [number * len(order) // count for number in range(count + 1)] if count else []
        return [list(order[a:b]) for a, b in itertools.pairwise(bounds)]
    index_of = {id(parameter): index for index, parameter in enumerate(parameters)}
    return [[index_of[id(p)] for p in group if id(p) in index_of] for group in groups]
