"""Memory of a GPU for other processes, and a stream that the host waits for.

CUDA's runtime is called by ctypes, because torch's own way of sharing memory counts references in
files and has the receiver's stream wait for the sender's event. **No stream may wait for another
process's event**: if that process ends before the event's work is done, the stream waits for ever.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from nbelastic.collectives.buffers import as_number
from nbelastic.collectives.transport import Op


class DeviceError(Exception):
    """A device has refused something; the message says what and why."""


class Unusable(Exception):
    """Ranks cannot use a transport, and all of them know; the message says why."""


class Memory(Protocol):
    """Memory of a device, this process's own or opened.

    `tensor` has its bytes, until :meth:`close`; other processes of the host open it by `handle`.
    """

    tensor: torch.Tensor
    handle: bytes

    def close(self) -> None:
        """Close opened memory; give back allocated memory. Idempotent."""


def as_reducible(tensors: Sequence[torch.Tensor], op: Op) -> tuple[list[torch.Tensor], Op]:
    """Return vectors to reduce and their operator, without booleans."""
    dtype, op = as_number(tensors[0].dtype, op)
    return [tensor.detach().view(-1).view(dtype) for tensor in tensors], op


class Device:
    """The GPU of a rank: a single object in its process, with a stream of its own.

    :meth:`after` and :meth:`drain` work on that. `kind` is the type of the tensors that lie there,
    as torch calls it. Tests have other devices with these methods.
    """

    kind = "cuda"

    def __init__(self, index: int) -> None:
        self._device = torch.device("cuda", index)
        # Of high priority, because peers wait for its sums.
        self._stream = torch.cuda.Stream(self._device, priority=-1)  # type: ignore[no-untyped-call]
        self._free: dict[int, list[Memory]] = {}

    @property
    def identity(self) -> str:
        """Name of the device that no other has, on this host or elsewhere."""
        return str(torch.cuda.get_device_properties(self._device).uuid)

    @property
    def stream(self) -> int:
        """Address of the device's stream, for libraries that queue work."""
        return int(self._stream.cuda_stream)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor lies on a device of this kind."""
        return tensor.is_cuda

    def near(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor of this kind of device if on this device, else a copy here."""
        return tensor.to(self._device)

    def using(self) -> AbstractContextManager[Any]:
        """Make the device and its stream the current ones of this thread, in a block."""
        return torch.cuda.stream(self._stream)

    def allocate(self, nbytes: int) -> Memory:
        """Return memory for other processes to open; :class:`DeviceError` if there is none."""
        # An allocation of its own, because others open allocations as a whole. It is kept for the
        # next generation: to free it while a peer has it open is undefined. Peers in that
        # generation have let go of it before they meet there; any other has failed or left.
        free = self._free.setdefault(nbytes, [])
        if free:
            return free.pop()
        with torch.cuda.device(self._device):
            try:
                return _Allocation(nbytes, self._device, free)
            except DeviceError:
                torch.cuda.empty_cache()  # torch keeps freed memory, which `cudaMalloc` lacks
                return _Allocation(nbytes, self._device, free)

    def open(self, handle: bytes, nbytes: int) -> Memory:
        """Return the memory of another process; raise :class:`DeviceError` if it cannot be read."""
        if handle.startswith(_own_mark()):
            raise DeviceError("it shares its process with another rank; CUDA needs one for each")
        with torch.cuda.device(self._device):
            return _Opened(handle, nbytes, self._device)

    def mark(self, tensors: Iterable[torch.Tensor] = ()) -> Any:
        """Mark the work that the caller's streams have now, and lend `tensors` to the own stream.

        Called in the rank's thread.
        """
        devices = {self._device}
        for tensor in tensors:
            devices.add(tensor.device)
            # If a handle is dropped, its tensors may be freed before the stream has read them.
            tensor.record_stream(self._stream)
        return {each: _recorded(torch.cuda.current_stream(each)) for each in devices}

    @contextlib.contextmanager
    def after(self, mark: Any) -> Iterator[None]:
        """Have operations in a block follow that work, on the own stream."""
        with self.using():
            for device, event in mark.items():
                self._stream.wait_event(event)
                if device != self._device:  # copies to and from there are on its streams, too
                    torch.cuda.current_stream(device).wait_event(event)
            yield

    def end(self, mark: Any) -> Any:
        """Mark the own stream's present work, queued after a mark."""
        return _recorded(self._stream), [*mark]

    def reached(self, end: Any) -> bool:
        """Return whether that work is done. Never waits."""
        event, _ = end
        return bool(event.query())

    def follow(self, end: Any) -> None:
        """Have the caller's streams wait for that work. Called in the rank's thread."""
        event, devices = end
        for device in devices:
            torch.cuda.current_stream(device).wait_event(event)

    def drain(self, limit_s: float | None = None) -> None:
        """Wait on the host until the own stream has done all its work.

        Raises :class:`DeviceError` if it has not done so within the limit.
        """
        event = _recorded(self._stream, blocking=True)  # else `synchronize` would spin
        if limit_s is None:
            event.synchronize()  # sleeps, without the interpreter's lock
            return
        deadline = time.monotonic() + limit_s
        while not event.query():  # `synchronize` has no limit
            if time.monotonic() > deadline:
                raise DeviceError(f"its GPU has not ended its work within {limit_s:g} s")
            time.sleep(0.0002)


def _recorded(stream: Any, *, blocking: bool = False) -> Any:
    event = torch.cuda.Event(blocking=blocking)  # type: ignore[no-untyped-call]
    event.record(stream)
    return event


_device_at = functools.cache(Device)  # one stream for a GPU, in all generations


def present_device() -> Device | None:
    """Return this process's GPU; None before any use."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None
    # A rank that computes on `cuda:1` may never have made that the current one.
    used = [i for i in range(torch.cuda.device_count()) if _has_context(i)]
    return _device_at(used[0] if len(used) == 1 else torch.cuda.current_device())


def _has_context(index: int) -> bool:
    """Return whether this process has used a GPU. torch has no public name for that."""
    return bool(torch._C._cuda_hasPrimaryContext(index))  # type: ignore[attr-defined]


def _own_mark() -> bytes:
    """Return what no other process of the host has in its handles, forks included."""
    return _token + os.getpid().to_bytes(8, "little")  # a fork has the same token


_token = os.urandom(8)  # containers of one host may have the same process ids


# -- CUDA's runtime --------------------------------------------------------------------------------

_NAME = "libcudart.so"
_LAZY_PEER_ACCESS = 1  # cudaIpcMemLazyEnablePeerAccess


class _Handle(ctypes.Structure):
    """``cudaIpcMemHandle_t``, which is passed by value."""

    _fields_ = (("reserved", ctypes.c_ubyte * 64),)


def loaded_library(name: str) -> str:
    """Return the path of a library that torch has loaded."""
    with open("/proc/self/maps") as maps:
        paths = [line.rstrip("\n").split(maxsplit=5)[-1] for line in maps if name in line]
    if not paths:
        raise DeviceError(f"torch has loaded no {name}")
    return min(paths)


@functools.cache
def _runtime() -> ctypes.CDLL:
    """Return the CUDA runtime that torch has loaded."""
    library = ctypes.CDLL(loaded_library(_NAME))
    library.cudaGetErrorString.restype = ctypes.c_char_p
    return library


def _call(name: str, *arguments: Any) -> None:
    """Call a function of the runtime; raise :class:`DeviceError` if it fails."""
    library = _runtime()
    status = getattr(library, name)(*arguments)
    if status:
        library.cudaGetLastError()  # else torch would report it at its next call
        raise DeviceError(f"{name}: {library.cudaGetErrorString(status).decode()}")


class _Array:
    """Memory in the form that torch takes over without a copy."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def _tensor_at(address: int, nbytes: int, device: torch.device) -> torch.Tensor:
    return torch.as_tensor(_Array(address, nbytes), device=device)


class _Allocation(Memory):
    """Memory of this process, freed with it; closed, it is `free` for the next communicator."""

    def __init__(self, nbytes: int, device: torch.device, free: list[Memory]) -> None:
        address, handle = ctypes.c_void_p(), _Handle()
        _call("cudaMalloc", ctypes.byref(address), ctypes.c_size_t(nbytes))
        try:
            _call("cudaIpcGetMemHandle", ctypes.byref(handle), address)
        except BaseException:
            _call("cudaFree", address)
            raise
        self.handle = _own_mark() + bytes(handle.reserved)
        self.tensor = _tensor_at(address.value or 0, nbytes, device)
        self._free = free

    def close(self) -> None:
        if self not in self._free:
            self._free.append(self)


class _Opened(Memory):
    """Memory of another process, mapped here."""

    def __init__(self, handle: bytes, nbytes: int, device: torch.device) -> None:
        self.handle = handle
        self._device = device
        self._address = ctypes.c_void_p()
        _call(
            "cudaIpcOpenMemHandle",
            ctypes.byref(self._address),
            _Handle.from_buffer_copy(handle, len(_own_mark())),
            ctypes.c_uint(_LAZY_PEER_ACCESS),
        )
        self.tensor = _tensor_at(self._address.value or 0, nbytes, device)

    def close(self) -> None:
        address, self._address = self._address, ctypes.c_void_p()
        if address.value:
            with torch.cuda.device(self._device):
                _call("cudaIpcCloseMemHandle", address)
