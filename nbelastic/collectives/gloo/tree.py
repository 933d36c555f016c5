"""A sum along a reduction tree over Gloo, by messages.

Each rank sums a share of the values, chunk by chunk. It receives a chunk of the others' nodes while
it adds the chunk before, and sends each sum to all others as soon as there is one. So the network
and the processor work at the same time, and memory for a few chunks is enough.

Gloo's own operations cannot be put together to this: each ends before the next begins. Halving with
doubling distance, the other known way to add along a tree, was slower, but for large tensors of two
ranks: its rounds wait for each other, and a chunk is sent on only after it has been added.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from nbelastic.collectives.buffers import as_bytes
from nbelastic.collectives.tree_exchange import share_bounds, sum_along_tree

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import timedelta

    import torch
    from torch._C._distributed_c10d import Work

    from nbelastic.collectives.abort_signal import AbortSignal
    from nbelastic.collectives.gloo.group import GlooGroupOwner
    from nbelastic.collectives.reduction_tree import Blocks

_NODES, _SUMS = 1, 2  # tags of messages; users' messages have 0

# With smaller chunks each message costs more than it hides, with one chunk nothing is hidden.
_CHUNK_BYTES = 4 << 20
_CHUNKS_AHEAD = 2
"""Chunks for which a rank has memory: one that it adds, and one on its way."""

_ROOM_BYTES = 64 << 20
"""Most memory for chunks of all nodes. Many micro-batches on uneven blocks make many nodes."""

_LEAST_BYTES = 64 << 10
"""Length of a chunk below which messages are mostly overhead."""


class TreeSum:
    """A sum along a tree, for an executor.

    `vectors` are the values of this rank's nodes, in host memory; `output` may be the first.
    """

    def __init__(
        self,
        owner: GlooGroupOwner,
        abort_signal: AbortSignal,
        rank: int,
        vectors: Sequence[torch.Tensor],
        output: torch.Tensor,
        blocks: Blocks,
    ) -> None:
        self._owner = owner
        self._abort_signal = abort_signal
        self._rank = rank
        self._vectors = vectors
        self._output = output
        self._blocks = blocks
        # A message to each other rank in turn, beginning with the next one: so no rank is the
        # first of all others.
        self._others = [(rank + step) % blocks.ranks for step in range(1, blocks.ranks)]
        self._limit: timedelta

    def wait(self, limit: timedelta) -> None:
        """Perform it. Raises ``RuntimeError`` if a message fails, or the group is aborted."""
        self._limit = limit
        bounds = share_bounds(self._output.numel(), self._blocks.ranks)
        chunks = [self._chunks(*share) for share in itertools.pairwise(bounds)]
        sent, received = [], []
        for other in self._others:
            for chunk in chunks[other]:
                sent += [self._send(vector[chunk], other, _NODES) for vector in self._vectors]
        # A sum of another share arrives when this rank's values of it have been received there. So
        # it may replace them.
        for other in self._others:
            received += [self._receive(self._output[c], other, _SUMS) for c in chunks[other]]
        sent += self._add_own_share(chunks[self._rank])
        for work in (*received, *sent):
            work.wait(self._limit)

    def _add_own_share(self, chunks: Sequence[slice]) -> list[Work]:
        """Add chunk after chunk of this rank's share, and begin to send the sums."""
        sent = []
        incoming = [_Incoming(self, chunk) for chunk in chunks[:_CHUNKS_AHEAD]]
        for number, chunk in enumerate(chunks):
            nodes = incoming[number % _CHUNKS_AHEAD]
            nodes.add_up(self._output[chunk])
            sent += [self._send(self._output[chunk], other, _SUMS) for other in self._others]
            if number + _CHUNKS_AHEAD < len(chunks):
                nodes.begin(chunks[number + _CHUNKS_AHEAD])
        return sent

    def _chunks(self, begin: int, end: int) -> list[slice]:
        nodes = len(self._blocks.order)  # of all ranks, so that all cut alike
        room = max(_ROOM_BYTES // (_CHUNKS_AHEAD * nodes), _LEAST_BYTES)
        length = min(_CHUNK_BYTES, room) // self._output.itemsize
        return [slice(first, min(first + length, end)) for first in range(begin, end, length)]

    def _send(self, tensor: torch.Tensor, to: int, tag: int) -> Work:
        with self._owner.use_lock:
            self._abort_signal.check()
            return self._owner.group.send([as_bytes(tensor)], to, tag)

    def _receive(self, tensor: torch.Tensor, source: int, tag: int) -> Work:
        with self._owner.use_lock:
            self._abort_signal.check()
            return self._owner.group.recv([as_bytes(tensor)], source, tag)


class _Incoming:
    """Memory for a chunk of all nodes, filled by the other ranks, chunk after chunk."""

    def __init__(self, its: TreeSum, chunk: slice) -> None:
        self._its = its
        count = chunk.stop - chunk.start
        self._memory = {
            other: [its._output.new_empty(count) for _ in its._blocks.covers[other]]
            for other in its._others
        }
        self.begin(chunk)

    def begin(self, chunk: slice) -> None:
        """Begin to receive a chunk, of no more elements than the first."""
        its = self._its
        self._chunk = chunk
        count = chunk.stop - chunk.start
        self._works = [
            its._receive(vector[:count], other, _NODES)
            for other, vectors in self._memory.items()
            for vector in vectors
        ]

    def add_up(self, output: torch.Tensor) -> None:
        """Wait for the chunk, and add it to `output`."""
        its = self._its
        for work in self._works:
            work.wait(its._limit)
        values: list[torch.Tensor] = []
        scratch: list[int] = []
        for rank in range(its._blocks.ranks):
            if rank == its._rank:
                values += [vector[self._chunk] for vector in its._vectors]
            else:
                scratch += range(len(values), len(values) + len(self._memory[rank]))
                values += [vector[: output.numel()] for vector in self._memory[rank]]
        sum_along_tree(values, its._blocks.order, output, scratch)
