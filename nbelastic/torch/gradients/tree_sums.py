"""Sums of tensors over the micro-batches of a step, on a rank and over ranks.

Sparse gradients are summed by rows. A row that a micro-batch has not used is left out of its sums,
as a micro-batch without a gradient is left out of the tree
(:mod:`nbelastic.collectives.reduction_tree`). So each row has the bits that it would have in a
dense gradient. Over ranks, the rows that any of them has used are summed as dense tensors are.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

import torch

from nbelastic.collectives import Communicator
from nbelastic.collectives.reduction_tree import IDENTITY, Node, cover
from nbelastic.elastic.ranks.step_share import StepShare
from nbelastic.torch.ops.coordination.comparison import gather_numbers
from nbelastic.torch.ops.operation.tensor_operations import Allgather, Pending


@functools.cache
def _joined_in(first: int, second: int, leaves: int) -> Node:
    """Return the smallest node of a tree that has the leaves `first` and `second` > `first`."""
    node = Node(0, leaves)
    while not first < node.middle <= second:
        halves = Node(node.begin, node.middle), Node(node.middle, node.end)
        node = halves[first >= node.middle]
    return node


class MicroBatchSum:
    """Sum of a tensor over the micro-batches of a rank, which arrive in order.

    Two values are added where the tree has a node for them, once both are complete: a binary
    counter. If the step is not exact, the sum is a plain one, in the order of arrival.
    """

    __slots__ = ("_begin", "_leaves", "_stack")

    def __init__(self, share: StepShare) -> None:
        self._leaves = share.micro_batches if share.exact else 0
        self._begin = share.block.start
        self._stack: list[tuple[int, torch.Tensor]] = []

    def __bool__(self) -> bool:
        """Return whether there is a value."""
        return bool(self._stack)

    @property
    def is_sparse(self) -> bool:
        """Whether there are values, of sparse tensors."""
        return bool(self._stack) and self._stack[0][1].layout is not torch.strided

    def densify(self) -> None:
        """Make the values dense, if they are sparse."""
        if self.is_sparse:
            self._stack[:] = [(leaf, as_dense(value)) for leaf, value in self._stack]

    def add(self, leaf: int, value: torch.Tensor, *, whole: bool = True) -> torch.Tensor:
        """Add the value of a leaf, or a part of the value, given away; return the sum so far."""
        stack = self._stack
        if stack and (stack[-1][1].layout is not value.layout):
            self.densify()
            value = value if value.layout is torch.strided else as_dense(value)
        self._join(leaf)  # what could be added only once the leaves between were known to be absent
        if stack and stack[-1][0] == leaf:
            stack[-1] = (leaf, _add(stack[-1][1], value))
        else:
            stack.append((leaf, value))
        self._join(leaf + whole)
        return stack[-1][1]

    def _join(self, done: int) -> None:
        """Add values whose common node is in the block and has no leaves from `done` on."""
        stack, leaves = self._stack, self._leaves
        while len(stack) > 1:
            (first, left), (second, right) = stack[-2:]
            if leaves:
                node = _joined_in(first, second, leaves)
                if node.end > done or node.begin < self._begin:
                    return
            stack[-2:] = [(first, _add(left, right))]

    def finish(self, nodes: Sequence[Node]) -> list[torch.Tensor | None]:
        """Return the value of each of `nodes`, the largest ones in the block; None if absent."""
        found: list[torch.Tensor | None] = [None] * len(nodes)
        for number, node in enumerate(nodes):
            held = [value for leaf, value in self._stack if node.begin <= leaf < node.end]
            if held:
                *rest, total = held  # the later, the smaller their common nodes
                for value in reversed(rest):
                    total = _add(value, total)
                found[number] = total
        self._stack = []
        return found


def _add(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return left.add_(right) if left.layout is torch.strided else add_rows(left, right)


def sum_over_ranks(
    communicator: Communicator,
    share: StepShare,
    sums: Sequence[MicroBatchSum],
    like: Sequence[torch.Tensor],
    sparse: Sequence[int] = (),
) -> list[torch.Tensor]:
    """Return sums over all micro-batches, IDENTITY of none, as `like`; for all ranks.

    Those with the indices `sparse` are sparse on all ranks that have values.
    """
    block = share.block
    nodes: Sequence[Node] = ()
    if share.exact:
        nodes = cover(block.start, block.stop, share.micro_batches)
    elif block:
        nodes = (Node(block.start, block.stop),)
    columns, shaped = [each.finish(nodes) for each in sums], [*like]
    rows = _rows_of_ranks(communicator, [columns[index] for index in sparse])
    for index, used in zip(sparse, rows, strict=True):
        columns[index] = [each if each is None else _packed(each, used) for each in columns[index]]
        shaped[index] = like[index].detach().new_empty(len(used), *like[index].shape[1:])
    totals = [*shaped]
    by_type: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for index, tensor in enumerate(shaped):
        by_type.setdefault((tensor.dtype, tensor.device), []).append(index)
    for indices in by_type.values():
        these = [columns[index] for index in indices], [shaped[index] for index in indices]
        exchanged = _exchange(communicator, share, *these)
        for index, total in zip(indices, exchanged, strict=True):
            totals[index] = total
    for index, used in zip(sparse, rows, strict=True):
        total = totals[index]
        totals[index] = of_rows(used.to(total.device), total, like[index].shape)
    return totals


def _exchange(
    communicator: Communicator,
    share: StepShare,
    columns: Sequence[Sequence[torch.Tensor | None]],
    like: Sequence[torch.Tensor],
) -> list[torch.Tensor]:
    """Return the sums over all ranks of tensors of one type, on one device."""
    if communicator.size == 1:
        pairs = zip(columns, like, strict=True)
        return [
            torch.full_like(each, IDENTITY, requires_grad=False) if own is None else own
            for (own, *_), each in pairs
        ]
    rows = [
        [_absent(each) if value is None else value.contiguous() for value, each in pairs]
        for pairs in (zip(of_node, like, strict=True) for of_node in zip(*columns, strict=True))
    ]
    # A rank without micro-batches has room for the sums, and nothing to add.
    outputs = rows[0] if rows else [*map(_absent, like)]
    if share.exact:
        blocks = share.blocks_of(communicator.size)
        # By default the sums replace the first row, which is `outputs`.
        room = None if rows else _numbers(outputs)
        communicator.allreduce_tree([*map(_numbers, rows)], blocks, room)
    else:
        communicator.allreduce_coalesced(_numbers(outputs))
    return [
        total if each.is_contiguous() else torch.empty_like(each, requires_grad=False).copy_(total)
        for total, each in zip(outputs, like, strict=True)
    ]


def _numbers(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return tensors without complex numbers. Their `data` counts changes in place by itself."""
    return [torch.view_as_real(t).data if t.is_complex() else t.data for t in tensors]


def _absent(like: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor of absent values."""
    return torch.full(like.shape, IDENTITY, dtype=like.dtype, device=like.device)


def add_rows(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return the sum of two coalesced tensors of one sparse dimension."""
    # Torch's own addition starts from zeros, which changes the sign of some.
    n_left = left._nnz()
    rows, places = torch.unique(torch.cat([_rows(left), _rows(right)]), return_inverse=True)
    mine, others = left._values(), right._values()
    values = mine.new_full((len(rows), *mine.shape[1:]), IDENTITY)
    values.index_copy_(0, places[:n_left], mine)
    values.index_add_(0, places[n_left:], others)  # no place twice, so in any order
    return of_rows(rows, values, left.shape)


def as_dense(tensor: torch.Tensor) -> torch.Tensor:
    """Return a dense tensor with the rows of a coalesced tensor; all other rows are absent."""
    return _absent(tensor).index_copy_(0, _rows(tensor), tensor._values())


def _rows_of_ranks(
    communicator: Communicator, columns: Sequence[Sequence[torch.Tensor | None]]
) -> list[torch.Tensor]:
    """Return for each column of coalesced tensors the rows that any rank has, in order."""
    nothing = torch.empty(0, dtype=torch.int64)
    own = [
        torch.unique(
            torch.cat([nothing, *(_rows(each).cpu() for each in column if each is not None)])
        )
        for column in columns
    ]
    if communicator.size == 1 or not own:
        return own
    gather = Allgather(own)
    gather.load_on(communicator.rank, communicator.size)
    numbers = gather_numbers(communicator, gather.numbers)
    everyone = Pending(gather.launch(communicator, numbers), gather.store).wait()
    return [torch.unique(rows) for rows in everyone]


def _packed(tensor: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Return a dense tensor of the `rows` of a coalesced tensor, its missing rows absent."""
    values = tensor._values()
    found = values.new_full((len(rows), *values.shape[1:]), IDENTITY)
    return found.index_copy_(0, torch.searchsorted(rows.to(values.device), _rows(tensor)), values)


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._indices()[0]


def of_rows(rows: torch.Tensor, values: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Return a coalesced tensor of one sparse dimension."""
    return torch.sparse_coo_tensor(
        rows.unsqueeze(0), values, shape, is_coalesced=True, check_invariants=False
    )
