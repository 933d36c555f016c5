"""Memory of a GPU that other processes open, and a stream that is waited for on the host.

CUDA's runtime is called by ctypes, because torch's own way of sharing memory counts references in
files and has the receiver's stream wait for the sender's event. **No stream may wait for another
process's event**: if that process ends before the event's work is done, the stream waits for ever.
"""

from __future__ import annotations

import contextlib
import ctypes
from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

__all__ = ["CudaDevice", "Device", "DeviceError", "Memory", "present_device"]


class DeviceError(Exception):
    """A device has refused something; the message says what and why."""


class Memory(Protocol):
    """Memory of a device, this process's own or opened.

    Attributes
    ----------
    tensor : torch.Tensor
        Its bytes; not to be used after :meth:`close`.
    handle : bytes
        By which other processes of the host open it.
    """

    tensor: torch.Tensor
    handle: bytes

    def close(self) -> None:
        """Free it, or close what was opened. Idempotent."""


class Device(Protocol):
    """What a communicator needs of the device of its rank.

    Attributes
    ----------
    kind : str
        Type of the tensors that lie there, as torch calls it.
    """

    kind: str

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor lies there."""

    def allocate(self, nbytes: int) -> Memory:
        """Return memory that others can open; raise :class:`DeviceError` if there is none."""

    def open(self, handle: bytes, nbytes: int) -> Memory:
        """Return the memory of another process; raise :class:`DeviceError` if it cannot be read."""

    def mark(self) -> Any:
        """Mark the work that the caller's stream has now. Called in the rank's thread."""

    def after(self, mark: Any) -> AbstractContextManager[Any]:
        """Have operations in a block follow that work, on a stream of the device's own."""

    def drain(self) -> None:
        """Wait on the host until that stream has done all its work."""


class CudaDevice:
    """A GPU as one process sees it."""

    kind = "cuda"

    def __init__(self, index: int) -> None:
        self._device = torch.device("cuda", index)
        self._stream = torch.cuda.Stream(self._device, priority=-1)  # type: ignore[no-untyped-call]
        # The thread sleeps until the event: it would take the interpreter's lock in each look.
        self._drained = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor lies on this GPU."""
        return tensor.device == self._device

    def allocate(self, nbytes: int) -> Memory:
        """Return memory of its own allocation: others open allocations as a whole."""
        with torch.cuda.device(self._device):
            return _Allocation(nbytes, self._device)

    def open(self, handle: bytes, nbytes: int) -> Memory:
        """Return the memory of another process."""
        with torch.cuda.device(self._device):
            return _Opened(handle, nbytes, self._device)

    def mark(self) -> Any:
        """Record an event on the present stream."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    @contextlib.contextmanager
    def after(self, mark: Any) -> Any:
        """Work on the device's stream, after the event."""
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(mark)
            yield

    def drain(self) -> None:
        """Wait on the host for the device's stream."""
        self._drained.record(self._stream)
        self._drained.synchronize()


def present_device() -> Device | None:
    """Return the GPU that this process uses; None if it has not used one."""
    if not torch.cuda.is_available() or not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None
    return CudaDevice(torch.cuda.current_device())


# -- CUDA's runtime --------------------------------------------------------------------------------

_LAZY_PEER_ACCESS = 1  # cudaIpcMemLazyEnablePeerAccess


class _Handle(ctypes.Structure):
    """``cudaIpcMemHandle_t``, which is passed by value."""

    _fields_ = (("reserved", ctypes.c_ubyte * 64),)


class _Runtime:
    """The functions of the CUDA runtime that torch has loaded."""

    def __init__(self) -> None:
        try:
            with open("/proc/self/maps") as maps:
                paths = {line.split()[-1] for line in maps if "libcudart.so" in line}
            self._library = ctypes.CDLL(min(paths))
        except (OSError, ValueError) as error:
            raise DeviceError(f"CUDA's runtime is not found: {error}") from None
        self._library.cudaGetErrorString.restype = ctypes.c_char_p

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function; raise :class:`DeviceError` if it fails."""
        status = getattr(self._library, name)(*arguments)
        if status:
            self._library.cudaGetLastError()  # else torch would report it at its next call
            raise DeviceError(f"{name}: {self._library.cudaGetErrorString(status).decode()}")


_runtime: list[_Runtime] = []


def _call(name: str, *arguments: Any) -> None:
    if not _runtime:
        _runtime.append(_Runtime())
    _runtime[0].call(name, *arguments)


class _Array:
    """Memory in the form in which torch takes it over without a copy."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def _tensor_at(address: int, nbytes: int, device: torch.device) -> torch.Tensor:
    return torch.as_tensor(_Array(address, nbytes), device=device)


class _Allocation:
    def __init__(self, nbytes: int, device: torch.device) -> None:
        self._address = ctypes.c_void_p()
        self._device = device
        _call("cudaMalloc", ctypes.byref(self._address), ctypes.c_size_t(nbytes))
        try:
            handle = _Handle()
            _call("cudaIpcGetMemHandle", ctypes.byref(handle), self._address)
            self.handle = bytes(handle.reserved)
            self.tensor = _tensor_at(self._address.value or 0, nbytes, device)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        address, self._address = self._address, ctypes.c_void_p()
        if address.value:
            with torch.cuda.device(self._device):
                _call("cudaFree", address)


class _Opened:
    def __init__(self, handle: bytes, nbytes: int, device: torch.device) -> None:
        self.handle = handle
        self._device = device
        self._address = ctypes.c_void_p()
        _call(
            "cudaIpcOpenMemHandle",
            ctypes.byref(self._address),
            _Handle.from_buffer_copy(handle),
            ctypes.c_uint(_LAZY_PEER_ACCESS),
        )
        self.tensor = _tensor_at(self._address.value or 0, nbytes, device)

    def close(self) -> None:
        address, self._address = self._address, ctypes.c_void_p()
        if address.value:
            with torch.cuda.device(self._device):
                _call("cudaIpcCloseMemHandle", address)
