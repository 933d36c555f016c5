"""Agreement of the ranks of a generation on one layout of their gradients."""

from __future__ import annotations

import enum
import weakref
import zlib
from typing import TYPE_CHECKING

import torch

from nbelastic.errors import CollectiveError
from nbelastic.torch.gradients.layout import (
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

_NONE: set[int] = set()
_UNKNOWN = Manifest([], after_backward=False)

# Number of optimizers that the ranks of each communicator have agreed on.
_agreed: weakref.WeakKeyDictionary[Communicator, int] = weakref.WeakKeyDictionary()


class ExchangeStage(enum.Enum):
    """What the ranks of a generation have exchanged."""

    NOTHING = "nothing"
    PARAMETERS = "parameters"  # They train the same. No order is known: this step shows one.
    STEP = "step"  # A step has shown an order; that of rank 0 is exchanged before the next
    ORDER = "order"  # They share an order. Nothing but gradients is exchanged from here on.


class LayoutAgreement:
    """Layout of a rank's gradients, kept equal on all ranks of a generation.

    That options and the names of parameters are equal is checked.
    """

    def __init__(
        self, kind: str, options: ReduceOptions, names: Mapping[int, str], arrived: ArrivedGradients
    ) -> None:
        self.layout: Layout | None = None  # with memory, as long as it is used
        self.number = 0  # of this optimizer in the generation, in the order of first steps
        self._kind = kind  # of the optimizer, in messages
        self._options = options
        self._names = names
        self._arrived = arrived
        self._parameters: list[torch.Tensor] = []
        self._manifest = _UNKNOWN
        self._progress = ExchangeStage.NOTHING
        self._generation: int | None = None
        self._numbered_in: int | None = None
        self._failed: int | None = None
        self._observed: list[int] | None = None

    def holds_in(self, generation: int) -> bool:
        """Return whether the ranks of a generation have agreed on a layout."""
        return self._progress is not ExchangeStage.NOTHING and self._generation == generation

    def arrange(self, communicator: Communicator, parameters: list[torch.Tensor]) -> Layout:
        """Return the layout for the next step. All ranks call it at the same point.

        A rank that does not train what rank 0 trains has a ValueError.
        """
        if communicator.generation == self._failed:
            raise CollectiveError(
                f"a step of generation {self._failed} was left half-way on this rank; restore the "
                "last commit, as the elastic loop does"
            )
        if self.exchanges(communicator, parameters):
            self._failed = communicator.generation  # unless the exchange goes well
            self._exchange(communicator, parameters)
            self._failed = None
        layout = self.layout
        if layout is None or layout.communicator() is not communicator:
            layout = Layout(communicator, parameters, self._manifest, self._options, self._arrived)
            self.layout = layout
        return layout

    def _exchange(self, communicator: Communicator, parameters: list[torch.Tensor]) -> None:
        stage = self._stage(communicator, parameters)
        if not same(self._parameters, parameters):
            self._parameters, self._observed = parameters, None
        # Unless the exchange goes well, nothing is known of the other ranks.
        self._progress = ExchangeStage.NOTHING
        manifest, root_has_order = self._manifest, True
        if stage is ExchangeStage.NOTHING:
            manifest, root_has_order = self._compare(communicator, parameters)
        if self._numbered_in != communicator.generation:
            self._numbered_in = communicator.generation
            self.number = _agreed[communicator] = _agreed.get(communicator, 0) + 1
        if root_has_order:
            order = torch.tensor(self._observed or manifest.order, dtype=torch.int64)
            communicator.broadcast(order, 0)
            manifest = manifest._replace(order=order.tolist())
        if stage is ExchangeStage.NOTHING or manifest != self._manifest:
            self.layout, self._manifest = None, manifest
        self._generation = communicator.generation
        self._progress = ExchangeStage.ORDER if root_has_order else ExchangeStage.PARAMETERS

    def release(self) -> None:
        """Free the memory of the layout; gradients in it move out."""
        if self.layout is not None:
            self.layout.leave()
            self.layout = None

    def fail(self, generation: int) -> None:
        """Give the memory away, with the gradients in it: the generation has failed here."""
        if self.layout is not None:
            self.layout.leave(lost=True)
            self.layout = None
        self._failed = generation

    def exchanges(self, communicator: Communicator, parameters: list[torch.Tensor]) -> bool:
        """Return whether :meth:`arrange` exchanges anything with other ranks."""
        stage = self._stage(communicator, parameters)
        return stage in (ExchangeStage.NOTHING, ExchangeStage.STEP)

    def _stage(self, communicator: Communicator, parameters: list[torch.Tensor]) -> ExchangeStage:
        """Return what ranks have exchanged about these parameters in this generation."""
        if self._generation != communicator.generation or not same(self._parameters, parameters):
            return ExchangeStage.NOTHING
        return self._progress

    def number_in(self, communicator: Communicator) -> int:
        """Return this optimizer's number in a generation, or the next number if it has none yet."""
        if self._numbered_in == communicator.generation:
            return self.number
        return _agreed.get(communicator, 0) + 1

    @property
    def is_to_exchange_order(self) -> bool:
        """Whether :meth:`arrange` exchanges the order that the last step has shown."""
        return self._progress is ExchangeStage.STEP

    def description(self, communicator: Communicator, parameters: list[torch.Tensor]) -> str:
        """Return a description of this optimizer, equal on all ranks.

        Nothing where ranks cannot step different optimizers, which nothing else would notice.
        """
        if _agreed.get(communicator, 0) <= 1:
            return ""
        first = f", of which the first is {self._arrived.name(parameters[0])}" if parameters else ""
        return (
            f"step() of distributed optimizer {self.number} "
            f"({self._kind} of {len(parameters)} tensors{first})"
        )

    def observe(self, arrived: Iterable[int]) -> None:
        """Record the order of arrival of gradients after a first step that succeeded.

        It is given as ids of parameters. Those without a gradient come last.
        """
        if self._progress is not ExchangeStage.PARAMETERS:
            return
        self._progress = ExchangeStage.STEP
        index_of = {id(p): index for index, p in enumerate(self._parameters)}
        first = [index_of[key] for key in arrived if key in index_of]
        missing = set(index_of.values()).difference(first)
        self._observed = [*first, *sorted(missing, reverse=True)]

    def deferrable(self) -> set[int]:
        """Return the ids of parameters whose gradients may be handled with a later one."""
        if self.layout is None or self._progress is not ExchangeStage.ORDER:
            return _NONE
        return self.layout.deferrable

    def _compare(
        self, communicator: Communicator, parameters: Sequence[torch.Tensor]
    ) -> tuple[Manifest, bool]:
        """Compare parameters and options with rank 0.

        Return the manifest of a generation, and whether rank 0 has an order to share.
        """
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
        count, checksum, has_order, after_backward, bucket_bytes = message.tolist()
        if (count, checksum) != (mine[0], mine[1]):
            error = (
                f"the optimizer of rank {communicator.rank} is not that of rank 0: it trains "
                f"{mine[0]} tensors, that of rank 0 {count}"
                + (", with other names, shapes, types or options" if count == mine[0] else "")
                + "; make the same model and optimizer on all ranks"
            )
            communicator.abort(error)  # rank 0 reduces gradients that this rank cannot take part in
            raise ValueError(error)
        order = list(reversed(range(len(parameters))))
        return Manifest(order, bool(after_backward), bucket_bytes), bool(has_order)
