"""Gradients of an accelerator, brought to the host to be reduced, and back again.

The work of an accelerator goes on behind Python's back: when a hook of backward runs, the gradient
it is about may not have been computed yet. So nobody waits in a hook. A :class:`Staging` only
arranges, on streams of its own beside the one that computes, that a buffer is copied to the host as
soon as the gradients in it are there, and later that what has been reduced is copied back. Python
waits once for each buffer, when there is nothing left to hand to the accelerator.

There are two such streams, since the two directions of the bus do not disturb one another.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from nbelastic.torch.pinned import Pinned

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from nbelastic.collectives import Communicator

__all__ = ["Staging", "Streams", "is_staged"]


def is_staged(device: torch.device) -> bool:
    """Return whether gradients of a device have to be brought to the host to be reduced."""
    return device.type != "cpu"


class Streams:
    """On which streams backward has computed gradients: it uses those of the forward pass.

    Others have to be waited for by what reads these gradients: a stream goes about its own work.
    """

    def __init__(self) -> None:
        self._noted: set[tuple[int, int, int]] = set()

    def noting(self, parameter: torch.Tensor, hook: Callable[[torch.Tensor], object]) -> Any:
        """Return what calls `hook` when a gradient of `parameter` is there, having noted where."""
        if parameter.device.type != "cuda":
            return hook
        note, index = self._noted.add, parameter.device.index
        present = torch._C._cuda_getCurrentStream

        def called(parameter: torch.Tensor) -> None:  # for each gradient of a step
            note(present(index))
            hook(parameter)

        return called

    def join(self, device: torch.device, gradients: Collection[torch.Tensor]) -> None:
        """Have the present stream of `device` come after all that were noted there.

        It reads `gradients`, whose memory is not given to others before.
        """
        if not self._noted or device.type != "cuda":
            return
        present = torch.cuda.current_stream(device)
        # Threads of other devices go on noting. What they note from here on is left for the next.
        here = {each for each in self._noted.copy() if each[1] == device.index}
        self._noted -= here
        for stream_id, device_index, device_type in here:
            stream = torch.cuda.Stream(  # type: ignore[no-untyped-call]
                stream_id=stream_id, device_index=device_index, device_type=device_type
            )
            if stream != present:
                present.wait_stream(stream)
                for gradient in gradients:
                    gradient.record_stream(present)
        # The next may do so on yet another stream: it has this one to wait for.
        self._noted.add((present.stream_id, present.device_index, present.device_type))


class Staging:
    """The host's memory in place of a buffer of an accelerator.

    In each step: :meth:`fetch`, :meth:`land`, :meth:`send_back`, :meth:`settle`.

    Parameters
    ----------
    communicator : Communicator
        What the gradients are reduced with.
    buffer : Tensor
        Of one dimension. It may be let go of at any time, copies under way or not.
    room : int
        How many elements the host's memory has beyond those of the buffer.

    Attributes
    ----------
    host : Tensor
        What is reduced: memory of the communicator's. Where the buffer is CUDA's it is pinned, and
        copies go on by themselves; with others they are made at once.
    """

    def __init__(self, communicator: Communicator, buffer: torch.Tensor, room: int) -> None:
        self._buffer = buffer
        self._cuda = buffer.device.type == "cuda"
        count, dtype = buffer.numel(), buffer.dtype
        if self._cuda:
            self._outward = torch.cuda.Stream(buffer.device)  # type: ignore[no-untyped-call]
            self._homeward = torch.cuda.Stream(buffer.device)  # type: ignore[no-untyped-call]
            self._fetched = torch.cuda.Event()  # type: ignore[no-untyped-call]
            streams = (self._outward, self._homeward)
            self._pinned = Pinned(communicator, count + room, dtype, buffer.device, streams)
            self.host = self._pinned.memory
        else:
            self.host = communicator.empty(count + room, dtype)
        self._like = self.host[:count]

    def fetch(self) -> None:
        """Begin to copy the buffer to the host, after all that the present stream has to do."""
        if not self._cuda:
            self._like.copy_(self._buffer)
            return
        self._outward.wait_stream(torch.cuda.current_stream(self._buffer.device))
        with torch.cuda.stream(self._outward):
            self._like.copy_(self._buffer, non_blocking=True)
        # Its memory is not given to others before this stream has read it.
        self._buffer.record_stream(self._outward)
        self._fetched.record(self._outward)

    def land(self) -> None:
        """Wait until the host has it."""
        if self._cuda:
            self._fetched.synchronize()

    def send_back(self) -> None:
        """Begin to copy the host's memory to the buffer, which nobody is using."""
        if not self._cuda:
            self._buffer.copy_(self._like)
            return
        with torch.cuda.stream(self._homeward):
            self._buffer.copy_(self._like, non_blocking=True)
        self._buffer.record_stream(self._homeward)

    def settle(self) -> None:
        """Have the present stream come after that copy."""
        if self._cuda:
            torch.cuda.current_stream(self._buffer.device).wait_stream(self._homeward)
