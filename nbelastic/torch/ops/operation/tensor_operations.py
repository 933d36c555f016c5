"""Collective operations on tensors, on any device and in any layout.

A :class:`TensorOperation` knows what it is about to do on this rank. The ranks compare that, and
then it is launched: Horovod's functions by :func:`nbelastic.torch.ops.coordination.begin`, the
process group by its :class:`~nbelastic.torch.process_group.work.OperationWork`.

A pattern is the head of a line, with the types and shapes of tensors: in words, a line for the head
and one for each of several tensors (see :meth:`nbelastic.collectives.Communicator.agree`).

A communicator may write to lent tensors even after a failure. So it is lent private buffers, and a
failed operation leaves the caller's tensors as they were, unless the operation `lends` them.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Concatenate, Generic, ParamSpec, Protocol, TypeVar, cast

import torch

from nbelastic.collectives import Communicator, Op
from nbelastic.elastic.ranks.context import current
from nbelastic.torch.ops.operation.fusion import Chunk, lend, plan
from nbelastic.torch.ops.operation.reduction import (
    AnyOp,
    GradientOp,
    as_real,
    is_direct,
    multiply,
    reduce_gathered,
    scale,
    wire_op,
)

T = TypeVar("T")
P = ParamSpec("P")
F = TypeVar("F", bound=Callable[..., Any])
Tensors = Sequence[torch.Tensor]
Numbers = Sequence[Sequence[int]]  # of each rank


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
            self._finish, self._handles = None, ()  # a handle may outlive its buffers
        return self._result[0]

    __call__ = wait


def only(pending: Pending[list[T]]) -> Pending[T]:
    """Return the first and only result in place of a list of one."""
    return Pending([pending], lambda: pending.wait()[0])


def single(
    grouped: Callable[Concatenate[Tensors, P], Pending[list[torch.Tensor]]],
) -> Callable[Concatenate[torch.Tensor, P], Pending[torch.Tensor]]:
    """Return the form for one tensor of a function that begins an operation on several."""

    def begin(tensor: torch.Tensor, *args: P.args, **options: P.kwargs) -> Pending[torch.Tensor]:
        return only(grouped([tensor], *args, **options))

    doc = (grouped.__doc__ or "").replace("grouped_", "")
    name = grouped.__name__.removeprefix("grouped_")
    return _form(begin, grouped, name, doc)  # type: ignore[return-value]  # `tensor=` may be named


def awaited(begin: Callable[P, Pending[T]]) -> Callable[P, T]:
    """Return the form of a function that waits for the operation."""

    def operation(*args: P.args, **options: P.kwargs) -> T:
        return begin(*args, **options).wait()

    doc = f"Wait for what :func:`{begin.__name__}` begins; a failure leaves tensors as they were."
    return _form(operation, begin, begin.__name__.replace("_async", ""), doc)


def _form(form: F, origin: Callable[..., Any], name: str, doc: str) -> F:
    """Return a function with a name, and the parameters of its origin, but for the first."""
    own, its, made = inspect.signature(form), inspect.signature(origin), cast(Any, form)
    first = [each for each in own.parameters.values() if each.kind is each.POSITIONAL_OR_KEYWORD]
    parameters = [*first, *[*its.parameters.values()][len(first) :]]
    returns = own.return_annotation if first else str(its.return_annotation)[len("Pending[") : -1]
    made.__signature__ = its.replace(parameters=parameters, return_annotation=returns)
    made.__name__ = made.__qualname__ = name
    made.__module__, made.__doc__ = origin.__module__, doc
    return form


class TensorOperation(Generic[T]):
    """A collective operation, from its pattern to its result."""

    verb: str = ""
    pattern: Any = None  # what this rank is about to do, the same on all; None if not compared
    numbers: tuple[int, ...] = ()  # may differ between ranks; equally many on all
    spec: dict[str, Any] | None = None  # for a rank that has joined; None if it cannot take part
    can_be_foreseen = False  # ranks need not meet before it, and one that has joined takes part
    fuses = True  # several tensors travel in one buffer, on the CPU
    lends = False  # otherwise: whether the caller's own memory is lent, and spoiled by a failure
    _chunks: Sequence[Chunk] = ()  # what is lent, from the loading on
    _outputs: Tensors = ()  # tensors of the caller that the chunks are stored in
    _op: AnyOp | None = None  # of a reduction
    _postscale = 1.0
    rank, size = 0, 1  # among the ranks of its group; from the loading on

    def load_on(self, rank: int, size: int) -> None:
        """Load the operation, as that of a rank of a group."""
        self.rank, self.size = rank, size
        self.load()

    def load(self) -> None:
        """Copy the caller's tensors, in the rank's thread."""

    def launch(self, communicator: Communicator, numbers: Numbers) -> Sequence[Waitable]:
        """Begin to move data; `numbers` are those of each rank. In any thread."""
        raise NotImplementedError

    def store(self) -> Any:
        """Store the chunks in the outputs, in the rank's thread; return the result, of type `T`."""
        for chunk in self._chunks:
            if self._op is not None:
                scale(chunk.buffer, self._op, self.size, self._postscale)
            chunk.write_back(self._outputs)
        self._chunks = ()
        return list(self._outputs)

    def _chunks_of(self, tensors: Tensors) -> list[Chunk]:
        if self.fuses:
            return [Chunk(tensors, indices) for indices in plan(tensors)]
        return lend(tensors, private=not self.lends)


class Barrier(TensorOperation[None]):
    """A comparison, which ranks wait for; a foreseeable barrier moves data, too."""

    verb = "barrier"
    pattern = "barrier"
    spec: ClassVar[dict[str, Any]] = {"kind": "barrier"}  # type: ignore[misc]

    def __init__(self, *, foreseen: bool = False) -> None:
        self.can_be_foreseen = foreseen

    def launch(self, communicator: Communicator, _numbers: object) -> Sequence[Waitable]:
        # Ranks that have compared it have met. A foreseen one may begin without a word.
        return [communicator.barrier_async()] if self.can_be_foreseen else ()


class Allreduce(TensorOperation[list[torch.Tensor]]):
    """Reduction of each of `tensors` into the tensor of `outputs` with its index."""

    verb = "allreduce"
    _op: AnyOp

    def __init__(
        self,
        tensors: Tensors,
        outputs: Tensors,
        op: AnyOp,
        prescale: float = 1.0,
        postscale: float = 1.0,
        name: str | None = None,
        head: str = "",  # of the pattern; if empty, of the other arguments
    ) -> None:
        check_dense(*tensors)
        for tensor in tensors:
            if isinstance(op, GradientOp) and not tensor.dtype.is_floating_point:
                raise ValueError(f"Adasum needs real floating point, not {tensor.dtype}")
        self._tensors, self._outputs = tensors, outputs
        self._op, self._prescale, self._postscale = op, float(prescale), float(postscale)
        head = head or reduction(called("allreduce", name), op.value, prescale, postscale)
        self.pattern = head, kinds(tensors)
        self._name = name
        self.can_be_foreseen = op in (Op.SUM, Op.AVERAGE)  # a joined rank can follow with zeros

    @property
    def spec(self) -> dict[str, Any] | None:  # type: ignore[override]
        """Types and shapes, for Sum and Average; other reductions have no neutral zero."""
        if self._op not in (Op.SUM, Op.AVERAGE):
            return None
        tensors = [[str(t.dtype).removeprefix("torch."), [*t.shape]] for t in self._tensors]
        factors = {"prescale": self._prescale, "postscale": self._postscale}
        its = {"tensors": tensors, "op": self._op.value, "name": self._name}
        return {"kind": "allreduce", **its, **factors}

    @classmethod
    def of_zeros(cls, spec: dict[str, Any]) -> Allreduce:
        """Return the operation of zeros that a joined rank runs, to match the spec."""
        zeros = [torch.zeros(shape, dtype=getattr(torch, kind)) for kind, shape in spec["tensors"]]
        factors = spec["prescale"], spec["postscale"]
        return cls(zeros, zeros, Op(spec["op"]), *factors, spec["name"])

    def load(self) -> None:
        self._chunks = self._chunks_of(self._tensors)
        for chunk in self._chunks:
            chunk.fill(self._tensors)
            multiply(chunk.buffer, self._prescale)

    def launch(self, communicator: Communicator, _numbers: object) -> Sequence[Waitable]:
        return [
            _reduce_async(communicator, chunk.buffer, self._op, chunk.counts)
            for chunk in self._chunks
        ]


class Broadcast(TensorOperation[list[torch.Tensor]]):
    """Copies of the `tensors` of rank `root` of some `ranks`, in `outputs` of all."""

    verb = "broadcast"

    def __init__(
        self,
        tensors: Tensors,
        outputs: Tensors,
        root: int,
        ranks: Sequence[int] | None = None,
        name: str | None = None,
    ) -> None:
        check_dense(*tensors)
        self._tensors, self._outputs = tensors, outputs
        self._position = root if ranks is None else check_root(root, ranks)
        self.is_root = False  # known from the loading on
        self.pattern = f"{called('broadcast', name)} from rank {root}", kinds(tensors)

    def load(self) -> None:
        self.is_root = self.rank == self._position
        self._chunks = self._chunks_of(self._tensors)
        if self.is_root:
            for chunk in self._chunks:
                chunk.fill(self._tensors)

    def launch(self, communicator: Communicator, _numbers: object) -> Sequence[Waitable]:
        return [
            communicator.broadcast_async(chunk.buffer, self._position) for chunk in self._chunks
        ]

    def store(self) -> list[torch.Tensor]:
        if self.is_root and self._outputs is self._tensors:
            self._chunks = ()  # the root's tensors have the values, and must not count as changed
        return super().store()  # type: ignore[no-any-return]


class Allgather(TensorOperation[list[torch.Tensor]]):
    """Concatenations of every rank's `tensors` along the first dimension; lengths may differ."""

    verb = "allgather"

    def __init__(self, tensors: Tensors, name: str | None = None) -> None:
        check_dense(*tensors)
        plain = [tensor.detach() for tensor in tensors]
        self._sources = [each.reshape(1) if each.dim() == 0 else each for each in plain]
        self.pattern = called("allgather", name), kinds_of_rows(self._sources)
        self.numbers = tuple(source.shape[0] for source in self._sources)
        self.lengths: list[list[int]] = []  # by rank, of each tensor; from the launch on
        self._gathered: list[list[torch.Tensor]] = []

    def load(self) -> None:
        self._sources = [_private(source) for source in self._sources]  # callers may change theirs

    def launch(self, communicator: Communicator, numbers: Numbers) -> Sequence[Waitable]:
        handles: list[Waitable] = []
        for index, source in enumerate(self._sources):
            lengths = [each[index] for each in numbers]
            self.lengths.append(lengths)
            mine = source
            if max(lengths) != source.shape[0]:  # padded, as transports gather tensors of one shape
                mine = source.new_empty((max(lengths), *source.shape[1:]))
                mine[: source.shape[0]].copy_(source)
            everyone = [torch.empty_like(mine) for _ in lengths]
            self._gathered.append(everyone)
            if mine.numel():
                handles.append(communicator.allgather_async(everyone, mine))
        return handles

    def store(self) -> list[torch.Tensor]:
        gathered, self._gathered = self._gathered, []
        return [
            torch.cat([part[:length] for part, length in zip(parts, lengths, strict=True)])
            for parts, lengths in zip(gathered, self.lengths, strict=True)
        ]


class SparseAllreduce(Allgather):
    """Sums or averages of sparse tensors: ranks gather as many indices and values as they have."""

    def __init__(
        self, tensors: Tensors, op: AnyOp, name: str | None = None, outputs: Tensors = ()
    ) -> None:
        if not all(getattr(each, "layout", None) is torch.sparse_coo for each in tensors):
            raise ValueError(
                "a sparse allreduce takes sparse_coo tensors; use allreduce for others"
            )
        if op not in (Op.AVERAGE, Op.SUM):
            raise ValueError(f"op of a sparse allreduce must be Average or Sum, not {op!r}")
        # Indices and values have equally many rows.
        parts = [(each._indices().transpose(0, 1).contiguous(), each._values()) for each in tensors]
        super().__init__([part for pair in parts for part in pair], name)
        self._shapes = [each.shape for each in tensors]
        self._op, self._outputs = op, outputs
        # Sizes and reduction are in no part that travels, so only the pattern shows a difference.
        sizes = [list(shape) for shape in self._shapes]
        self.pattern = f"sparse {in_words(self.pattern)}\n{op.value} of tensors of sizes {sizes}"

    def store(self) -> list[torch.Tensor]:
        gathered = super().store()
        if self._op is Op.AVERAGE:
            gathered[1::2] = [values / self.size for values in gathered[1::2]]
        totals = [
            torch.sparse_coo_tensor(rows.T, values, shape, check_invariants=False)
            for rows, values, shape in zip(gathered[::2], gathered[1::2], self._shapes, strict=True)
        ]
        with torch.no_grad():
            for output, total in zip(self._outputs, totals, strict=False):  # none, if not in place
                output.copy_(total.coalesce())
        return totals


class AllgatherInto(TensorOperation[None]):
    """Collection of every rank's tensor, for each of `tensors` in a list with one per rank."""

    verb = "allgather"

    def __init__(self, outputs: Sequence[Tensors], tensors: Tensors) -> None:
        self._outputs, self._tensors = [*itertools.chain(*outputs)], tensors
        self._counts = [len(each) for each in outputs]
        self.pattern = "all_gather", kinds(tensors)

    def launch(self, communicator: Communicator, _numbers: object) -> Sequence[Waitable]:
        self._chunks = lend(self._outputs, private=not self.lends)
        buffers = iter([chunk.buffer for chunk in self._chunks])
        # Gathered values may have another shape than the tensor, and as many elements.
        return [
            communicator.allgather_async([*itertools.islice(buffers, count)], _flat(tensor))
            for count, tensor in zip(self._counts, self._tensors, strict=True)
        ]


class AlltoallInto(TensorOperation[Any]):
    """An exchange of ``inputs[i]`` for ``outputs[i]`` with rank ``i``."""

    verb = "alltoall"

    def __init__(self, outputs: Tensors, inputs: Tensors, pattern: Any) -> None:
        self._outputs, self._inputs, self.pattern = outputs, inputs, pattern

    def launch(self, communicator: Communicator, _numbers: Numbers) -> Sequence[Waitable]:
        self._chunks = lend(self._outputs, private=not self.lends)
        received = [chunk.buffer for chunk in self._chunks]
        sent = [_flat(each) for each in self._inputs]
        if communicator.size == 1 and not any(each.numel() for each in (*received, *sent)):
            return ()
        return [communicator.all_to_all_async(received, sent)]


class Alltoall(AlltoallInto):
    """An exchange in which ``splits[i]`` rows of `tensor` go to the ``i``-th rank."""

    lends = True  # the outputs, which are its own

    def __init__(
        self, tensor: torch.Tensor, splits: Sequence[int], name: str | None = None
    ) -> None:
        check_dense(tensor)
        super().__init__((), [tensor], (called("alltoall", name), kinds_of_rows([tensor])))
        self.numbers = tuple(splits)
        self.received: list[int] = []  # rows from each rank; from the launch on

    def load(self) -> None:
        (tensor,) = self._inputs
        self._inputs = [_private(part) for part in torch.split(tensor, list(self.numbers))]

    def launch(self, communicator: Communicator, numbers: Numbers) -> Sequence[Waitable]:
        self.received = [each[communicator.rank] for each in numbers]
        like = self._inputs[0]
        self._outputs = [like.new_empty((rows, *like.shape[1:])) for rows in self.received]
        return super().launch(communicator, numbers)

    def store(self) -> list[torch.Tensor]:
        return [torch.cat(list(self._outputs))]


class ReducescatterInto(TensorOperation[list[torch.Tensor]]):
    """Reductions of lists with a tensor per rank; each rank has its own in `outputs`."""

    verb = "reducescatter"
    _op: AnyOp

    def __init__(
        self, outputs: Tensors, lists: Sequence[Tensors], op: AnyOp, prescale: float, pattern: Any
    ) -> None:
        self._outputs, self._lists, self.pattern = list(outputs), list(lists), pattern
        self._op, self._prescale = op, float(prescale)

    def load(self) -> None:
        self._chunks = chunks = lend(self._outputs, private=not self.lends)
        self._inputs = []
        for index, parts in enumerate(self._lists):
            direct = is_direct(self._outputs[index].dtype, self._op)
            # A copy where the caller may change its tensors meanwhile, or the reduction would.
            keeps = self.fuses or self._prescale != 1.0 or not direct
            copied = [(_private if keeps else _flat)(part).view(-1) for part in parts]
            for part in copied:
                multiply(part, self._prescale)
            if not direct:
                chunks[index] = Chunk(self._outputs, [index], copied[self.rank])
            self._inputs.append(copied)

    def launch(self, communicator: Communicator, _numbers: object) -> Sequence[Waitable]:
        handles: list[Waitable] = []
        for parts, chunk in zip(self._inputs, self._chunks, strict=True):
            if is_direct(chunk.buffer.dtype, self._op):
                result, sent = as_real(chunk.buffer), [as_real(part) for part in parts]
                op = wire_op(self._op, chunk.buffer.dtype)
                handles.append(communicator.reduce_scatter_async(result, sent, op))
            else:
                # Whole on all ranks, because transports do not reduce such types in parts.
                handles += [_reduce_async(communicator, part, self._op) for part in parts]
        return handles


class Reducescatter(ReducescatterInto):
    """Reductions of `tensors`, whose rows are dealt out; the first ranks may get one more."""

    lends = True  # the outputs, which are its own

    def __init__(
        self, tensors: Tensors, op: Op, prescale: float, postscale: float, name: str | None = None
    ) -> None:
        check_dense(*tensors)
        head = reduction(called("reducescatter", name), op.value, prescale, postscale)
        super().__init__((), (), op, prescale, (head, kinds(tensors)))
        self._tensors, self._postscale = tensors, float(postscale)

    def load(self) -> None:
        self._lists, self._outputs = [], []
        for tensor in self._tensors:
            rows, more = divmod(tensor.shape[0], self.size)
            parts = torch.split(tensor, [rows + (each < more) for each in range(self.size)])
            self._lists.append(parts)
            self._outputs.append(tensor.new_empty(parts[self.rank].shape))
        super().load()


# -- descriptions ----------------------------------------------------------------------------------


def in_words(pattern: Any) -> str:
    """Return a pattern as text: what is text already, or a head and types with shapes."""
    if isinstance(pattern, str):
        return pattern
    head, found = pattern
    if len(found) == 1:
        return f"{head} of {kind_of(*found[0])}"
    details = "\n".join(f"tensor {index} is {kind_of(*each)}" for index, each in enumerate(found))
    return f"{head} of {len(found)} tensors\n{details}"


def kind_of(dtype: torch.dtype, shape: Sequence[object]) -> str:
    """Return a type and a shape in words: ``float32[2, 3]``."""
    return f"{str(dtype).removeprefix('torch.')}[{', '.join(map(str, shape))}]"


def kinds(tensors: Tensors) -> tuple[Any, ...]:
    """Return types and shapes of tensors, for a pattern."""
    return tuple((tensor.dtype, tensor.shape) for tensor in tensors)


def kinds_of_rows(tensors: Tensors) -> tuple[Any, ...]:
    """Return types and shapes of tensors whose first dimension may differ between ranks."""
    return tuple((tensor.dtype, ("*", *tensor.shape[1:])) for tensor in tensors)


def reduction(verb: str, how: str, prescale: float, postscale: float) -> str:
    """Return a reduction in words, with its factors if they are not 1."""
    if prescale != 1.0:
        how += f" of {float(prescale)} times each"
    if postscale != 1.0:
        how += f", times {float(postscale)}"
    return f"{verb} ({how})"


def called(verb: str, name: str | None) -> str:
    """Return an operation with its name, if any."""
    return verb if name is None else f"{verb} {name!r}"


# -- checks and copies -----------------------------------------------------------------------------


def check_dense(*tensors: torch.Tensor) -> None:
    """Refuse what are no dense tensors."""
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(f"operations are on tensors, not on {type(tensor).__name__}")
        if tensor.layout is not torch.strided:
            raise ValueError(
                f"the tensor's layout is {tensor.layout}, not strided; use to_dense(), or "
                "sparse_allreduce_async for a sum"
            )


def check_root(root: int, ranks: Sequence[int]) -> int:
    """Return the position of a root among `ranks`; refuse a root outside of `ranks`."""
    if root == 0:  # while a state synchronises: the rank with the newest, which is always Horovod's
        root = current().rank_0_stands_for
    if root not in ranks:
        named = f"from 0 to {len(ranks) - 1}" if [*ranks] == [*range(len(ranks))] else f"of {ranks}"
        raise ValueError(f"root_rank must be a rank {named}, not {root}")
    return ranks.index(root)


def _reduce_async(
    communicator: Communicator, buffer: torch.Tensor, op: AnyOp, lengths: Sequence[int] = ()
) -> Waitable:
    """Begin to reduce a flat buffer in place. Adasum is of each of the parts of these `lengths`."""
    if is_direct(buffer.dtype, op):
        return communicator.allreduce_async(as_real(buffer), wire_op(op, buffer.dtype))
    everyone = [torch.empty_like(buffer) for _ in range(communicator.size)]
    gathering = communicator.allgather_async(everyone, buffer)
    return Pending([gathering], lambda: reduce_gathered(buffer, everyone, op, lengths))


def _private(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone(memory_format=torch.contiguous_format)  # what transports take


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1)
