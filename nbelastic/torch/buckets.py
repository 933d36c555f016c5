"""Gradients of several parameters in one buffer, reduced by one operation.

A :class:`Bucket` knows nothing of steps, hooks or optimizers: it is filled, launched, waited for
and read, and its buffer is used again for the next step. Beside the gradients it carries one
element per parameter that counts on how many ranks it had a gradient, so that a parameter which
nobody used keeps none, as it would in training without other ranks; and *riders*, numbers that are
summed over the ranks on the way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from nbelastic.collectives import Op

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from nbelastic.collectives import Communicator, Handle

__all__ = ["BUCKET_BYTES", "FIRST_BUCKET_BYTES", "Bucket", "plan_buckets"]

BUCKET_BYTES = 25 << 20
# The first is small, so that the network has something to do early.
FIRST_BUCKET_BYTES = 1 << 20


class Bucket:
    """Room for the gradients of some parameters, and their reduction.

    In each step: :meth:`begin`, :meth:`put` for each gradient there is, :meth:`launch`,
    :meth:`wait`, :meth:`take`. :meth:`drop` is legal at any time, and the only thing to do after a
    failure: the buffer then belongs to the communicator that failed.

    Parameters
    ----------
    parameters : sequence of Tensor
        On one device.
    dtype : torch.dtype
        Type of the elements on the wire.
    riders : int, default 0
        How many numbers to sum over the ranks beside the gradients.
    """

    def __init__(
        self, parameters: Sequence[torch.Tensor], dtype: torch.dtype, riders: int = 0
    ) -> None:
        self.parameters = parameters
        self._dtype = dtype
        self._counts = [parameter.numel() for parameter in parameters]
        self._tail_length = len(parameters) + riders
        self._device = parameters[0].device
        self._flat: torch.Tensor | None = None
        self._views: list[torch.Tensor] = []
        self._handle: Handle | None = None
        self._filled: list[bool] = []
        self._left = 0
        self._sums: list[complex] = []

    def begin(self) -> None:
        """Be empty, for a new step."""
        if self._flat is None:
            total = sum(self._counts) + self._tail_length
            self._flat = torch.empty(total, dtype=self._dtype, device=self._device)
            parts = torch.split(self._flat, [*self._counts, self._tail_length])
            pairs = zip(parts, self.parameters, strict=False)
            self._views = [part.view(parameter.shape) for part, parameter in pairs]
        self._filled = [False] * len(self.parameters)
        self._left = len(self.parameters)
        self._sums = []

    def put(self, position: int, gradient: torch.Tensor, divisor: float = 1.0) -> None:
        """Copy ``gradient / divisor`` for the parameter at `position`, once per step."""
        view = self._views[position]
        view.copy_(gradient.detach())
        if divisor != 1.0:
            view.div_(divisor)
        self._filled[position] = True
        self._left -= 1

    @property
    def full(self) -> bool:
        """Whether all parameters' gradients have been put."""
        return self._left == 0

    def missing(self) -> list[int]:
        """Return the positions whose gradients have not been put."""
        return [position for position, filled in enumerate(self._filled) if not filled]

    def launch(self, communicator: Communicator, riders: Sequence[float] = ()) -> None:
        """Begin the reduction; what is missing counts as zero."""
        assert self._flat is not None
        for position in self.missing():
            self._views[position].zero_()
        tail = torch.tensor([*map(float, self._filled), *riders], dtype=self._dtype)
        self._flat[-self._tail_length :].copy_(tail)
        wire = torch.view_as_real(self._flat) if self._dtype.is_complex else self._flat
        self._handle = communicator.allreduce_async(wire, Op.SUM)

    def wait(self) -> None:
        """Wait until the sums are there.

        Raises
        ------
        CollectiveError
            The reduction failed; the bucket must be dropped.
        """
        assert self._flat is not None
        assert self._handle is not None
        self._handle.wait()
        self._handle = None
        self._sums = self._flat[-self._tail_length :].tolist()

    def used(self, position: int) -> bool:
        """Return whether the parameter at `position` had a gradient on any rank."""
        return abs(self._sums[position]) > 0

    def rider(self, index: int) -> float:
        """Return a rider's sum over all ranks."""
        return abs(self._sums[len(self.parameters) + index])

    def take(self, position: int, out: torch.Tensor, divisor: float = 1.0) -> None:
        """Copy the sum of gradients at `position`, divided by `divisor`, to `out`."""
        view = self._views[position]
        if divisor == 1.0:
            out.copy_(view)
        elif view.dtype == out.dtype:
            torch.div(view, divisor, out=out)
        else:
            out.copy_(view).div_(divisor)

    def drop(self) -> None:
        """Let go of the buffer and of an operation under way; the next step has a new buffer."""
        self._flat = self._handle = None
        self._views, self._filled, self._sums = [], [], []


def plan_buckets(
    parameters: Sequence[torch.Tensor],
    order: Sequence[int],
    wire_dtype: Callable[[torch.dtype], torch.dtype],
    groups: Iterable[Sequence[int]] = (),
) -> list[list[int]]:
    """Distribute parameters over buckets; a pure function, so equal on ranks that agree on `order`.

    Parameters
    ----------
    parameters : sequence of Tensor
        Of any types and devices; a bucket holds those of one device and one type on the wire.
    order : sequence of int
        Indices of all parameters in the order in which their gradients are expected.
    wire_dtype : callable
        From a parameter's type to that of its gradient on the wire.
    groups : iterable of sequences of int, optional
        Indices that share a bucket whatever their size. The others share buckets of
        :data:`BUCKET_BYTES`, the first of :data:`FIRST_BUCKET_BYTES`.

    Returns
    -------
    list of list of int
        Indices in each bucket, the buckets in the order in which they are expected to be full.
    """
    expected = {index: place for place, index in enumerate(order)}
    group_of = {index: number for number, group in enumerate(groups) for index in group}
    done: list[list[int]] = []
    filling: dict[tuple[object, ...], list[int]] = {}
    seen: set[tuple[object, ...]] = set()
    for index in order:
        parameter = parameters[index]
        dtype = wire_dtype(parameter.dtype)
        key = (group_of.get(index), parameter.device, dtype)
        bucket = filling.setdefault(key, [])
        bucket.append(index)
        if key[0] is None:
            size = sum(parameters[each].numel() for each in bucket) * dtype.itemsize
            if size >= (BUCKET_BYTES if key in seen else FIRST_BUCKET_BYTES):
                seen.add(key)
                done.append(filling.pop(key))
    return sorted([*done, *filling.values()], key=lambda bucket: max(expected[i] for i in bucket))
