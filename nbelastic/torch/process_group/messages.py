"""Messages between two ranks, matched by their tags.

Communicators deliver messages in order and know no tags. So each message follows a header with its
tag and its length. A receive is posted with its header; the rest is posted when that has arrived.
A message that no receive waits for yet is kept.
"""

from __future__ import annotations

import struct
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch

from nbelastic.errors import CollectiveError
from nbelastic.torch.ops.operation.tensor_operations import TensorOperation, Waitable

if TYPE_CHECKING:
    from nbelastic.collectives import Communicator, Handle

_HEADER = struct.Struct("<qq")
_POLL_S = 0.0002
_BARRIER_TAG = 2**62  # of the messages of a monitored barrier


class Mailbox:
    """Messages of a rank in a generation; the communicator's own must not be mixed with these."""

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._sources: dict[int, _Source] = defaultdict(_Source)

    def send(self, tensor: torch.Tensor, to: int, tag: int) -> Sending:
        """Begin to send `tensor` to rank `to`."""
        data = tensor.detach().contiguous().view(-1).view(torch.uint8).cpu()
        header = _bytes_of(tag, data.numel())
        handles = [self._communicator.send_async(header, to)]
        if data.numel():
            handles.append(self._communicator.send_async(data, to))
        return Sending(self, handles)

    def receive(self, tensor: torch.Tensor, source: int | None, tag: int) -> Receiving:
        """Begin to receive into `tensor`, from rank `source` or from any."""
        communicator = self._communicator
        if source is not None:
            sources = [source]
        else:
            sources = [rank for rank in range(communicator.size) if rank != communicator.rank]
        receiving = Receiving(self, tensor, sources, tag)
        for each in sources:
            self._sources[each].waiting.append(receiving)
        self.advance(sources)
        return receiving

    def advance(self, sources: Iterable[int] | None = None) -> None:
        """Take messages that have arrived, and post the next receives."""
        for rank in list(self._sources if sources is None else sources):
            source = self._sources[rank]
            while self._step(rank, source):
                pass

    def _step(self, rank: int, source: _Source) -> bool:
        """Advance a source; return whether it may advance again."""
        # A receive from any rank waits at all sources, and another may have served it.
        source.waiting = deque(each for each in source.waiting if each.message is None)
        if source.match(rank):
            return True
        if source.handle is None:
            if not source.waiting:
                return False
            source.buffer = torch.empty(_HEADER.size, dtype=torch.uint8)
            source.tag = None
            source.handle = self._communicator.receive_async(source.buffer, rank)
        if not source.handle.done():
            return False
        source.handle.wait()
        buffer, source.handle = source.buffer, None
        if source.tag is None:
            source.tag, length = _HEADER.unpack(bytes(buffer.tolist()))
            if length:
                source.buffer = torch.empty(length, dtype=torch.uint8)
                source.handle = self._communicator.receive_async(source.buffer, rank)
                return True
            buffer = torch.empty(0, dtype=torch.uint8)
        source.kept.append((source.tag, buffer))
        return True

    def wait(self, ended: Callable[[], bool], timeout_s: float = 0.0) -> None:
        """Advance until something has ended, within a time if it is not 0."""
        begun, pause = time.monotonic(), 0.0
        while not ended():
            self._communicator.check()  # `ended` alone may not see that a peer is gone
            if 0.0 < timeout_s < time.monotonic() - begun:
                raise CollectiveError(f"a message did not end within {timeout_s:g} s")
            time.sleep(pause)
            pause = min(pause + _POLL_S / 8, _POLL_S)  # short at first, as most messages are near


def mailbox_of(communicator: Communicator) -> Mailbox:
    """Return the mailbox of a communicator, with the same lifetime."""
    # A receive from any rank leaves receives of headers posted, for later groups to use.
    attributes = vars(communicator)
    if "_mailbox" not in attributes:
        attributes["_mailbox"] = Mailbox(communicator)
    found: Mailbox = attributes["_mailbox"]
    return found


class _Source:
    """Messages from one rank."""

    def __init__(self) -> None:
        self.waiting: deque[Receiving] = deque()
        self.kept: list[tuple[int, torch.Tensor]] = []
        self.handle: Handle | None = None
        self.buffer = torch.empty(0, dtype=torch.uint8)
        self.tag: int | None = None  # of the message under way, once its header is here

    def match(self, rank: int) -> bool:
        """Give the first awaited message to its receive."""
        for index, (tag, data) in enumerate(self.kept):
            found = next((each for each in self.waiting if each.tag == tag), None)
            if found is not None:
                del self.kept[index]
                self.waiting.remove(found)
                found.message, found.source = data, rank
                return True
        return False


class Sending:
    """A message to another rank, under way."""

    def __init__(self, mailbox: Mailbox, handles: list[Handle]) -> None:
        self._mailbox, self._handles = mailbox, handles

    def done(self) -> bool:
        """Return whether it has ended. The peer may wait for a message to this rank first."""
        self._mailbox.advance()
        return all(handle.done() for handle in self._handles)

    def wait(self, timeout_s: float = 0.0) -> None:
        """Wait for its end, while others advance."""
        self._mailbox.wait(self.done, timeout_s)
        for handle in self._handles:
            handle.wait()
        self._handles = []


class Receiving:
    """A receive under way."""

    def __init__(
        self, mailbox: Mailbox, tensor: torch.Tensor, sources: list[int], tag: int
    ) -> None:
        self._mailbox = mailbox
        self._tensor: torch.Tensor | None = tensor
        self.tag = tag
        self.message: torch.Tensor | None = None  # its bytes, once they are here
        self.source = sources[0] if len(sources) == 1 else -1  # known at its end

    def done(self) -> bool:
        """Return whether the message is here."""
        if self.message is None:
            self._mailbox.advance()
        return self.message is not None

    def wait(self, timeout_s: float = 0.0) -> None:
        """Wait for the message, while other receives advance, and copy it to its tensor."""
        self._mailbox.wait(self.done, timeout_s)
        tensor, self._tensor = self._tensor, None  # a second wait must not copy again
        if tensor is None:
            return
        assert self.message is not None
        if tensor.nbytes != self.message.numel():
            raise CollectiveError(
                f"rank {self.source} sent {self.message.numel()} bytes with tag {self.tag}, and "
                f"{tensor.nbytes} were expected ({tensor.dtype}{list(tensor.shape)})"
            )
        if tensor.numel():
            values = self.message.view(tensor.dtype).view(tensor.shape)
            tensor.detach().copy_(values)


class PointToPoint(TensorOperation[None]):
    """A send or a receive by a mailbox, which ranks do not compare."""

    what = "a message"

    def __init__(self, post: Callable[[Mailbox], Waitable]) -> None:
        self._post = post

    def launch(self, communicator: Communicator, _numbers: object) -> Sequence[Waitable]:
        return [self._post(mailbox_of(communicator))]


def _bytes_of(tag: int, length: int) -> torch.Tensor:
    return torch.frombuffer(bytearray(_HEADER.pack(tag, length)), dtype=torch.uint8)


def monitored_barrier(communicator: Communicator, timeout: Any, wait_all_ranks: bool) -> None:
    """Wait for all ranks; rank 0 raises torch's error, with the missing ranks."""
    if isinstance(timeout, (int, float)):
        timeout = timedelta(seconds=timeout)
    limit_s = timeout.total_seconds() if isinstance(timeout, timedelta) else 0.0
    mailbox, rank = mailbox_of(communicator), communicator.rank
    if timeout == timedelta(0):
        raise RuntimeError(f"Rank {rank} timed out in monitoredBarrier after 0 ms")
    token = torch.zeros(1, dtype=torch.uint8)
    if rank != 0:
        try:
            mailbox.send(token, 0, _BARRIER_TAG).wait(limit_s)
            mailbox.receive(token, 0, _BARRIER_TAG).wait(limit_s)
        except CollectiveError as error:
            communicator.check()  # the end of a generation is no timeout
            raise RuntimeError(
                f"Rank 0 timed out in monitoredBarrier after {limit_s * 1000:.0f} ms"
            ) from error
        return
    others = range(1, communicator.size)
    waiting = {other: mailbox.receive(token, other, _BARRIER_TAG) for other in others}
    end, late = time.monotonic() + limit_s, []
    for other, receive in waiting.items():
        try:
            receive.wait(max(end - time.monotonic(), 1e-3) if limit_s else 0.0)  # 0 means no limit
        except CollectiveError:
            communicator.check()
            late.append(other)
            if not wait_all_ranks:
                break
    if late:
        names = f"Rank{'s' if len(late) > 1 else ''} {', '.join(map(str, late))}"
        raise RuntimeError(f"{names} failed to pass monitoredBarrier in {limit_s * 1000:.0f} ms")
    for sent in [mailbox.send(token, other, _BARRIER_TAG) for other in waiting]:
        sent.wait()
