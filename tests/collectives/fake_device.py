"""A device whose memory is the host's, for ranks that are threads or processes."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Any

import torch

from nbelastic.collectives.cuda_ipc.device import DeviceError

if TYPE_CHECKING:
    from collections.abc import Iterator

HANDLE_BYTES = 64


class FakeMemory:
    """Memory without a name, which others open by way of its process. It ends with all of them."""

    def __init__(self, path: str, nbytes: int, descriptor: int | None = None) -> None:
        self.handle = path.encode().ljust(HANDLE_BYTES)
        self.tensor = torch.from_file(path, shared=True, size=nbytes, dtype=torch.uint8)
        self._descriptor = descriptor
        self.closed = False
        living.append(self)

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        living.remove(self)
        if self._descriptor is not None:
            os.close(self._descriptor)


living: list[FakeMemory] = []
"""All memory of this process that was not closed yet."""


class FakeDevice:
    """A device that does at once what it is told, unless a test has it fail.

    Parameters
    ----------
    refuses : str
        What it refuses: ``allocate``, ``open``, ``drain``, or nothing.
    garbles : bool
        Whether what it opens is other memory.
    """

    kind = "cpu"

    def __init__(self, refuses: str = "", *, garbles: bool = False) -> None:
        self.refuses, self._garbles = refuses, garbles

    def holds(self, tensor: torch.Tensor) -> bool:
        return tensor.is_cpu

    def _refuse(self, what: str) -> None:
        if self.refuses == what:
            raise DeviceError(f"the device refuses to {what}")

    def allocate(self, nbytes: int) -> FakeMemory:
        self._refuse("allocate")
        descriptor = os.memfd_create("fake-device")
        os.ftruncate(descriptor, nbytes)
        return FakeMemory(f"/proc/{os.getpid()}/fd/{descriptor}", nbytes, descriptor)

    def open(self, handle: bytes, nbytes: int) -> FakeMemory:
        self._refuse("open")
        if self._garbles:
            return self.allocate(nbytes)
        return FakeMemory(handle.decode().rstrip(), nbytes)

    def mark(self) -> object:
        return object()

    @contextlib.contextmanager
    def after(self, mark: Any) -> Iterator[None]:
        assert mark is not None
        yield

    def drain(self) -> None:
        self._refuse("drain")
