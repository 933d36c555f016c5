"""Copies of an accelerator's gradients to the host for reduction, and back.

An accelerator works asynchronously: when a hook of backward runs, its gradient may not have been
computed yet. So no hook waits. A copy to the host goes on a stream of its own, as soon as the
gradients of a buffer are there. Python waits once for each buffer, when it has nothing left to
launch. The copy back goes on the stream that uses the gradients next: the two directions of the bus
do not disturb one another.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Collection


def is_accelerator(device: torch.device) -> bool:
    """Return whether a device computes by itself, in memory of its own."""
    return device.type != "cpu"


class Streams:
    """Streams on which backward has computed gradients: those of the forward pass.

    What reads the gradients on another stream has to wait for them.
    """

    def __init__(self) -> None:
        self._noted: set[tuple[int, int, int]] = set()

    def noting(self, parameter: torch.Tensor, hook: Callable[[torch.Tensor], object]) -> Any:
        """Return a hook that notes the stream of a gradient of `parameter` and calls `hook`."""
        if parameter.device.type != "cuda":
            return hook
        note, index = self._noted.add, parameter.device.index
        present = torch._C._cuda_getCurrentStream

        def called(parameter: torch.Tensor) -> None:  # for each gradient of a step
            note(present(index))
            hook(parameter)

        return called

    def join(self, device: torch.device, gradients: Collection[torch.Tensor]) -> None:
        """Make the present stream of `device` wait for all streams that were noted there.

        The allocator does not reuse the memory of `gradients` before the present stream is done.
        """
        if not self._noted or device.type != "cuda":
            return
        present = torch.cuda.current_stream(device)
        # Threads of other devices go on noting; the next join finds what they note from here on.
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
        # The next join may be on yet another stream, which has to wait for this one.
        self._noted.add((present.stream_id, present.device_index, present.device_type))


class Staging:
    """Pinned host memory for a buffer, of one dimension, of an accelerator.

    In each step: :meth:`fetch`, :meth:`wait_fetched`, :meth:`send_back`. Both may be freed at any
    time, also during a copy. Copies of CUDA's are asynchronous; for other devices they are made at
    once.
    """

    def __init__(self, buffer: torch.Tensor) -> None:
        self._buffer = buffer
        cuda = buffer.device.type == "cuda"
        self.host = torch.empty(buffer.shape, dtype=buffer.dtype, pin_memory=cuda)
        self._stream: torch.cuda.Stream | None = None
        if cuda:
            self._stream = torch.cuda.Stream(buffer.device)  # type: ignore[no-untyped-call]

    def fetch(self) -> None:
        """Begin to copy the buffer to the host, after all that the present stream has to do."""
        if self._stream is None:
            self.host.copy_(self._buffer)
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._buffer.device))
        with torch.cuda.stream(self._stream):
            self.host.copy_(self._buffer, non_blocking=True)
        # The allocator does not reuse its memory before this stream has read it.
        self._buffer.record_stream(self._stream)

    def wait_fetched(self) -> None:
        """Wait until the host has the buffer."""
        if self._stream is not None:
            self._stream.synchronize()

    def send_back(self) -> None:
        """Begin to copy the host's memory to the buffer, on the present stream."""
        self._buffer.copy_(self.host, non_blocking=True)
