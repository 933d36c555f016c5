"""Memory of a communicator that a GPU reads and writes by itself.

The driver has to know of such memory and keep it where it is: it is *pinned*. PyTorch has an
allocator for that, whose memory is not the communicator's: what lies there would be copied once
more to be reduced. So the communicator's own is pinned here, a thing of some milliseconds for
100 MB, once in a generation.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import weakref
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nbelastic.collectives import Communicator

__all__ = ["Pinned"]

_PORTABLE = 1  # cudaHostRegisterPortable: for all of the process's devices


class Pinned:
    """A vector that is a communicator's to reduce and a GPU's to copy.

    Parameters
    ----------
    communicator : Communicator
        Whose memory it is to be.
    count : int
        How many elements.
    dtype : torch.dtype
        Of what type.
    device : torch.device
        The GPU.
    streams : sequence of torch.cuda.Stream
        What copies it: awaited before the memory is let go of.

    Attributes
    ----------
    memory : Tensor
        Not to be used any longer than this object.
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
        # Pinned are pages, which nothing else must lie on.
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
    with torch.cuda.device(device):  # on no other GPU anything is to be set up for this process
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        if int(runtime.cudaHostRegister(address, nbytes, _PORTABLE)) == 0:
            return True
    with contextlib.suppress(RuntimeError):  # the error is reported once more, and forgotten
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
