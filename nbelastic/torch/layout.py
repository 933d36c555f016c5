"""Which gradient goes into which bucket, the same on all ranks.

See :mod:`nbelastic.torch.reducer` for what is shared, and when.
"""

from __future__ import annotations

import functools
import itertools
import math
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from nbelastic.collectives import Op
from nbelastic.torch.bucket_plan import LARGE_BYTES, PIECE_BYTES, plan_buckets
from nbelastic.torch.buckets import Bucket, Scaling
from nbelastic.torch.in_place import InPlaceBucket
from nbelastic.torch.staging import is_staged

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from nbelastic.collectives import Communicator
    from nbelastic.torch.adasum import GradientOp
    from nbelastic.torch.compression import Compressor

__all__ = ["HOT_BYTES", "Layout", "LayoutKeeper", "ReduceOptions"]

# Communicators that average as they add, at no cost.
_AVERAGING = ("shm", "hierarchical")
# So many bytes are still in the processor's cache when they are copied.
HOT_BYTES = 256 << 10
# Of a model that has no more, all gradients are copied together: that takes one operation.
SMALL_MODEL_BYTES = 256 << 10
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


class Layout:
    """Buckets for some parameters, in the order in which they are launched.

    Attributes
    ----------
    parameters : list of Tensor
        In the order of the optimizer.
    order : list of int
        Their indices in the order in which gradients are expected.
    made_for : tuple of (float, bool)
        From what size on gradients are reduced where they are, and whether many at once are.
    staged : bool
        Whether any gradients have to be brought to the host first.
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
        *,
        in_place_bytes: float,
        coalesces: bool,
    ) -> None:
        self.parameters = parameters
        self.order = order
        self.made_for = in_place_bytes, coalesces
        wire_dtype = options.compression.wire_dtype
        groups = _groups(parameters, order, options.groups)
        self.staged = any(is_staged(parameter.device) for parameter in parameters)
        plan = plan_buckets(
            parameters,
            order,
            wire_dtype,
            groups,
            in_place_bytes=in_place_bytes if isinstance(options.op, Op) else math.inf,
            coalesces=coalesces,
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
                dtype = wire_dtype(members[0].dtype) if members else torch.float32
                bucket = Bucket(members, dtype, riders)
            self.buckets.append(bucket)
            for position, parameter in enumerate(members):
                self.places[id(parameter)] = (bucket, position)
        self._in_place = [each for each in self.buckets if isinstance(each, InPlaceBucket)]

    @functools.cached_property
    def quiet(self) -> set[int]:
        """The ids of parameters after whose gradients nothing is to be done at once.

        After the others there is: the last of all, the last of each bucket, and where as much has
        come together as is copied while it is in the processor's cache.
        """
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

    def deliver(self) -> bool:
        """Make the reduced gradients those of the parameters; return whether any flag was set."""
        closing = self.buckets[-1]
        assert isinstance(closing, Bucket)
        number = 1
        for each in self._in_place:
            each.used = [closing.rider(number + i) > 0 for i in range(len(each.parameters))]
            number += len(each.parameters)
        for bucket in self.buckets:
            bucket.deliver()
        return closing.rider(0) > 0

    def begin(self, communicator: Communicator, options: ReduceOptions) -> None:
        """Have all buckets be empty, for a new round."""
        for bucket in self.buckets:
            bucket.begin(communicator, options.scaling(communicator, bucket))

    def drop(self) -> None:
        """Give all buffers away, with the gradients in them."""
        for bucket in self.buckets:
            bucket.drop()

    def release(self) -> None:
        """Let go of all buffers; gradients in them move out."""
        for bucket in self.buckets:
            bucket.release()


class LayoutKeeper:
    """Keeps one rank's layout equal to that of the others in its generation.

    Parameters
    ----------
    options : ReduceOptions
        Equal on all ranks; checked.
    names : mapping of int to str
        Names of parameters by their ids; checked too.
    """

    def __init__(self, options: ReduceOptions, names: Mapping[int, str]) -> None:
        self._options = options
        self._names = names
        self._observed: list[int] | None = None
        self._layout: Layout | None = None
        self._generation: int | None = None
        self._settled = False
        self._observing = False

    def arrange(self, communicator: Communicator, parameters: list[torch.Tensor]) -> Layout:
        """Return the layout for the next round. All ranks call it at the same point.

        Raises
        ------
        CollectiveError
            A peer is gone, or the generation is over.
        ValueError
            This rank does not train what rank 0 trains.
        """
        layout = self._layout
        if layout is None or not _same(layout.parameters, parameters):
            layout = self._observed = self._generation = None
        default = list(reversed(range(len(parameters))))
        order = default if layout is None else layout.order
        compared, self._generation = self._generation == communicator.generation, None
        if not compared:
            self._settled = self._compare(communicator, parameters)
            self._observing = True
            order = self._order_of_root(communicator, default) if self._settled else default
        elif not self._settled and not self._observing:
            order = self._order_of_root(communicator, default)
            self._settled = True
        coalesces, least = communicator.coalesces, _least_in_place(communicator, parameters)
        if layout is None or layout.order != order or layout.made_for != (least, coalesces):
            layout = Layout(
                parameters, order, self._options, in_place_bytes=least, coalesces=coalesces
            )
        self._layout, self._generation = layout, communicator.generation
        return layout

    def observe(self, arrived: Iterable[int]) -> None:
        """Note in which order gradients have arrived, once the first round has gone well.

        Parameters
        ----------
        arrived : iterable of int
            Ids of parameters; those that have got no gradient come last.
        """
        if self._layout is None or self._settled or not self._observing:
            return
        self._observing = False
        index_of = {id(p): index for index, p in enumerate(self._layout.parameters)}
        first = [index_of[key] for key in arrived if key in index_of]
        missing = set(index_of.values()).difference(first)
        self._observed = [*first, *sorted(missing, reverse=True)]

    def quiet(self) -> set[int]:
        """Return the ids of parameters whose gradients need no attention of their own."""
        return self._layout.quiet if self._layout is not None and self._settled else set()

    def drop(self) -> None:
        """Give all buffers away, with the gradients in them."""
        if self._layout is not None:
            self._layout.drop()

    def release(self) -> None:
        """Let go of all buffers, in a world of one; gradients in them move out."""
        if self._layout is not None:
            self._layout.release()

    def _compare(self, communicator: Communicator, parameters: Sequence[torch.Tensor]) -> bool:
        """Compare parameters and options with rank 0; return whether it has an order to share."""
        options = self._options
        groups = _groups(parameters, range(len(parameters)), options.groups)
        what = (
            [(self._names.get(id(p), ""), tuple(p.shape), p.dtype) for p in parameters],
            (options.op.name, options.compression.__name__, options.predivide),
            groups,
        )
        mine = [len(parameters), zlib.crc32(repr(what).encode()), self._observed is not None]
        message = torch.tensor(mine, dtype=torch.int64)
        communicator.broadcast(message, 0)
        count, checksum, observed = message.tolist()
        if (count, checksum) != (mine[0], mine[1]):
            raise ValueError(
                f"the optimizer of rank {communicator.rank} is not that of rank 0: it trains "
                f"{mine[0]} tensors, that of rank 0 {count}"
                + (", with other names, shapes, types or options" if count == mine[0] else "")
            )
        return bool(observed)

    def _order_of_root(self, communicator: Communicator, default: list[int]) -> list[int]:
        message = torch.tensor(self._observed or default, dtype=torch.int64)
        communicator.broadcast(message, 0)
        order: list[int] = message.tolist()
        return order


def _least_in_place(communicator: Communicator, parameters: Sequence[torch.Tensor]) -> float:
    """Return from how many bytes on gradients are reduced where they are."""
    if not communicator.anywhere:
        return math.inf
    if not communicator.coalesces:
        return LARGE_BYTES
    if sum(parameter.nbytes for parameter in parameters) <= SMALL_MODEL_BYTES:
        return math.inf
    return PIECE_BYTES


def _same(some: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    return len(some) == len(others) and all(a is b for a, b in zip(some, others, strict=True))


def _groups(
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
