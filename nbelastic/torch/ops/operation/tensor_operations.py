"""Collective operations on tensors of users, on any device and in any layout.

A :class:`TensorOperation` knows what it is about to do on this rank.
:func:`nbelastic.torch.ops.coordination.begin` has the ranks compare that and then launches it.
The communicator is lent private buffers only, so a failed operation leaves the caller's tensors as
they were.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, TypeVar

import torch

from nbelastic.collectives import Op
from nbelastic.elastic.ranks.context import current
from nbelastic.torch.ops.operation import description
from nbelastic.torch.ops.operation.adasum import GradientOp, adasum_async
from nbelastic.torch.ops.operation.fusion import pack

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from nbelastic.collectives import Communicator
    from nbelastic.torch.ops.operation.fusion import Chunk

T = TypeVar("T")


class Waitable(Protocol):
    """An operation under way: a communicator's handle, or a :class:`Pending`."""

    def done(self) -> bool:
        """Return whether the operation has finished."""

    def wait(self) -> object:
        """Wait for the operation."""


class Pending(Generic[T]):
    """An operation under way and its result: Horovod's handle.

    Pass it to ``hvd.synchronize`` or ``hvd.poll``. Calling it waits as well, as for the handle of
    Horovod's ``sparse_allreduce_async``.
    """

    def __init__(self, handles: Sequence[Waitable], finish: Callable[[], T]) -> None:
        self._handles: Sequence[Waitable] = handles
        self._finish: Callable[[], T] | None = finish
        self._result: list[T] = []

    def done(self) -> bool:
        """Return whether :meth:`wait` would return, or raise, at once."""
        return all(handle.done() for handle in self._handles)

    def wait(self) -> T:
        """Wait for the operation and return its result; every call returns the same object.

        After a CollectiveError, operations in place have changed nothing.
        """
        if self._finish is not None:
            for handle in self._handles:
                handle.wait()
            self._result.append(self._finish())
            self._finish, self._handles = None, ()
        return self._result[0]

    def __call__(self) -> T:
        """Wait for the operation and return its result."""
        return self.wait()


def only(pending: Pending[list[T]]) -> Pending[T]:
    """Return the first and only result in place of a list of one."""
    return Pending([pending], lambda: pending.wait()[0])


class TensorOperation(Generic[T]):
    """A collective operation, from its description to its result."""

    verb: ClassVar[str]
    text: str  # what this rank is about to do, the same on all: a line, and details, one a line
    numbers: tuple[int, ...] = ()  # may differ between ranks; equally many on all
    spec: dict[str, Any] | None = None  # for a rank that has joined; None if it cannot take part
    can_be_foreseen = False  # ranks need not meet before it, and one that has joined takes part

    def prepare(self) -> None:
        """Copy the caller's tensors, in the rank's thread."""

    def launch(
        self, communicator: Communicator, numbers: Sequence[Sequence[int]]
    ) -> Sequence[Waitable]:
        """Begin to move data; `numbers` are those of each rank. In any thread."""
        raise NotImplementedError

    def finish(self) -> T:
        """Return the result, in the rank's thread."""
        raise NotImplementedError


class Barrier(TensorOperation[None]):
    """Nothing but the comparison."""

    verb = "barrier"
    text = "barrier"
    spec: ClassVar[dict[str, Any]] = {"kind": "barrier"}  # type: ignore[misc]

    def launch(self, _communicator: Communicator, _numbers: object) -> Sequence[Waitable]:
        return ()

    def finish(self) -> None:
        """Do nothing."""


class Allreduce(TensorOperation[list[torch.Tensor]]):
    """Reduction of each of `tensors` into the tensor of `outputs` with its index.

    Shapes and types are the same on all ranks; `outputs` may be `tensors`. Adasum is for real
    floating point, and of each tensor by itself. Integers are multiplied by `prescale` and
    `postscale` in float64 and cut off.
    """

    verb = "allreduce"

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        op: Op | GradientOp,
        prescale: float = 1.0,
        postscale: float = 1.0,
        name: str | None = None,
    ) -> None:
        for tensor in tensors:
            check_dense(tensor)
            if isinstance(op, GradientOp) and not tensor.dtype.is_floating_point:
                raise ValueError(f"Adasum needs real floating point, not {tensor.dtype}")
        self._tensors, self._outputs = tensors, outputs
        self._op, self._prescale, self._postscale = op, float(prescale), float(postscale)
        self._chunks: list[Chunk] = []
        self._divisors: list[int] = []
        self.text = description.reduction(
            "allreduce", op, tensors, name, prescale=prescale, postscale=postscale
        )
        self._name = name
        self.can_be_foreseen = op in (Op.SUM, Op.AVERAGE)

    @property
    def spec(self) -> dict[str, Any] | None:  # type: ignore[override]
        """Types and shapes, for Sum and Average; other reductions have no neutral zero."""
        if self._op not in (Op.SUM, Op.AVERAGE):
            return None
        kinds = [[str(t.dtype).removeprefix("torch."), [*t.shape]] for t in self._tensors]
        return {
            "kind": "allreduce",
            "tensors": kinds,
            "op": self._op.value,
            "prescale": self._prescale,
            "postscale": self._postscale,
            "name": self._name,
        }

    @classmethod
    def of_zeros(cls, spec: dict[str, Any]) -> Allreduce:
        """Return the operation that a rank that has joined runs, to match the spec."""
        zeros = [
            torch.zeros(shape, dtype=getattr(torch, dtype)) for dtype, shape in spec["tensors"]
        ]
        op, name = Op(spec["op"]), spec["name"]
        return cls(zeros, zeros, op, spec["prescale"], spec["postscale"], name)

    def prepare(self) -> None:
        self._chunks = pack(self._tensors)
        for chunk in self._chunks:
            chunk.fill(self._tensors)
            _multiply(chunk.buffer, self._prescale)

    def launch(self, communicator: Communicator, _numbers: object) -> Sequence[Waitable]:
        handles: list[Waitable] = []
        for chunk in self._chunks:
            if isinstance(self._op, GradientOp):
                handles.append(adasum_async(communicator, chunk.buffer, chunk.counts))
                self._divisors.append(1)
                continue
            op, divisor = wire_op(self._op, chunk.buffer.dtype, communicator.size)
            buffer = _as_real(chunk.buffer, self._op)
            handles.append(communicator.allreduce_async(buffer, op))
            self._divisors.append(divisor)
        return handles

    def finish(self) -> list[torch.Tensor]:
        for chunk, divisor in zip(self._chunks, self._divisors, strict=True):
            _scale(chunk.buffer, divisor, self._postscale)
            chunk.write_back(self._outputs)
        self._chunks = []
        return list(self._outputs)


class Broadcast(TensorOperation[list[torch.Tensor]]):
    """Copies of the `tensors` of rank `root`, in `outputs` of all ranks.

    The `position` is the root's among the ranks of the operation.
    """

    verb = "broadcast"

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        root: int,
        position: int,
        name: str | None = None,
        *,
        is_root: bool,
    ) -> None:
        for tensor in tensors:
            check_dense(tensor)
        self._tensors, self._outputs = tensors, outputs
        self._position, self._is_root = position, is_root
        self._chunks: list[Chunk] = []
        self.text = description.broadcast(root, tensors, name)

    def prepare(self) -> None:
        self._chunks = pack(self._tensors)
        if self._is_root:
            for chunk in self._chunks:
                chunk.fill(self._tensors)

    def launch(self, communicator: Communicator, _numbers: object) -> Sequence[Waitable]:
        return [
            communicator.broadcast_async(chunk.buffer, self._position) for chunk in self._chunks
        ]

    def finish(self) -> list[torch.Tensor]:
        if not self._is_root or self._outputs is not self._tensors:
            for chunk in self._chunks:
                chunk.write_back(self._outputs)
        self._chunks = []
        return list(self._outputs)


class Allgather(TensorOperation[list[torch.Tensor]]):
    """Concatenations of every rank's `tensors` along the first dimension; lengths may differ."""

    verb = "allgather"

    def __init__(self, tensors: Sequence[torch.Tensor], name: str | None = None) -> None:
        for tensor in tensors:
            check_dense(tensor)
        plain = [tensor.detach() for tensor in tensors]
        self._sources = [each.reshape(1) if each.dim() == 0 else each for each in plain]
        self.text = description.rows("allgather", self._sources, name)
        self.numbers = tuple(source.shape[0] for source in self._sources)
        self.lengths: list[list[int]] = []  # by rank, of each tensor; from the launch on
        self._gathered: list[list[torch.Tensor]] = []

    def prepare(self) -> None:
        self._sources = [_private(source) for source in self._sources]

    def launch(
        self, communicator: Communicator, numbers: Sequence[Sequence[int]]
    ) -> Sequence[Waitable]:
        handles: list[Waitable] = []
        for index, source in enumerate(self._sources):
            lengths = [each[index] for each in numbers]
            self.lengths.append(lengths)
            mine = source
            if max(lengths) != source.shape[0]:
                mine = source.new_empty((max(lengths), *source.shape[1:]))
                mine[: source.shape[0]].copy_(source)
            everyone = [torch.empty_like(mine) for _ in lengths]
            self._gathered.append(everyone)
            if mine.numel():
                handles.append(communicator.allgather_async(everyone, mine))
        return handles

    def finish(self) -> list[torch.Tensor]:
        gathered, self._gathered = self._gathered, []
        return [
            torch.cat([part[:length] for part, length in zip(parts, lengths, strict=True)])
            for parts, lengths in zip(gathered, self.lengths, strict=True)
        ]


class Alltoall(TensorOperation[torch.Tensor]):
    """An exchange in which ``splits[i]`` rows of `tensor` go to the ``i``-th rank."""

    verb = "alltoall"

    def __init__(
        self, tensor: torch.Tensor, splits: Sequence[int], name: str | None = None
    ) -> None:
        check_dense(tensor)
        self._tensor = tensor
        self._inputs: list[torch.Tensor] = []
        self._outputs: list[torch.Tensor] = []
        self.text = description.rows("alltoall", [tensor], name)
        self.numbers = tuple(splits)
        self.received: list[int] = []  # rows from each rank; from the launch on

    def prepare(self) -> None:
        self._inputs = [_private(part) for part in torch.split(self._tensor, list(self.numbers))]

    def launch(
        self, communicator: Communicator, numbers: Sequence[Sequence[int]]
    ) -> Sequence[Waitable]:
        self.received = [each[communicator.rank] for each in numbers]
        shape = self._tensor.shape[1:]
        self._outputs = [self._inputs[0].new_empty((rows, *shape)) for rows in self.received]
        return [communicator.all_to_all_async(self._outputs, self._inputs)]

    def finish(self) -> torch.Tensor:
        return torch.cat(self._outputs)


class Reducescatter(TensorOperation[list[torch.Tensor]]):
    """Reductions of `tensors`, and each rank keeps some rows.

    The rows are dealt out evenly; the first ranks get one more where they do not divide.
    """

    verb = "reducescatter"

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        op: Op,
        prescale: float,
        postscale: float,
        size: int,
        name: str | None = None,
    ) -> None:
        for tensor in tensors:
            check_dense(tensor)
        self._tensors, self._op, self._size = tensors, op, size
        self._prescale, self._postscale = float(prescale), float(postscale)
        self._inputs: list[list[torch.Tensor]] = []
        self._outputs: list[torch.Tensor] = []
        self._divisors: list[int] = []
        self.text = description.reduction(
            "reducescatter", op, tensors, name, prescale=prescale, postscale=postscale
        )

    def prepare(self) -> None:
        for tensor in self._tensors:
            rows, more = divmod(tensor.shape[0], self._size)
            counts = [rows + (rank < more) for rank in range(self._size)]
            inputs = [_private(part) for part in torch.split(tensor, counts)]
            for part in inputs:
                _multiply(part, self._prescale)
            self._inputs.append(inputs)

    def launch(self, communicator: Communicator, _numbers: object) -> Sequence[Waitable]:
        handles: list[Waitable] = []
        for inputs in self._inputs:
            output = torch.empty_like(inputs[communicator.rank])
            op, divisor = wire_op(self._op, output.dtype, communicator.size)
            handles.append(communicator.reduce_scatter_async(output, inputs, op))
            self._outputs.append(output)
            self._divisors.append(divisor)
        return handles

    def finish(self) -> list[torch.Tensor]:
        for output, divisor in zip(self._outputs, self._divisors, strict=True):
            _scale(output, divisor, self._postscale)
        return self._outputs


def check_dense(tensor: torch.Tensor) -> None:
    """Refuse what is no dense tensor."""
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(f"operations are on tensors, not on {type(tensor).__name__}")
    if tensor.layout is not torch.strided:
        raise ValueError(
            f"the tensor's layout is {tensor.layout}, not strided; use to_dense(), or "
            "sparse_allreduce_async for a sum"
        )


def check_root(root: int, ranks: Sequence[int]) -> int:
    """Return the position of a root among `ranks`; refuse one that is not among them.

    While a state synchronises, 0 is the rank with the newest state, which Horovod's is always.
    """
    if root == 0:
        root = current().rank_0_stands_for
    if root not in ranks:
        named = f"from 0 to {len(ranks) - 1}" if [*ranks] == [*range(len(ranks))] else f"of {ranks}"
        raise ValueError(f"root_rank must be a rank {named}, not {root}")
    return ranks.index(root)


def _private(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone(memory_format=torch.contiguous_format)


def _as_real(tensor: torch.Tensor, op: Op) -> torch.Tensor:
    """Return a view of complex numbers as pairs, which add up as they do."""
    pairs = tensor.dtype.is_complex and op in (Op.SUM, Op.AVERAGE)
    return torch.view_as_real(tensor) if pairs else tensor


def wire_op(op: Op, dtype: torch.dtype, size: int) -> tuple[Op, int]:
    """Return the operation to ask for, and what to divide integers by afterwards."""
    if op is Op.AVERAGE and not _is_inexact(dtype):
        return Op.SUM, size
    return op, 1


def _scale(tensor: torch.Tensor, divisor: int, factor: float) -> None:
    if divisor != 1 and factor == 1.0 and tensor.dtype is not torch.bool:
        tensor.div_(divisor, rounding_mode="trunc")
    else:
        _multiply(tensor, factor / divisor)


def _multiply(tensor: torch.Tensor, factor: float) -> None:
    """Multiply in place; integers in float64, cut off, as in Horovod."""
    if factor == 1.0:
        return
    if _is_inexact(tensor.dtype):
        tensor.mul_(factor)
    else:
        tensor.copy_(tensor.double().mul_(factor))


def _is_inexact(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex
