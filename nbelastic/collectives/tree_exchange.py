"""Sums along a reduction tree by direct exchange: each rank sums a share.

Every rank sends each other rank its share of this rank's nodes, adds what it receives in the tree's
order, and sends the sum to all others. The tree, not the number of ranks, decides what is added to
what.

Shares travel in chunks. A rank receives a chunk of the others' nodes while it adds the chunk
before. So the network and the processor work at the same time, and memory for two chunks is enough.
Halving with doubling distance, the other known way to add along a tree, was slower, but for large
tensors of two ranks: its rounds wait for each other, and a chunk is sent on only after it has been
added.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeAlias

import torch

from nbelastic.collectives.buffers import Delivered, concatenate, copy_back, on_host, slice_bounds
from nbelastic.collectives.reduction_tree import Blocks, fold

if TYPE_CHECKING:
    from nbelastic.collectives.transport import Handle, Nodes, Tensors, TensorTransport

    Exchange: TypeAlias = Callable[[Tensors, Tensors], Handle]

_LINE = 16  # shares begin at multiples of so many elements

# With smaller chunks each message costs more than it hides, with one chunk nothing is hidden.
_CHUNK_BYTES = 4 << 20

_ROOM_BYTES = 64 << 20
"""Most memory for chunks of all nodes. Many micro-batches on uneven blocks make many nodes."""

_LEAST_BYTES = 64 << 10  # length of a chunk below which messages are mostly overhead

_SERIAL = 32_000
"""Elements that are added at a time: few enough for torch not to start threads of its own."""


def flattened(nodes: Nodes, outputs: Tensors) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Return the values of each node as a vector in host memory, and a vector for the outputs.

    A single tensor's vector is its own memory. Outputs that are the first node share its vector.
    """
    vectors = [
        on_host(node[0].detach().view(-1)) if len(node) == 1 else concatenate(node)
        for node in nodes
    ]
    if nodes and outputs is nodes[0]:
        return vectors, vectors[0]
    if len(outputs) == 1:
        return vectors, on_host(outputs[0].detach().view(-1), load=False)
    count = sum(each.numel() for each in outputs)
    return vectors, torch.empty(count, dtype=outputs[0].dtype)


def allreduce_tree(
    transport: TensorTransport, nodes: Nodes, blocks: Blocks, outputs: Tensors
) -> Handle:
    """Sum along a tree by exchanges of `transport`, of which the last is still under way."""
    vectors, target = flattened(nodes, outputs)
    last = sum_shares(transport.rank, vectors, target, blocks, transport.begin_all_to_all)
    return Delivered(last, lambda: copy_back(target, outputs))


def sum_shares(
    rank: int, vectors: Tensors, output: torch.Tensor, blocks: Blocks, exchange: Exchange
) -> Handle:
    """Sum all ranks' `vectors` to `output`, perhaps this rank's first vector.

    `exchange` begins an all-to-all. Returns the handle on the last one.
    """
    shares = [*itertools.pairwise(slice_bounds(output.numel(), blocks.ranks, _LINE))]
    nothing = output[:0]

    def begin(chunk: list[slice]) -> tuple[list[torch.Tensor], Handle]:
        count = output[chunk[rank]].numel()
        sent = [_joined([vector[part] for vector in vectors], nothing) for part in chunk]
        received = [output.new_empty(len(cover) * count) for cover in blocks.covers]
        own, sent[rank], received[rank] = sent[rank], nothing, nothing
        handle = exchange(received, sent)
        return [*received[:rank], own, *received[rank + 1 :]], handle

    chunks = _chunks(shares, chunk_length(blocks, output.itemsize))
    sums: list[Handle] = []
    coming = begin(chunks[0])
    for chunk, following in itertools.zip_longest(chunks, chunks[1:]):
        received, handle = coming
        if following is not None:
            coming = begin(following)  # travels while this chunk is added
        handle.wait()
        # This chunk of the nodes has reached all ranks when its sums arrive, which may replace it.
        totals = [output[part] for part in chunk]
        _add_received(received, blocks, totals[rank])
        sent = [totals[rank]] * blocks.ranks
        totals[rank] = sent[rank] = nothing
        sums.append(exchange(totals, sent))
    for handle in sums[:-1]:
        handle.wait()  # the caller waits for one handle, the last
    return sums[-1]


def _joined(vectors: Tensors, nothing: torch.Tensor) -> torch.Tensor:
    # A rank with an empty block has no vectors, and `cat` refuses an empty list.
    return vectors[0] if len(vectors) == 1 else torch.cat([*vectors, nothing])


def _add_received(received: Tensors, blocks: Blocks, total: torch.Tensor) -> None:
    """Add a chunk of all ranks' nodes to `total`, which may be one of this rank's own."""
    values = [
        value
        for nodes, cover in zip(received, blocks.covers, strict=True)
        for value in nodes.view(len(cover), total.numel())
    ]
    for begin in range(0, total.numel(), _SERIAL):
        place = slice(begin, begin + _SERIAL)
        added = add_along([value[place] for value in values], blocks.order, total[place])
        copy_back([added], [total[place]])  # a single value is no sum


def add_along(
    values: Tensors, order: Sequence[int], out: torch.Tensor | None = None
) -> torch.Tensor:
    """Add values in an order of ``reduction_tree.additions``, the last two to `out`."""
    left_to_do = sum(order)

    def add(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        nonlocal left_to_do
        left_to_do -= 1
        return torch.add(left, right, out=None if left_to_do else out)

    (total,) = fold(values, order, add)
    return total


def chunk_length(blocks: Blocks, itemsize: int) -> int:
    """Return the number of elements in a chunk of a share, the same on all ranks."""
    # Of two chunks of all nodes, one is added while the other is on its way.
    room = max(_ROOM_BYTES // (2 * len(blocks.order)), _LEAST_BYTES)
    return min(_CHUNK_BYTES, room) // itemsize


def _chunks(shares: Sequence[tuple[int, int]], length: int) -> list[list[slice]]:
    """Return, for each chunk, where it lies in the share of each rank."""
    most = max(end - begin for begin, end in shares)  # each rank must begin as many exchanges
    return [
        [slice(min(begin + done, end), min(begin + done + length, end)) for begin, end in shares]
        for done in range(0, most, length)
    ]
