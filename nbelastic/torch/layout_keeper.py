"""How ranks come to share a layout of their gradients.

See :mod:`nbelastic.torch.reducer` for what is shared, and when.
"""

from __future__ import annotations

import math
import zlib
from typing import TYPE_CHECKING

import torch

from nbelastic.torch.bucket_plan import LARGE_BYTES, PIECE_BYTES
from nbelastic.torch.identity import same
from nbelastic.torch.layout import Layout, Manner, groups_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from nbelastic.collectives import Communicator
    from nbelastic.torch.layout import ReduceOptions

__all__ = ["LayoutKeeper"]

# Of a model that has no more, all gradients are copied together: that takes one operation.
SMALL_MODEL_BYTES = 256 << 10

_NONE: set[int] = set()


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
        self._late = False
        self._settled = False
        self._observing = False

    @property
    def generation(self) -> int | None:
        """For which generation the layout is, if it is known to be that of all ranks."""
        return self._generation

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
        if layout is None or not same(layout.parameters, parameters):
            layout = self._observed = self._generation = None
        elif self._settled and self._generation == communicator.generation:
            return layout
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
        least = _least_in_place(communicator, parameters, self._late)
        manner = Manner(least, communicator.coalesces, communicator.coalesces and self._late)
        if layout is None or layout.order != order or layout.made_for != manner:
            layout = Layout(parameters, order, self._options, manner)
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
        return self._layout.quiet if self._layout is not None and self._settled else _NONE

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
        groups = groups_of(parameters, range(len(parameters)), options.groups)
        what = (
            [(self._names.get(id(p), ""), tuple(p.shape), p.dtype) for p in parameters],
            (options.op.name, options.compression.__name__, options.predivide),
            groups,
        )
        late = not communicator.overlaps
        mine = [len(parameters), zlib.crc32(repr(what).encode()), self._observed is not None, late]
        message = torch.tensor(mine, dtype=torch.int64)
        communicator.broadcast(message, 0)
        count, checksum, observed, late = message.tolist()
        self._late = bool(late)
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


def _least_in_place(
    communicator: Communicator, parameters: Sequence[torch.Tensor], late: bool
) -> float:
    """Return from how many bytes on gradients are reduced where they are."""
    if not communicator.anywhere:
        return math.inf
    if not communicator.coalesces:
        return LARGE_BYTES
    if sum(parameter.nbytes for parameter in parameters) <= SMALL_MODEL_BYTES:
        return math.inf
    return 0 if late else PIECE_BYTES
