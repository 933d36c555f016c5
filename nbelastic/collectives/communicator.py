"""Communicator: collective operations between the ranks of one generation.

Ownership of buffers: a transport may still write into the buffers of an operation that has failed.
So every tensor handed to a communicator is *lent* until the operation has succeeded, and *given
away* if it fails: after a :class:`~nbelastic.errors.CollectiveError` the caller must not use it
again. Callers that work on their users' tensors copy them first.

Threads: the rank's thread calls everything but :meth:`Communicator.abort`, which any thread may
call at any time. All ranks issue the same operations in the same order.
"""

from __future__ import annotations

import abc
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Concatenate, ParamSpec

from nbelastic.collectives import buffers
from nbelastic.collectives.buffers import Delivered, copy_back, delivered, on_host
from nbelastic.collectives.consistency import NUMBERS, RECORD, History, described, disagreement
from nbelastic.collectives.rendezvous.client import MATCHING, Rendezvous, RendezvousClient
from nbelastic.collectives.transport import Handle, Op, TensorTransport
from nbelastic.errors import CollectiveError

if TYPE_CHECKING:
    import torch

    from nbelastic.collectives.abort_signal import AbortSignal
    from nbelastic.collectives.reduction_tree import Blocks
    from nbelastic.collectives.transport import Nodes, Tensors

P = ParamSpec("P")

connectors: list[Callable[[Rendezvous], Communicator]] = []
"""What makes a communicator of any kind; the package, which knows all kinds, adds it."""

apart: list[Callable[[Communicator, str, int], list[int]]] = []
"""What compares apart from operations; the coordination of operations, which can, adds it."""


def _blocking(
    begin: Callable[Concatenate[Communicator, P], Handle],
) -> Callable[Concatenate[Communicator, P], None]:
    """Return the operation of `begin` as a method that waits for its end."""
    name = begin.__name__

    def operation(self: Communicator, /, *arguments: P.args, **options: P.kwargs) -> None:
        getattr(self, name)(*arguments, **options).wait()  # by its name, as kinds override it

    operation.__name__ = name.removesuffix("_async")
    operation.__doc__ = f"Wait for what :meth:`{name}` begins."
    return operation


class Communicator(TensorTransport):
    """Operations between the ranks of one generation.

    All tensors are contiguous. Operations work in place or fill a given output, and either
    complete on this rank or raise :class:`~nbelastic.errors.CollectiveError`. After the first
    failure or :meth:`abort` the communicator is broken: each further operation fails at once. So
    does each operation under way, even if its data has arrived.

    An argument that is wrong by itself raises ``ValueError`` before anything is sent. A difference
    between ranks, in the operation, its shapes or types, is found by :meth:`agree` only, which
    precedes users' operations. Without it, Gloo may end the process on a difference.
    """

    name: str
    """``gloo``, ``shm``, ``hierarchical``, ``cuda_ipc``, ``nccl``, ``pygloo`` or ``solo``."""

    fallback_reason: str = ""
    """Why the ranks could not use a faster kind, in words; empty if this is the fastest."""

    current_operation: str = ""
    """Description of the operation under way, where known. Read by other threads."""

    waits_apart: bool = False
    """Whether the rank's thread waits for other ranks by other means. Read by other threads."""

    part_of: tuple[weakref.ref[Communicator], str, list[int]] | None = None
    """For a subgroup, the communicator that it is a part of, its name there, and its ranks."""

    def __init__(self, rendezvous: Rendezvous, abort_signal: AbortSignal) -> None:
        self.rank = rendezvous.rank
        self.size = rendezvous.size
        self.generation = rendezvous.generation
        self._rendezvous = rendezvous
        self._abort_signal = abort_signal
        self.history = History()  # operations that ranks have compared so far
        self._subgroups: dict[str, Communicator] = {}
        self._waiting = False
        self._completed = 0

    @abc.abstractmethod
    def connect(self) -> Communicator:
        """Connect to the other ranks; called once. Return the communicator to use from here on.

        That is this one, or one negotiated with the other ranks, which :meth:`abort` of this one
        reaches as well. Blocks until this rank can take part in operations, or for an abort.
        """

    def empty(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a new uninitialised vector that is reduced without being copied.

        It lies in the communicator's own memory if there is any, and stays valid as long as it is
        referenced, unless it is given away.
        """
        import torch

        return torch.empty(count, dtype=dtype)

    def agree(self, text: str, number: int = 0, pattern: Hashable = None) -> list[int]:
        """Wait for all ranks, and check that all are about to do the same.

        `text` says what: a line, and details, one a line. Returns the numbers of all ranks, which
        may differ. Where the texts differ, all ranks raise :class:`~nbelastic.errors.RanksDisagree`
        and the communicator stays usable. The history gets the `pattern`, by default the text.
        """
        history = self.history
        if history.apart:
            return apart[0](self, text, number)
        history.begins = text  # set before `asked` is read, to which others add before they read it
        if history.number in history.asked:
            history.begins = ""
            return apart[0](self, text, number)
        agreed: Hashable = None
        try:
            numbers = self.compare(text, number)
            agreed = text if pattern is None else pattern
        finally:
            history.begins = ""  # before there is a next number
            history.add(agreed)
        return numbers

    def compare(self, text: str, number: int = 0) -> list[int]:
        """Compare `text` by records; a part of :meth:`agree`."""
        self.current_operation, headline, digest, length = described(text)
        record = digest + NUMBERS.pack(length, number)
        if self.capabilities.carries_descriptions:
            record = headline + record
        records = self.allgather_bytes(record)
        if records.count(record) == len(records):  # as most are
            return [number] * len(records)
        records = [each[-RECORD:] for each in records]
        said = [NUMBERS.unpack(each[-NUMBERS.size :]) for each in records]
        lengths, numbers = ([each[place] for each in said] for place in (0, 1))
        if all(each.startswith(digest) for each in records):
            return numbers
        padded = self.allgather_bytes(text.encode(errors="replace").ljust(max(lengths), b"\0"))
        texts = [each[:length].decode() for each, length in zip(padded, lengths, strict=True)]
        raise disagreement(texts, numbers=numbers)

    def allgather_bytes(self, record: bytes) -> list[bytes]:
        """Return the `record` of every rank, all of a length, and wait for it."""
        import torch

        mine = torch.frombuffer(bytearray(record), dtype=torch.uint8)
        everyone = [torch.empty_like(mine) for _ in range(self.size)]
        self.allgather(everyone, mine)
        return [each.numpy().tobytes() for each in everyone]

    def allreduce_async(self, tensor: torch.Tensor, op: Op = Op.SUM) -> Handle:
        """Reduce `tensor` over all ranks, in place, with the same result on all of them.

        ``Op.AVERAGE`` is for floating point only.
        """
        check_contiguous(tensor)
        check_op(tensor, op)
        if tensor.numel() == 0:
            return self.begin_nothing()  # on all ranks, because their shapes are equal
        if buffers.is_on_host(tensor):  # as most: without what several tensors cost
            return self.begin_allreduce([tensor.detach()], op)
        return self._allreduce([tensor], op)

    def allreduce_coalesced_async(self, tensors: Tensors, op: Op = Op.SUM) -> Handle:
        """Reduce `tensors`, one or more of the same type, over all ranks, in place."""
        check_together(tensors, "tensors")
        check_op(tensors[0], op)
        if self.capabilities.coalesces:
            return self._allreduce(tensors, op)
        import torch

        vector = torch.cat([tensor.detach().view(-1) for tensor in tensors])
        return Delivered(self.allreduce_async(vector, op), lambda: copy_back(vector, tensors))

    def _allreduce(self, tensors: Tensors, op: Op) -> Handle:
        if not any(tensor.numel() for tensor in tensors):
            return self.begin_nothing()
        near = self._near(tensors)
        return delivered(self.begin_allreduce(near, op), tensors, near)

    def allreduce_tree_async(
        self, nodes: Nodes, blocks: Blocks, outputs: Tensors | None = None
    ) -> Handle:
        """Sum tensors over the leaves of a tree, in the tree's order, on all ranks.

        The sum has the same bits for any number of ranks and any `blocks` of as many leaves (see
        :mod:`nbelastic.collectives.reduction_tree`), on all communicators. Each addition is rounded
        to the tensors' type. Signed zeros, infinities and subnormal numbers are as in numpy; of a
        result that is NaN, the payload may differ.

        Presence does not travel: a rank without a value for a leaf leaves the leaf out of its
        node's sum. Where it has none for the whole node, it gives
        :data:`~nbelastic.collectives.reduction_tree.IDENTITY`. A sum without any value is that.

        `nodes` has, for each node that covers this rank's block, ``blocks.covers[rank]``, the sums
        of its leaves: tensors of one type, in the shapes of `outputs`. `blocks` are the same on all
        ranks. `outputs` are filled with the sums, by default those of the first node, in place; a
        rank with an empty block must give them. They share no memory with other nodes' tensors.
        Arguments are not checked: micro-batches, which bring them, fit together by construction.
        """
        found = nodes[0] if outputs is None else outputs
        if not any(tensor.numel() for tensor in found):
            return self.begin_nothing()
        in_place = bool(nodes) and found is nodes[0]
        near = self._near(found, "allreduce_tree", load=in_place)
        ours = [near if node is found else self._near(node, "allreduce_tree") for node in nodes]
        return delivered(self.begin_allreduce_tree(ours, blocks, near), found, near)

    def broadcast_async(self, tensor: torch.Tensor, root: int = 0) -> Handle:
        """Copy the `tensor` of rank `root` to all other ranks."""
        check_contiguous(tensor)
        check_rank(root, self.size, "root")
        if tensor.numel() == 0:
            return self.begin_nothing()
        near = self._near([tensor], load=self.rank == root)  # others need no values
        handle = self.begin_broadcast(near[0], root)
        return handle if self.rank == root else delivered(handle, [tensor], near)

    def allgather_async(self, outputs: Tensors, tensor: torch.Tensor) -> Handle:
        """Collect every rank's `tensor`, of one shape, into `outputs`, a tensor per rank."""
        check_together(outputs, "outputs", self.size)
        check_contiguous(tensor)
        for output in outputs:
            check_alike(output, tensor, "every output", "the tensor gathered")
        if tensor.numel() == 0:
            return self.begin_nothing()
        near = self._near(outputs, "allgather", load=False)
        (source,) = self._near([tensor], "allgather")
        return delivered(self.begin_allgather(near, source), outputs, near)

    def reduce_scatter_async(
        self, output: torch.Tensor, inputs: Tensors, op: Op = Op.SUM
    ) -> Handle:
        """Reduce ``inputs[i]`` of all ranks into `output` of rank ``i``."""
        check_together(inputs, "inputs", self.size)
        check_contiguous(output)
        check_op(output, op)
        check_alike(output, inputs[self.rank], "output", f"inputs[{self.rank}], its own part")
        if not any(tensor.numel() for tensor in inputs):
            return self.begin_nothing()
        near = self._near([output], load=False)
        handle = self.begin_reduce_scatter(near[0], self._near(inputs), op)
        return delivered(handle, [output], near)

    def all_to_all_async(self, outputs: Tensors, inputs: Tensors) -> Handle:
        """Send ``inputs[i]`` to rank ``i``, receive ``outputs[i]`` from it. Shapes may differ."""
        check_together(outputs, "outputs", self.size)
        check_together(inputs, "inputs", self.size)
        own = self.rank
        check_alike(outputs[own], inputs[own], f"outputs[{own}]", f"inputs[{own}]")
        near = self._near(outputs, "all_to_all", load=False)
        handle = self.begin_all_to_all(near, self._near(inputs, "all_to_all"))
        return delivered(handle, outputs, near)

    def barrier_async(self) -> Handle:
        """Complete when all ranks have arrived."""
        return self.begin_barrier()

    def send_async(self, tensor: torch.Tensor, to: int) -> Handle:
        """Send `tensor` to rank `to`."""
        check_contiguous(tensor)
        return self.send_parts_async([tensor.view(-1)], to)

    def send_parts_async(self, parts: Tensors, to: int) -> Handle:
        """Send `parts`, vectors of the same type, to be received as one tensor."""
        check_rank(to, self.size, "to", own=self.rank)
        if not any(part.numel() for part in parts):
            return self.begin_nothing()
        return self.begin_send([on_host(part) for part in parts], to)

    def receive_async(self, tensor: torch.Tensor, source: int) -> Handle:
        """Receive `tensor` from rank `source`."""
        check_contiguous(tensor)
        check_rank(source, self.size, "source", own=self.rank)
        if tensor.numel() == 0:
            return self.begin_nothing()
        buffer = on_host(tensor, load=False)
        return delivered(self.begin_receive(buffer, source), [tensor], [buffer])

    def _near(
        self, tensors: Tensors, operation: str = "", *, load: bool = True
    ) -> list[torch.Tensor]:
        """Return tensors, or staging buffers where the transport cannot work on a tensor."""
        devices = self.capabilities.devices if operation not in self.staged else ()
        return [
            tensor.detach()
            if devices and tensor.device.type in devices
            else on_host(tensor, load=load)
            for tensor in tensors
        ]

    allreduce = _blocking(allreduce_async)
    allreduce_coalesced = _blocking(allreduce_coalesced_async)
    allreduce_tree = _blocking(allreduce_tree_async)
    broadcast = _blocking(broadcast_async)
    allgather = _blocking(allgather_async)
    reduce_scatter = _blocking(reduce_scatter_async)
    all_to_all = _blocking(all_to_all_async)
    barrier = _blocking(barrier_async)
    send = _blocking(send_async)
    receive = _blocking(receive_async)

    def check(self) -> None:
        """Raise :class:`~nbelastic.errors.CollectiveError` if the communicator is broken."""
        self._abort_signal.check()

    @property
    def waiting(self) -> bool:
        """Whether the rank's thread is waiting for an operation. Read by other threads."""
        return (
            self._waiting
            or self.waits_apart
            # A copy, because the rank's thread may add a subgroup meanwhile.
            or any(each.waiting for each in list(self._subgroups.values()))
        )

    @property
    def completed(self) -> int:
        """Number of operations completed. Read by other threads, to see progress."""
        return self._completed + sum(each.completed for each in list(self._subgroups.values()))

    def restart_count(self) -> None:
        """Count operations from here on: those of a negotiation are no progress of the rank."""
        self._completed = 0

    @property
    def dead_ranks(self) -> tuple[int, ...]:
        """Ranks whose processes are known to have ended. Others may have ended, too."""
        return ()

    def abort(self, reason: str, kind: type[CollectiveError] = CollectiveError) -> None:
        """Break the communicator, and free waiting threads within milliseconds.

        Any thread may call it, any number of times; it returns at once. Afterwards every
        operation, under way or new, raises ``kind(reason)``.
        """
        self._abort_signal.abort(reason, kind=kind)

    def on_abort(self, callback: Callable[[str, bool], object]) -> None:
        """Call ``callback(reason, orderly)`` when the communicator ends; it must not block.

        `orderly` is whether it was closed with no operation under way.
        """
        self._abort_signal.on_abort(callback)

    def subgroup(self, ranks: Sequence[int], name: str) -> Communicator:
        """Return a connected communicator of some of the ranks, in ascending order; all call this.

        It has an order of operations of its own, and ends with this communicator; if it fails, so
        does this one. :meth:`close` of it alone leaves this one as it is. A `name` stands for the
        same ranks in the whole generation: a second call with it returns the same communicator.
        """
        if name in self._subgroups:
            return self._subgroups[name]
        self.check()
        made = self._subgroups[name] = connectors[0](self._rendezvous.part(name, ranks))
        # Weak references, because each signal keeps its callbacks as long as it lives.
        whole, part = weakref.ref(self._abort_signal), weakref.ref(made._abort_signal)

        def end_part(reason: str, _orderly: bool) -> None:
            if (signal := part()) is not None:
                signal.abort(reason)

        def end_whole(reason: str, orderly: bool) -> None:
            if not orderly and (signal := whole()) is not None:
                signal.abort(reason)

        self.on_abort(end_part)  # first: an abort must reach a part that connects, too
        try:
            connected = made.connect()
        except BaseException:
            del self._subgroups[name]
            made.close()
            raise
        connected.on_abort(end_whole)
        connected.part_of = weakref.ref(self), name, list(ranks)  # weak: the whole keeps it
        self._subgroups[name] = connected
        return connected

    def close_subgroup(self, name: str) -> None:
        """Close a communicator of :meth:`subgroup`, if there is one."""
        closed = self._subgroups.pop(name, None)
        if closed is not None:
            self._completed += closed.completed  # the sum of all must never become less
            closed.close()

    def close_subgroups(self) -> None:
        """Close all of them, in an orderly way, as the first part of closing this communicator."""
        subgroups, self._subgroups = self._subgroups, {}
        for each in subgroups.values():
            each.close()

    def matching_client(self) -> RendezvousClient | None:
        """Return a new client of the generation's matching of operations; None for a rank alone.

        See :mod:`nbelastic.collectives.rendezvous.matcher`.
        """
        return RendezvousClient(self._rendezvous, MATCHING)

    def cut_connections(self) -> int:
        """Cut the connections to other ranks as a network failure would; return their number."""
        return 0

    @abc.abstractmethod
    def close(self) -> None:
        """Free all resources. Idempotent; allowed in any state.

        Returns at once. Operations stuck in a transport are freed in the background.
        """


# -- checks of arguments, before anything is sent: a wrong one leaves the communicator usable ------

_REDUCIBLE = "bfloat16, bool, float16, float32, float64, int32, int64, int8, uint8"
_TYPES = {f"torch.{name}" for name in _REDUCIBLE.split(", ")}


def check_op(tensor: torch.Tensor, op: Op) -> None:
    """Refuse an `op` that the type of `tensor` does not support."""
    if str(tensor.dtype) not in _TYPES:
        raise ValueError(f"{tensor.dtype} cannot be reduced; convert it to one of {_REDUCIBLE}")
    if op is Op.AVERAGE and not tensor.dtype.is_floating_point:
        raise ValueError(
            f"Op.AVERAGE is for floating point, not {tensor.dtype}; use Op.SUM and divide"
        )


def check_rank(rank: int, size: int, name: str, own: int = -1) -> None:
    """Refuse a `rank` out of range, or the caller's `own`; `name` is that of the argument."""
    if not 0 <= rank < size:
        raise ValueError(f"{name} must be a rank from 0 to {size - 1}, not {rank}")
    if rank == own:
        raise ValueError(f"{name} is this rank itself ({rank}); a rank cannot message itself")


def check_contiguous(*tensors: torch.Tensor) -> None:
    """Refuse tensors that are not contiguous."""
    for tensor in tensors:
        if not tensor.is_contiguous():
            raise ValueError(
                f"tensor of shape {tuple(tensor.shape)} and strides {tuple(tensor.stride())} "
                "is not contiguous; pass tensor.contiguous()"
            )


def check_together(tensors: Tensors, name: str, size: int | None = None) -> None:
    """Refuse tensors not contiguous, of several types, or too few or many for the `size`."""
    if size not in (None, len(tensors)):
        raise ValueError(f"{name} must hold one tensor per rank, {size}; it holds {len(tensors)}")
    check_contiguous(*tensors)
    # Reading a device costs more than all the rest.
    if len({(tensor.dtype, tensor.is_cpu or tensor.device) for tensor in tensors}) != 1:
        kinds = {f"{tensor.dtype} on {tensor.device}" for tensor in tensors}
        raise ValueError(f"{name} must be of one dtype and device, not {', '.join(sorted(kinds))}")


def check_alike(one: torch.Tensor, other: torch.Tensor, its_name: str, other_name: str) -> None:
    """Refuse two tensors that differ in shape, type or device."""
    if (one.shape, one.dtype, one.device) != (other.shape, other.dtype, other.device):
        first, second = (f"{t.dtype}{list(t.shape)} on {t.device}" for t in (one, other))
        raise ValueError(f"{its_name} must be like {other_name}: {first} is not {second}")
