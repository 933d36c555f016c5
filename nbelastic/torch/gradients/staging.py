"""Copies of an accelerator's gradients to the host for reduction, and back.

An accelerator works asynchronously: when a hook of backward runs, its gradient may not have been
computed yet. So no hook waits. Copies go on streams of their own, as soon as the gradients of a
buffer are there. Python waits once for each buffer, when it has nothing left to launch. Each
direction has a stream, because the two directions of the bus do not disturb one another.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import weakref
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from nbelastic.collectives import Communicator


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
    """Host memory for a buffer, of one dimension, of an accelerator.

    In each step: :meth:`fetch`, :meth:`wait_fetched`, :meth:`send_back`, :meth:`join`. The buffer
    may be freed at any time, also during a copy.

    Its memory, `host`, is the communicator's, longer than the buffer by `room` elements. For CUDA
    it is pinned, and copies are asynchronous; for other devices they are made at once.
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
        # The allocator does not reuse its memory before this stream has read it.
        self._buffer.record_stream(self._outward)
        self._fetched.record(self._outward)

    def wait_fetched(self) -> None:
        """Wait until the host has the buffer."""
        if self._cuda:
            self._fetched.synchronize()

    def send_back(self) -> None:
        """Begin to copy the host's memory to the buffer, which is not in use."""
        if not self._cuda:
            self._buffer.copy_(self._like)
            return
        with torch.cuda.stream(self._homeward):
            self._buffer.copy_(self._like, non_blocking=True)
        self._buffer.record_stream(self._homeward)

    def join(self) -> None:
        """Make the present stream wait for that copy."""
        if self._cuda:
            torch.cuda.current_stream(self._buffer.device).wait_stream(self._homeward)


_PORTABLE = 1  # cudaHostRegisterPortable: for all of the process's devices


class Pinned:
    """Memory of a communicator that a GPU reads and writes asynchronously.

    PyTorch's allocator of pinned memory knows nothing of the communicator's, so gradients there
    would be copied once more to be reduced. To pin 100 MB takes some milliseconds, once in a
    generation.

    The vector `memory` must not be used any longer than this object, which waits for `streams` at
    its end.
    """

    def __init__(
        self,
        communicator: Communicator,
        count: int,
        dtype: torch.dtype,
        device: torch.device,
        streams: Sequence[torch.cuda.Stream],
    ) -> None:
        page = mmap.PAGESIZE
        nbytes = -(-count * dtype.itemsize // page) * page
        # Whole pages are pinned, so nothing else may lie on them.
        whole = communicator.empty((nbytes + page) // dtype.itemsize, dtype)
        start = -whole.data_ptr() % page
        self.memory = whole[start // dtype.itemsize :][:count]
        address = self.memory.data_ptr()
        if count == 0:
            return
        if _register(address, nbytes, device):
            release = weakref.finalize(
                self, _release, whole, address, device, tuple(streams), os.getpid()
            )
            release.atexit = False  # a process that ends gives everything back
        else:
            self.memory = torch.empty(count, dtype=dtype, pin_memory=True)


def _register(address: int, nbytes: int, device: torch.device) -> bool:
    with torch.cuda.device(device):  # else CUDA sets this process up on another GPU as well
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        if int(runtime.cudaHostRegister(address, nbytes, _PORTABLE)) == 0:
            return True
    with contextlib.suppress(RuntimeError):  # CUDA reports the error once more, and clears it
        torch.zeros(1, device=device)
    return False


def _release(
    _whole: torch.Tensor,
    address: int,
    device: torch.device,
    streams: Sequence[torch.cuda.Stream],
    process: int,
) -> None:
    if os.getpid() != process:  # a fork's copy is not the GPU's
        return
    for stream in streams:
        stream.synchronize()
    with torch.cuda.device(device):
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        runtime.cudaHostUnregister(address)
