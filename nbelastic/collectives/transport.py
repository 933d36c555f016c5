"""TensorTransport: what a new kind of communicator provides.

:class:`~nbelastic.collectives.Communicator` has the operations that users call. It checks their
arguments, leaves out what is empty, and brings tensors to the memory that the transport works on.
The transport does the rest, in the methods that begin with ``begin_``.
"""

from __future__ import annotations

import abc
import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias

if TYPE_CHECKING:
    import torch

    from nbelastic.collectives.reduction_tree import Blocks

    Tensors: TypeAlias = Sequence[torch.Tensor]
    Nodes: TypeAlias = Sequence[Tensors]


class Op(enum.Enum):
    """How to reduce the values of all ranks."""

    SUM = "sum"
    AVERAGE = "average"
    MIN = "min"
    MAX = "max"
    PRODUCT = "product"


class Handle(Protocol):
    """An operation under way."""

    def done(self) -> bool:
        """Return whether the operation has succeeded, failed or been aborted."""

    def wait(self) -> None:
        """Wait for the operation.

        Raises
        ------
        CollectiveError
            It failed or was aborted. Its tensors are given away (see the module's docstring).
        """


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """What a transport can do.

    Parameters
    ----------
    devices : frozenset of str
        Types of accelerators, as torch calls them, whose tensors are handed to it. All others are
        staged in host memory.
    overlaps : bool
        Whether operations proceed while the rank computes. If not, they take its processor's time,
        and are best begun together when computing has ended.
    coalesces : bool
        Whether many tensors are reduced in place at the cost of one. Ranks may split the values
        into tensors differently.
    carries_descriptions : bool
        Whether a rank in another operation can read the description that precedes a record.
    stops_sending_on_failure : bool
        Whether no peer receives anything from a lent tensor once an operation has failed. If not, a
        tensor that is changed then may arrive half changed on ranks that have not failed yet.
    """

    devices: frozenset[str] = frozenset()
    overlaps: bool = True
    coalesces: bool = False
    carries_descriptions: bool = False
    stops_sending_on_failure: bool = False


class TensorTransport(abc.ABC):
    """The operations of one kind of communicator.

    Each method begins an operation and returns its handle. Arguments are right, contiguous and
    detached; tensors lie on the CPU or on one of :attr:`Capabilities.devices`. They are lent until
    the handle has succeeded, and given away if it fails: a peer or a thread may still use their
    memory then. Types are those of ``check_op`` for a reduction; any, for what only moves.

    All ranks begin the same operations in the same order, except for messages. A handle that fails,
    or an abort, breaks the communicator: from then on every method and every handle raises
    :class:`~nbelastic.errors.CollectiveError`.

    An operation that is added later has a default here, made of :meth:`begin_all_to_all` as that of
    :meth:`begin_allreduce_tree` is, so that no transport must change.
    """

    capabilities: Capabilities = Capabilities()

    staged: tuple[str, ...] = ()
    """Operations whose tensors of devices are staged in host memory all the same."""

    rank: int
    size: int

    @abc.abstractmethod
    def begin_nothing(self) -> Handle:
        """Begin an operation without data, which no rank takes part in."""

    @abc.abstractmethod
    def begin_allreduce(self, tensors: Tensors, op: Op) -> Handle:
        """Reduce tensors of one type in place, with the same result on all ranks.

        Some have elements. There is one, unless the transport coalesces.
        """

    @abc.abstractmethod
    def begin_broadcast(self, tensor: torch.Tensor, root: int) -> Handle:
        """Fill a tensor, not empty, from rank `root`'s."""

    @abc.abstractmethod
    def begin_allgather(self, outputs: Tensors, tensor: torch.Tensor) -> Handle:
        """Fill each of `outputs` with a rank's tensor; it has elements."""

    @abc.abstractmethod
    def begin_all_to_all(self, outputs: Tensors, inputs: Tensors) -> Handle:
        """Send each input to a rank, and fill each output by a rank. Any tensor may be empty."""

    @abc.abstractmethod
    def begin_barrier(self) -> Handle:
        """Wait until all ranks have begun it."""

    @abc.abstractmethod
    def begin_send(self, parts: Tensors, to: int) -> Handle:
        """Send vectors of a type to another rank, as a message that is not empty."""

    @abc.abstractmethod
    def begin_receive(self, tensor: torch.Tensor, source: int) -> Handle:
        """Fill a tensor with a message of another rank, of as many bytes."""

    def begin_reduce_scatter(self, output: torch.Tensor, inputs: Tensors, op: Op) -> Handle:
        """Fill `output` with the reduction of all ranks' inputs for this rank; some have elements.

        By default an allreduce, of which each rank takes its part.
        """
        import torch

        from nbelastic.collectives.buffers import Delivered

        buffer = torch.cat([each.detach().view(-1) for each in inputs])
        own = torch.split(buffer, [each.numel() for each in inputs])[self.rank]
        handle = self.begin_allreduce([buffer], op)
        return Delivered(handle, lambda: output.copy_(own.view(output.shape)))

    def begin_allreduce_tree(self, nodes: Nodes, blocks: Blocks, outputs: Tensors) -> Handle:
        """Fill `outputs`, of which some have elements, with a sum along a tree.

        They are the same sequence as the first of `nodes` where that is reduced in place. By
        default two exchanges of :meth:`begin_all_to_all`.
        """
        from nbelastic.collectives.tree_exchange import allreduce_tree

        return allreduce_tree(self, nodes, blocks, outputs)
