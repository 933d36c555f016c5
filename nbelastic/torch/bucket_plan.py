"""Which gradients share a bucket: a pure function, so equal on ranks that agree on all else.

Gradients share buckets, since each operation has a price of its own. Large ones are reduced where
they are, each by itself: there is nothing to gain for them, and a copy to lose. Where one operation
reduces many that are anywhere, all but the small ones are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import torch

__all__ = [
    "BUCKET_BYTES",
    "FIRST_BUCKET_BYTES",
    "LARGE_BYTES",
    "PIECE_BYTES",
    "Planned",
    "plan_buckets",
]

BUCKET_BYTES = 25 << 20
# Of a model that fills several, the first is small: the network has something to do early.
FIRST_BUCKET_BYTES = 1 << 20
# More than fits a processor's own cache: what is copied is fetched from memory again.
LARGE_BYTES = 8 << 20
# Of one operation on many, while backward runs: less is sooner copied than dealt with by itself.
PIECE_BYTES = 16 << 10


class Planned(NamedTuple):
    """One bucket: the indices of its parameters, and whether gradients stay where they are."""

    indices: list[int]
    in_place: bool = False


def plan_buckets(
    parameters: Sequence[torch.Tensor],
    order: Sequence[int],
    wire_dtype: Callable[[torch.dtype], torch.dtype],
    groups: Iterable[Sequence[int]] = (),
    *,
    in_place_bytes: float = LARGE_BYTES,
    coalesces: bool = False,
) -> list[Planned]:
    """Distribute parameters over buckets.

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
        :data:`BUCKET_BYTES`, the first of :data:`FIRST_BUCKET_BYTES` if there are several.
    in_place_bytes : float, default LARGE_BYTES
        From how many bytes on a gradient is reduced where it is, if it is on the CPU, in no group,
        and travels as what it is.
    coalesces : bool, default False
        Whether such gradients share buckets, too, or each has its own.

    Returns
    -------
    list of Planned
        In the order in which they are expected to be full, but for the last one that is shared and
        not in place: it comes last of all. If there is none, an empty one does.
    """
    expected = {index: place for place, index in enumerate(order)}
    group_of = {index: number for number, group in enumerate(groups) for index in group}

    def bytes_of(index: int) -> int:
        return parameters[index].numel() * wire_dtype(parameters[index].dtype).itemsize

    def stays(index: int) -> bool:
        parameter = parameters[index]
        as_it_is = wire_dtype(parameter.dtype) == parameter.dtype and not parameter.is_complex()
        on_host = parameter.device.type == "cpu"
        return as_it_is and on_host and index not in group_of and bytes_of(index) >= in_place_bytes

    done = [Planned([index], in_place=True) for index in order if stays(index) and not coalesces]
    alone = {planned.indices[0] for planned in done}
    shared = [index for index in order if index not in alone]
    several = sum(bytes_of(index) for index in shared if index not in group_of) > BUCKET_BYTES
    filling: dict[tuple[object, ...], Planned] = {}
    seen: set[tuple[object, ...]] = set()
    for index in shared:
        parameter = parameters[index]
        key = (group_of.get(index), parameter.device, wire_dtype(parameter.dtype), stays(index))
        bucket = filling.setdefault(key, Planned([], stays(index)))
        bucket.indices.append(index)
        if key[0] is None:
            enough = FIRST_BUCKET_BYTES if several and key not in seen else BUCKET_BYTES
            if sum(map(bytes_of, bucket.indices)) >= enough:
                seen.add(key)
                done.append(filling.pop(key))

    def when_full(planned: Planned) -> int:
        return max(expected[index] for index in planned.indices)

    planned = sorted([*done, *filling.values()], key=when_full)
    closing = next((each for each in reversed(planned) if not each.in_place), Planned([]))
    return [*(each for each in planned if each is not closing), closing]
