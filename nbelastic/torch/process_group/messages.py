"""Messages between two ranks, matched by their tags.

Communicators deliver messages in order and know no tags. So each message follows a header with its
tag and its length. A receive is posted with its header; the rest is posted when that has arrived.
A message that no receive waits for yet is kept.
"""

from __future__ import annotations

import struct
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
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
        self._sources: dict[int, _Source] = defaultdict(_Source)

    def send(self, tensor: torch.Tensor, to: int, tag: int) -> Transfer:
        """Begin to send `tensor` to rank `to`."""
        data = tensor.detach().contiguous().view(-1).view(torch.uint8).cpu()
        header = torch.frombuffer(bytearray(_HEADER.pack(tag, data.numel())), dtype=torch.uint8)
        parts = [header, data] if data.numel() else [header]
        handles = [self.communicator.send_async(part, to) for part in parts]
        return Transfer(self, tag, None, handles)

    def receive(self, tensor: torch.Tensor, source: int | None, tag: int) -> Transfer:
        """Begin to receive into `tensor`, from rank `source` or from any."""
        others = [rank for rank in range(self.communicator.size) if rank != self.communicator.rank]
        receiving = Transfer(self, tag, tensor)
        for each in others if source is None else [source]:
            self._sources[each].waiting.append(receiving)
        self.advance()
        return receiving

    def advance(self) -> None:
        """Take messages that have arrived, and post the next receives."""
        for rank, source in [*self._sources.items()]:
            while source.advance(self.communicator, rank):
                pass


def mailbox_of(communicator: Communicator) -> Mailbox:
    """Return the mailbox of a communicator, with the same lifetime."""
    # A receive from any rank leaves receives of headers posted, for later groups to use.
    found: Mailbox = vars(communicator).setdefault("_mailbox", Mailbox(communicator))
    return found


@dataclass
class _Source:
    """Messages from one rank."""

    waiting: list[Transfer] = field(default_factory=list)
    kept: list[tuple[int, torch.Tensor]] = field(default_factory=list)
    handle: Handle | None = None
    buffer: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))
    tag: int | None = None  # of the message under way, once its header is here

    def advance(self, communicator: Communicator, rank: int) -> bool:
        """Advance by one message or header of this `rank`; return whether more may follow."""
        # A receive from any rank waits at all sources, and another may have served it.
        self.waiting = [each for each in self.waiting if each.message is None]
        for index, (tag, data) in enumerate(self.kept):
            for each in self.waiting:
                if each.tag == tag:
                    each.message, each.source = data, rank
                    del self.kept[index]
                    return True
        if self.handle is None:
            if not self.waiting:
                return False
            self.tag = None
            self._post(communicator, rank, _HEADER.size)
        assert self.handle is not None
        if not self.handle.done():
            return False
        self.handle.wait()
        self.handle, message = None, self.buffer
        if self.tag is None:
            self.tag, length = _HEADER.unpack(bytes(message.tolist()))
            if length:
                self._post(communicator, rank, length)
                return True
            message = message[:0]
        self.kept.append((self.tag, message))
        return True

    def _post(self, communicator: Communicator, rank: int, length: int) -> None:
        """Begin to receive so many bytes."""
        self.buffer = torch.empty(length, dtype=torch.uint8)
        self.handle = communicator.receive_async(self.buffer, rank)


@dataclass(eq=False)
class Transfer:
    """A message under way. Waiting for the end advances its whole mailbox."""

    mailbox: Mailbox
    tag: int
    into: torch.Tensor | None  # of a receive, until it has ended
    handles: list[Handle] = field(default_factory=list)  # of a send
    message: torch.Tensor | None = None  # that has been received
    source = -1  # of a receive, known at its end

    def done(self) -> bool:
        """Return whether it has ended. The peer may wait for a message to this rank first."""
        self.mailbox.advance()
        received = self.into is None or self.message is not None
        return received and all(handle.done() for handle in self.handles)

    def wait(self, timeout_s: float = 0.0) -> None:
        """Wait for its end, within a time if it is not 0."""
        begun, pause = time.monotonic(), 0.0
        while not self.done():
            self.mailbox.communicator.check()  # `done` alone may not see that a peer is gone
            if 0.0 < timeout_s < time.monotonic() - begun:
                raise CollectiveError(f"a message did not end within {timeout_s:g} s")
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
        return [self._post(mailbox_of(communicator))]
