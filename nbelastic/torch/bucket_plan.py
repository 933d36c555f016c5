"""Which gradients share a bucket: a pure function, so equal on ranks that agree on all else.

Small gradients share buckets, since each operation has a price of its own. Large ones are reduced
where they are, each by itself: there is nothing to gain for them, and a copy to lose.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import torch

__all__ = ["BUCKET_BYTES", "FIRST_BUCKET_BYTES", "LARGE_BYTES", "Planned", "plan_buckets"]

BUCKET_BYTES = 25 << 20
# Of a model that fills several, the first is small: the network has something to do early.
FIRST_BUCKET_BYTES = 1 << 20
# More than fits a processor's own cache: what is copied is fetched from memory again.
LARGE_BYTES = 8 << 20


class Planned(NamedTuple):
    """One bucket: the indices of its parameters, and whether it is a large gradient's own."""

    indices: list[int]
    large: bool = False


def plan_buckets(
    parameters: Sequence[torch.Tensor],
    order: Sequence[int],
    wire_dtype: Callable[[torch.dtype], torch.dtype],
    groups: Iterable[Sequence[int]] = (),
    *,
    large_bytes: float = LARGE_BYTES,
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
    large_bytes : float, default LARGE_BYTES
        From how many bytes on a gradient is by itself, if it is on the CPU, in no group, and
        travels as what it is.

    Returns
    -------
    list of Planned
        In the order in which they are expected to be full, but for the last one that is shared: it
        comes last of all. If all are large, an empty one does.
    """
    expected = {index: place for place, index in enumerate(order)}
    group_of = {index: number for number, group in enumerate(groups) for index in group}

    def bytes_of(index: int) -> int:
        return parameters[index].numel() * wire_dtype(parameters[index].dtype).itemsize

    def is_large(index: int) -> bool:
        parameter = parameters[index]
        as_it_is = wire_dtype(parameter.dtype) == parameter.dtype and not parameter.is_complex()
        on_host = parameter.device.type == "cpu"
        return as_it_is and on_host and index not in group_of and bytes_of(index) >= large_bytes

    large = [Planned([index], large=True) for index in order if is_large(index)]
    alone = {planned.indices[0] for planned in large}
    shared = [index for index in order if index not in alone]
    several = sum(bytes_of(index) for index in shared if index not in group_of) > BUCKET_BYTES
    done: list[list[int]] = []
    filling: dict[tuple[object, ...], list[int]] = {}
    seen: set[tuple[object, ...]] = set()
    for index in shared:
        parameter = parameters[index]
        key = (group_of.get(index), parameter.device, wire_dtype(parameter.dtype))
        bucket = filling.setdefault(key, [])
        bucket.append(index)
        if key[0] is None:
            first = several and key not in seen
            if sum(map(bytes_of, bucket)) >= (FIRST_BUCKET_BYTES if first else BUCKET_BYTES):
                seen.add(key)
                done.append(filling.pop(key))

    def when_full(planned: Planned) -> int:
        return max(expected[index] for index in planned.indices)

    packed = sorted((Planned(each) for each in [*done, *filling.values()]), key=when_full)
    closing = packed.pop() if packed else Planned([])
    return [*sorted([*packed, *large], key=when_full), closing]
