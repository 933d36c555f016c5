"""Messages between two ranks, matched by their tags.

Communicators deliver messages in order and know no tags. So each message follows a header with its
tag and its length. A receive is posted with its header; the rest is posted when that has arrived.
A message that no receive waits for yet is kept.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from nbelastic.errors import CollectiveError
from nbelastic.torch.ops.operation.tensor_operations import TensorOperation

if TYPE_CHECKING:
    from nbelastic.collectives import Communicator, Handle

_HEADER = struct.Struct("<qq")
_POLL_S = 0.0002


class Mailbox:
    """Messages of a rank in a generation; the communicator's own must not be mixed with these."""

    def __init__(self, communicator: Communicator) -> None:
        self.communicator = communicator
        self._waiting: list[Transfer] = []  # receives, in the order of their calls
        self._readers: dict[int, Iterator[None]] = {}  # by rank, from the first receive on

    def send(self, tensor: torch.Tensor, to: int, tag: int) -> Transfer:
        """Begin to send `tensor` to rank `to`."""
        data = tensor.detach().contiguous().view(-1).view(torch.uint8).cpu()
        header = torch.frombuffer(bytearray(_HEADER.pack(tag, data.numel())), dtype=torch.uint8)
        parts = [header, data] if data.numel() else [header]
        handles = [self.communicator.send_async(part, to) for part in parts]
        return Transfer(self, tag, handles=handles)

    def receive(self, tensor: torch.Tensor, source: int | None, tag: int) -> Transfer:
        """Begin to receive into `tensor`, from rank `source` or from any."""
        others = [rank for rank in range(self.communicator.size) if rank != self.communicator.rank]
        receiving = Transfer(self, tag, tensor, others if source is None else [source])
        self._waiting.append(receiving)
        for rank in receiving.sources:
            self._readers.setdefault(rank, self._read(rank))
        self.advance()
        return receiving

    def advance(self) -> None:
        """Take messages that have arrived, and post the next receives."""
        for reader in [*self._readers.values()]:
            next(reader, None)  # after an error it reads no more: the communicator is broken

    def _read(self, rank: int) -> Iterator[None]:
        """Read messages of a rank as long as receives wait for them; yield instead of waiting."""
        kept: list[tuple[int, torch.Tensor]] = []

        def take(length: int) -> Generator[None, None, torch.Tensor]:
            buffer = torch.empty(length, dtype=torch.uint8)
            handle = self.communicator.receive_async(buffer, rank)
            while not handle.done():
                yield
            handle.wait()
            return buffer

        while True:
            for each in [each for each in self._waiting if rank in each.sources]:
                places = (place for place, (tag, _) in enumerate(kept) if tag == each.tag)
                if (place := next(places, None)) is not None:
                    each.message, each.source = kept.pop(place)[1], rank
                    self._waiting.remove(each)
            if any(rank in each.sources for each in self._waiting):
                header = yield from take(_HEADER.size)
                tag, length = _HEADER.unpack(bytes(header.tolist()))
                kept.append((tag, (yield from take(length)) if length else header[:0]))
            else:
                yield


@dataclass(eq=False)
class Transfer:
    """A message under way. Waiting for the end advances its whole mailbox."""

    mailbox: Mailbox
    tag: int
    into: torch.Tensor | None = None  # of a receive, until it has ended
    sources: Sequence[int] = ()  # ranks that a receive may be from
    handles: list[Handle] = field(default_factory=list)  # of a send
    message: torch.Tensor | None = None  # that has been received
    source = -1  # of a receive, known at its end

    def done(self) -> bool:
        """Return whether it has ended. The peer may wait for a message to this rank first."""
        self.mailbox.advance()
        received = self.into is None or self.message is not None
        return received and all(handle.done() for handle in self.handles)

    def wait(self) -> None:
        """Wait for its end."""
        pause = 0.0
        while not self.done():
            self.mailbox.communicator.check()  # `done` alone may not see that a peer is gone
            time.sleep(pause)
            pause = min(pause + _POLL_S / 8, _POLL_S)  # short at first, as most messages are near
        while self.handles:
            self.handles.pop().wait()
        tensor, self.into = self.into, None  # a second wait must not copy again
        if tensor is None or self.message is None:
            return
        if tensor.nbytes != self.message.numel():
            raise CollectiveError(
                f"rank {self.source} sent {self.message.numel()} bytes with tag {self.tag}, and "
                f"{tensor.nbytes} were expected ({tensor.dtype}{list(tensor.shape)})"
            )
        if tensor.numel():
            tensor.detach().copy_(self.message.view(tensor.dtype).view(tensor.shape))


class PointToPoint(TensorOperation[None]):
    """A send or a receive by a mailbox, which ranks do not compare."""

    def __init__(self, post: Callable[[Mailbox], Transfer]) -> None:
        self._post = post

    def launch(self, communicator: Communicator, _numbers: object) -> Sequence[Transfer]:
        # A receive from any rank leaves receives of headers posted, for later groups to use.
        return [self._post(vars(communicator).setdefault("_mailbox", Mailbox(communicator)))]
