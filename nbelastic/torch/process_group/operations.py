"""Collective operations of torch.distributed on a communicator.

Each function begins one operation on tensors of any type, layout and device, and returns what
completes it. A communicator may write to lent tensors even after a failure. So a rank whose elastic
loop goes on after failures lends copies, except of gradients in backward, which a failure drops.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import distributed as dist

from nbelastic.collectives import Op
from nbelastic.errors import CollectiveError
from nbelastic.torch.ops.operation import Allgather, wire_op
from nbelastic.torch.ops.sparse import parts_of
from nbelastic.torch.process_group.messages import mailbox_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from nbelastic.collectives import Communicator
    from nbelastic.torch.ops.coordination.coordination import Comparison
    from nbelastic.torch.process_group.messages import Waiter

POLL_S = 0.0005

ReduceOp = dist.ReduceOp

_OPS = {
    ReduceOp.SUM: Op.SUM,
    ReduceOp.AVG: Op.AVERAGE,
    ReduceOp.MIN: Op.MIN,
    ReduceOp.MAX: Op.MAX,
    ReduceOp.PRODUCT: Op.PRODUCT,
}

# Types that communicators reduce.
_DIRECT = {
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int8,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.bool,
}

_BITWISE: dict[Any, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    ReduceOp.BAND: torch.bitwise_and,
    ReduceOp.BOR: torch.bitwise_or,
    ReduceOp.BXOR: torch.bitwise_xor,
}
_PAIRWISE: dict[Any, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    **_BITWISE,
    ReduceOp.SUM: torch.add,
    ReduceOp.AVG: torch.add,
    ReduceOp.MIN: torch.minimum,
    ReduceOp.MAX: torch.maximum,
    ReduceOp.PRODUCT: torch.mul,
}


class Part(Protocol):
    """An operation of a communicator under way."""

    def done(self) -> bool:
        """Return whether it has ended."""

    def wait(self) -> object:
        """Wait for it."""


class Started:
    """An operation that has begun.

    At the end, `finish` fills the outputs.
    """

    source = -1  # the rank that a message is from; known at its end

    def __init__(
        self, handles: Sequence[Part] = (), finish: Callable[[], object] | None = None
    ) -> None:
        self._handles = handles
        self._finish = finish

    def done(self) -> bool:
        """Return whether :meth:`wait` returns, or raises, at once."""
        return all(handle.done() for handle in self._handles)

    def wait(self, timeout_s: float = 0.0) -> None:
        """Complete the operation, within a time if it is not 0."""
        if timeout_s > 0.0:
            end = time.monotonic() + timeout_s
            while not self.done():
                if time.monotonic() > end:
                    limit = f"its timeout of {timeout_s:g} s"
                    raise CollectiveError(f"the operation did not end within {limit}")
                time.sleep(POLL_S)
        for handle in self._handles:
            handle.wait()
        if self._finish is not None:
            self._finish()
            self._finish = None


class DeferredStart(Started):
    """An operation that begins when the ranks have compared it, and what is deferred before it."""

    def __init__(
        self,
        communicator: Communicator,
        comparison: Comparison | None,
        begin: Callable[[], Started],
    ) -> None:
        super().__init__()
        self.communicator = communicator
        self._comparison, self._begin = comparison, begin
        self._started: Started | None = None
        self._error: BaseException | None = None

    def ready(self) -> bool:
        """Return whether its comparison has ended."""
        return self._comparison is None or self._comparison.ended.is_set()

    def launch(self) -> None:
        """Begin to move data; an error is kept for who waits."""
        try:
            self.communicator.check()
            self._started = self._begin()
        except BaseException as error:
            self._error = error

    def done(self) -> bool:
        return self._error is not None or (self._started is not None and self._started.done())

    def wait(self, timeout_s: float = 0.0) -> None:
        if self._error is not None:
            raise self._error
        if self._started is None:
            raise CollectiveError("the operation was not begun by all ranks in time")
        self._started.wait(timeout_s)


def _lent(tensor: torch.Tensor, private: bool, *, load: bool = True) -> torch.Tensor:
    """Return a contiguous tensor to lend: `tensor` itself, or memory of the operation's own."""
    plain = tensor.detach()
    if not private and plain.is_contiguous():
        return plain
    if not load:
        return torch.empty(plain.shape, dtype=plain.dtype, device=plain.device)
    return plain.clone(memory_format=torch.contiguous_format)


def _back(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Callable[[], None]:
    def finish() -> None:
        for target, source in pairs:
            if target.data_ptr() != source.data_ptr() or target.stride() != source.stride():
                target.detach().copy_(source)

    return finish


# -- reductions ------------------------------------------------------------------------------------


def allreduce(
    communicator: Communicator, tensors: Sequence[torch.Tensor], op: Any, private: bool
) -> Started:
    """Reduce each of `tensors` over all ranks, in place."""
    parts = [_allreduce(communicator, each, op, private) for each in tensors]
    return parts[0] if len(parts) == 1 else Started(parts)


def reduce(
    communicator: Communicator, tensor: torch.Tensor, root: int, op: Any, private: bool
) -> Started:
    """Reduce `tensor` over all ranks, on rank `root` only."""
    if communicator.rank == root:
        return _allreduce(communicator, tensor, op, private)
    scratch = tensor.detach().clone(memory_format=torch.preserve_format)
    return _allreduce(communicator, scratch, op, False)


def _allreduce(communicator: Communicator, tensor: torch.Tensor, op: Any, private: bool) -> Started:
    if tensor.layout is not torch.strided:
        return _allreduce_sparse(communicator, tensor, op)
    kind, factor = _kind_and_factor(op)
    if factor is not None:
        buffer = tensor.detach() * factor
    elif kind in _OPS and _is_direct(tensor, kind):
        buffer = _lent(tensor, private)
    else:
        buffer = None
    if buffer is None:
        return _allreduce_pairwise(communicator, tensor, kind)
    flat = torch.view_as_real(buffer) if buffer.is_complex() else buffer
    wire, divisor = wire_op(_OPS[kind], flat.dtype, communicator.size)
    handle = communicator.allreduce_async(flat, wire)
    return Started([handle], _divided(tensor, buffer, divisor))


def _divided(target: torch.Tensor, total: torch.Tensor, divisor: int) -> Callable[[], None]:
    """Return what makes an average of a sum of integers, and copies it to its place."""
    back = _back([(target, total)])

    def finish() -> None:
        if divisor != 1:
            total.div_(divisor, rounding_mode="trunc")
        back()

    return finish


def _kind_and_factor(op: Any) -> tuple[Any, Any]:
    """Return the plain kind of a reduction, and what values are multiplied by before."""
    kind = getattr(op, "op", op)  # a ReduceOp, or the kind itself
    if kind == ReduceOp.PREMUL_SUM:
        return ReduceOp.SUM, op.__getstate__()[1]
    return kind, None


def _is_direct(tensor: torch.Tensor, kind: Any) -> bool:
    if tensor.is_complex():
        return kind in (ReduceOp.SUM, ReduceOp.AVG) and tensor.dtype is not torch.complex32
    if tensor.dtype is torch.bool:
        return bool(kind != ReduceOp.AVG)
    return tensor.dtype in _DIRECT


def _allreduce_pairwise(communicator: Communicator, tensor: torch.Tensor, kind: Any) -> Started:
    """Gather the values of all ranks, and reduce them on each in the order of the ranks."""
    combine = _PAIRWISE.get(kind)
    if combine is None:
        raise ValueError(f"{kind} is not a reduction of tensors; use SUM, AVG, MIN, MAX, …")
    if kind in _BITWISE and (tensor.is_floating_point() or tensor.is_complex()):
        raise ValueError(f"{kind} is for whole numbers, not {tensor.dtype}")
    own = _lent(tensor, True)
    everyone = [torch.empty_like(own) for _ in range(communicator.size)]
    handle = communicator.allgather_async(everyone, own)

    def finish() -> None:
        total = everyone[0]
        for each in everyone[1:]:
            total = combine(total, each)
        if kind == ReduceOp.AVG:
            total = total / communicator.size
        tensor.detach().copy_(total)

    return Started([handle], finish)


def _allreduce_sparse(communicator: Communicator, tensor: torch.Tensor, op: Any) -> Started:
    """Add up sparse tensors, with as many values as each rank has."""
    kind, _ = _kind_and_factor(op)
    if tensor.layout is not torch.sparse_coo or kind not in (ReduceOp.SUM, ReduceOp.AVG):
        raise ValueError(
            f"a tensor of layout {tensor.layout} cannot be reduced by {kind}; sparse tensors are "
            "added up (SUM, AVG) in the layout torch.sparse_coo"
        )
    gather = Allgather(parts_of(tensor.detach().coalesce()))
    gather.prepare()
    mine = f"{gather.numbers[0]:20d}".encode()
    counts = [int(each) for each in communicator.allgather_bytes(mine)]
    handles = gather.launch(communicator, [(count, count) for count in counts])

    def finish() -> None:
        indices, values = gather.finish()
        total = torch.sparse_coo_tensor(
            indices.transpose(0, 1), values, tensor.shape, check_invariants=True
        ).coalesce()
        if kind == ReduceOp.AVG:
            total = total / communicator.size
        with torch.no_grad():
            tensor.copy_(total)  # a detached one would keep its new values for itself

    return Started(handles, finish)


def reduce_scatter(
    communicator: Communicator,
    output: torch.Tensor,
    inputs: Sequence[torch.Tensor],
    op: Any,
    private: bool,
) -> Started:
    """Reduce ``inputs[i]`` of all ranks into `output` of rank ``i``."""
    kind, factor = _kind_and_factor(op)
    if factor is not None:
        inputs = [each.detach() * factor for each in inputs]
    if kind not in _OPS or output.is_complex() or not _is_direct(output, kind):
        everything = [_lent(each, True) for each in inputs]
        sums = [_allreduce(communicator, each, kind, False) for each in everything]
        return Started(sums, _back([(output, everything[communicator.rank])]))
    wire, divisor = wire_op(_OPS[kind], output.dtype, communicator.size)
    result = _lent(output, private, load=False)
    handle = communicator.reduce_scatter_async(
        result, [_lent(each, False) for each in inputs], wire
    )
    return Started([handle], _divided(output, result, divisor))


# -- copies ----------------------------------------------------------------------------------------


def broadcast(
    communicator: Communicator, tensors: Sequence[torch.Tensor], root: int, private: bool
) -> Started:
    """Copy `tensors` of rank `root` to all others."""
    lent = [_lent(each, private, load=communicator.rank == root) for each in tensors]
    handles = [communicator.broadcast_async(each, root) for each in lent]
    if communicator.rank == root:
        return Started(handles)
    return Started(handles, _back(list(zip(tensors, lent, strict=True))))


def allgather(
    communicator: Communicator,
    outputs: Sequence[torch.Tensor],
    tensor: torch.Tensor,
    private: bool,
) -> Started:
    """Collect every rank's `tensor` into `outputs`, a tensor per rank."""
    own = _lent(tensor, False)
    # Gathered values may have another shape than the tensor, and as many elements.
    results = [_lent(each, private, load=False) for each in outputs]
    views = [each.view(own.shape) for each in results]
    handle = communicator.allgather_async(views, own)
    return Started([handle], _back(list(zip(outputs, results, strict=True))))


def gather(
    communicator: Communicator,
    outputs: Sequence[torch.Tensor],
    tensor: torch.Tensor,
    root: int,
    private: bool,
) -> Started:
    """Collect every rank's `tensor` into `outputs` of rank `root`."""
    nothing = tensor.new_empty(0)
    inputs = [tensor if rank == root else nothing for rank in range(communicator.size)]
    if communicator.rank != root:
        outputs = [nothing] * communicator.size
    return all_to_all(communicator, outputs, inputs, private)


def scatter(
    communicator: Communicator,
    output: torch.Tensor,
    inputs: Sequence[torch.Tensor],
    root: int,
    private: bool,
) -> Started:
    """Copy ``inputs[i]`` of rank `root` to `output` of rank ``i``."""
    nothing = output.new_empty(0)
    if communicator.rank != root:
        inputs = [nothing] * communicator.size
    outputs = [output if rank == root else nothing for rank in range(communicator.size)]
    return all_to_all(communicator, outputs, inputs, private)


def all_to_all(
    communicator: Communicator,
    outputs: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    private: bool,
) -> Started:
    """Send ``inputs[i]`` to rank ``i``, receive ``outputs[i]`` from it."""
    results = [_lent(each, private, load=False) for each in outputs]
    sent = [_lent(each, False) for each in inputs]
    rank = communicator.rank
    # A rank's own part is a copy; communicators want it in one shape.
    views = [*results]
    views[rank] = results[rank].view(-1)
    sent[rank] = sent[rank].view(-1)
    if not any(each.numel() for each in (*views, *sent)) and communicator.size == 1:
        return Started()
    handle = communicator.all_to_all_async(views, sent)
    return Started([handle], _back(list(zip(outputs, results, strict=True))))


# -- barriers and messages -------------------------------------------------------------------------


def barrier(communicator: Communicator, _private: bool) -> Started:
    """Wait for all ranks."""
    return Started([communicator.barrier_async()])


def send(
    communicator: Communicator, tensor: torch.Tensor, to: int, tag: int, _private: bool
) -> Started:
    """Send `tensor` to rank `to`."""
    return _Message(mailbox_of(communicator).send(tensor, to, tag))


def receive(
    communicator: Communicator, tensor: torch.Tensor, source: int | None, tag: int, _private: bool
) -> Started:
    """Receive `tensor` from rank `source`, or from any."""
    return _Message(mailbox_of(communicator).receive(tensor, source, tag))


class _Message(Started):
    """A send or a receive, which advances others while it waits."""

    def __init__(self, message: Waiter) -> None:
        super().__init__([message])
        self._message = message

    def wait(self, timeout_s: float = 0.0) -> None:
        self._message.wait(timeout_s)
        self.source = self._message.source


def each_of(
    communicator: Communicator,
    operation: Callable[..., Started],
    arguments: Sequence[tuple[Any, ...]],
    private: bool,
) -> Started:
    """Begin an operation several times, with other arguments."""
    return Started([operation(communicator, *each, private) for each in arguments])
