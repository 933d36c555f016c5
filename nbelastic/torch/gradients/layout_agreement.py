"""Agreement of the ranks of a generation on one layout of their gradients."""

from __future__ import annotations

import enum
import math
import weakref
import zlib
from typing import TYPE_CHECKING

import torch

from nbelastic.torch.gradients.layout import (
    LARGE_BYTES,
    PIECE_BYTES,
    Layout,
    Manifest,
    fusion_threshold,
    groups_of,
)
from nbelastic.torch.identity import same

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from nbelastic.collectives import Communicator
    from nbelastic.torch.gradients.arrived import ArrivedGradients
    from nbelastic.torch.gradients.options import ReduceOptions

# The gradients of a smaller model are all copied together: that takes one operation.
SMALL_MODEL_BYTES = 256 << 10

_NONE: set[int] = set()

# Number of optimizers that the ranks of each communicator have agreed on.
_agreed: weakref.WeakKeyDictionary[Communicator, int] = weakref.WeakKeyDictionary()


class ExchangeStage(enum.Enum):
    """What the ranks of a generation have exchanged."""

    NOTHING = "nothing"
    PARAMETERS = "parameters"  # They train the same. No order is known: this step shows one.
    STEP = "step"  # A step has shown an order; that of rank 0 is exchanged before the next
    ORDER = "order"  # They share an order. Nothing but gradients is exchanged from here on.


class LayoutAgreement:
    """Layout of one rank's gradients, kept equal to that of all ranks in its generation.

    That options and the names of parameters are equal is checked.
    """

    def __init__(
        self, options: ReduceOptions, names: Mapping[int, str], arrived: ArrivedGradients
    ) -> None:
        self.layout: Layout | None = None  # the last one that was agreed on
        self.number = 0  # of this optimizer in the generation, in the order of first steps
        self._options = options
        self._names = names
        self._arrived = arrived
        self._progress = ExchangeStage.NOTHING
        self._generation: int | None = None
        self._numbered_in: int | None = None
        self._observed: list[int] | None = None
        self._after_backward = False
        self._bucket_bytes = 0

    def holds_in(self, generation: int) -> bool:
        """Return whether the ranks of a generation have agreed on a layout."""
        return self._progress is not ExchangeStage.NOTHING and self._generation == generation

    def arrange(self, communicator: Communicator, parameters: list[torch.Tensor]) -> Layout:
        """Return the layout for the next step. All ranks call it at the same point.

        A rank that does not train what rank 0 trains has a ValueError.
        """
        stage = self._stage(communicator, parameters)
        if self.layout is not None:
            if stage in (ExchangeStage.PARAMETERS, ExchangeStage.ORDER):
                return self.layout
            if not same(self.layout.parameters, parameters):
                self.layout = self._observed = None
        # Unless the exchange goes well, nothing is known of the other ranks.
        self._progress = ExchangeStage.NOTHING
        root_has_order = stage is ExchangeStage.STEP or self._compare(communicator, parameters)
        if self._numbered_in != communicator.generation:
            self._numbered_in = communicator.generation
            self.number = _agreed[communicator] = _agreed.get(communicator, 0) + 1
        order = list(reversed(range(len(parameters))))
        if root_has_order:
            order = self._order_of_root(communicator, order)
        manifest = Manifest(
            order,
            _in_place_bytes(communicator, parameters, self._after_backward),
            communicator.capabilities.coalesces,
            communicator.capabilities.coalesces and self._after_backward,
            communicator.capabilities.devices,
            self._bucket_bytes,
        )
        if self.layout is None or self.layout.manifest != manifest:
            self.layout = Layout(parameters, manifest, self._options, self._arrived)
        self._generation = communicator.generation
        self._progress = ExchangeStage.ORDER if root_has_order else ExchangeStage.PARAMETERS
        return self.layout

    def exchanges(self, communicator: Communicator, parameters: list[torch.Tensor]) -> bool:
        """Return whether :meth:`arrange` exchanges anything with other ranks."""
        stage = self._stage(communicator, parameters)
        return stage in (ExchangeStage.NOTHING, ExchangeStage.STEP)

    def _stage(self, communicator: Communicator, parameters: list[torch.Tensor]) -> ExchangeStage:
        """Return what ranks have exchanged about these parameters in this generation."""
        if (
            self._generation != communicator.generation
            or self.layout is None
            or not same(self.layout.parameters, parameters)
        ):
            return ExchangeStage.NOTHING
        return self._progress

    def number_in(self, communicator: Communicator) -> int:
        """Return this optimizer's number in a generation, or the one that it would get now."""
        if self._numbered_in == communicator.generation:
            return self.number
        return _agreed.get(communicator, 0) + 1

    @property
    def is_to_exchange_order(self) -> bool:
        """Whether :meth:`arrange` exchanges the order that the last step has shown."""
        return self._progress is ExchangeStage.STEP

    def is_one_of_several(self, communicator: Communicator) -> bool:
        """Return whether ranks may step different optimizers, which nothing else would notice."""
        return _agreed.get(communicator, 0) > 1

    def observe(self, arrived: Iterable[int]) -> None:
        """Record the order of arrival of gradients after a first step that succeeded.

        It is given as ids of parameters. Those without a gradient come last.
        """
        if self.layout is None or self._progress is not ExchangeStage.PARAMETERS:
            return
        self._progress = ExchangeStage.STEP
        index_of = {id(p): index for index, p in enumerate(self.layout.parameters)}
        first = [index_of[key] for key in arrived if key in index_of]
        missing = set(index_of.values()).difference(first)
        self._observed = [*first, *sorted(missing, reverse=True)]

    def deferrable(self) -> set[int]:
        """Return the ids of parameters whose gradients may be handled with a later one."""
        if self.layout is None or self._progress is not ExchangeStage.ORDER:
            return _NONE
        return self.layout.deferrable

    def _compare(self, communicator: Communicator, parameters: Sequence[torch.Tensor]) -> bool:
        """Compare parameters and options with rank 0; return whether it has an order to share."""
        options = self._options
        groups = groups_of(parameters, range(len(parameters)), options.groups)
        what = (
            [(self._names.get(id(p), ""), tuple(p.shape), p.dtype) for p in parameters],
            (options.op.name, options.compression_name, options.predivide),
            groups,
        )
        checksum, has_order = zlib.crc32(repr(what).encode()), self._observed is not None
        overlaps = communicator.capabilities.overlaps
        mine = [len(parameters), checksum, has_order, not overlaps, fusion_threshold()]
        message = torch.tensor(mine, dtype=torch.int64)
        communicator.broadcast(message, 0)
        count, checksum, has_order, after_backward, self._bucket_bytes = message.tolist()
        self._after_backward = bool(after_backward)
        if (count, checksum) != (mine[0], mine[1]):
            error = (
                f"the optimizer of rank {communicator.rank} is not that of rank 0: it trains "
                f"{mine[0]} tensors, that of rank 0 {count}"
                + (", with other names, shapes, types or options" if count == mine[0] else "")
                + "; make the same model and optimizer on all ranks"
            )
            communicator.abort(error)  # rank 0 reduces gradients that this rank cannot take part in
            raise ValueError(error)
        return bool(has_order)

    def _order_of_root(self, communicator: Communicator, default: list[int]) -> list[int]:
        message = torch.tensor(self._observed or default, dtype=torch.int64)
        communicator.broadcast(message, 0)
        order: list[int] = message.tolist()
        return order


def _in_place_bytes(
    communicator: Communicator, parameters: Sequence[torch.Tensor], after_backward: bool
) -> float:
    """Return from how many bytes on gradients are reduced where they are."""
    if not communicator.capabilities.reduces_in_place:
        return math.inf
    if not communicator.capabilities.coalesces:
        return LARGE_BYTES
    if sum(parameter.nbytes for parameter in parameters) <= SMALL_MODEL_BYTES:
        return math.inf
    return 0 if after_backward else PIECE_BYTES
