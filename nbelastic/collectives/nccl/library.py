"""The NCCL that torch has loaded, by ctypes.

No other NCCL is loaded into the process. Every function returns at once, because communicators are
made with ``blocking=0``, except :meth:`NcclLibrary.abort` and :meth:`NcclLibrary.destroy`, which
take half a second and more. ctypes holds no lock of the interpreter meanwhile.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import secrets
from collections.abc import Iterator
from typing import Any

import torch

from nbelastic.collectives.gpu.device import Device, DeviceError, loaded_library
from nbelastic.collectives.topology import host_identity
from nbelastic.collectives.transport import Op

SHARED_GPU_VARIABLE = "NBELASTIC_NCCL_SHARED_GPU"
"""Environment variable: ranks may share a GPU, each as if it were a host. For tests; it is slow."""

OLDEST = (2, 18, 0)

SUCCESS, IN_PROGRESS = 0, 7

_NAME = "libnccl.so"
_ID_BYTES = 128

_TYPES = {
    torch.int8: 0,
    torch.uint8: 1,
    torch.int32: 2,
    torch.int64: 4,
    torch.float16: 6,
    torch.float32: 7,
    torch.float64: 8,
    torch.bfloat16: 9,
}
_BYTES = _TYPES[torch.uint8]  # of what is only moved
_OPS = {Op.SUM: 0, Op.PRODUCT: 1, Op.MAX: 2, Op.MIN: 3, Op.AVERAGE: 4}


class _UniqueId(ctypes.Structure):
    """``ncclUniqueId``, which is passed by value."""

    _fields_ = (("internal", ctypes.c_ubyte * _ID_BYTES),)


class _Config(ctypes.Structure):
    """``ncclConfig_t`` of NCCL 2.18, which later versions take as well."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
        ("cga_cluster_size", ctypes.c_int),
        ("min_ctas", ctypes.c_int),
        ("max_ctas", ctypes.c_int),
        ("net_name", ctypes.c_char_p),
        ("split_share", ctypes.c_int),
    )


_UNSET = -(1 << 31)

_ADDRESS, _COUNT, _CODE = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
_REDUCES = _ADDRESS, _ADDRESS, _COUNT, _CODE, _CODE, _ADDRESS, _ADDRESS
_SENDS = _ADDRESS, _COUNT, _CODE, _CODE, _ADDRESS, _ADDRESS
_ARGUMENTS = {
    "ncclCommInitRankConfig": (_ADDRESS, _CODE, _UniqueId, _CODE, _ADDRESS),
    "ncclCommGetAsyncError": (_ADDRESS, _ADDRESS),
    "ncclCommFinalize": (_ADDRESS,),
    "ncclCommDestroy": (_ADDRESS,),
    "ncclCommAbort": (_ADDRESS,),
    "ncclAllReduce": _REDUCES,
    "ncclBroadcast": _REDUCES,
    "ncclReduceScatter": _REDUCES,
    "ncclAllGather": (_ADDRESS, _ADDRESS, _COUNT, _CODE, _ADDRESS, _ADDRESS),
    "ncclSend": _SENDS,
    "ncclRecv": _SENDS,
}


def _config() -> _Config:
    size = ctypes.sizeof(_Config)
    # As NCCL 2.18's NCCL_CONFIG_INITIALIZER, except that `blocking` is 0.
    return _Config(size, 0xCAFEBEEF, 21800, 0, _UNSET, _UNSET, _UNSET, None, _UNSET)


class NcclLibrary:
    """The functions of NCCL that a communicator needs, in the file at `path`.

    A communicator of NCCL, ``comm``, is the address of one. The `version` is ``(2, 28, 9)`` or so.
    """

    def __init__(self, path: str) -> None:
        try:
            self._library = ctypes.CDLL(path)  # unlike PyDLL, releases the GIL in a call
            self._library.ncclGetErrorString.restype = ctypes.c_char_p
            self._library.ncclGetLastError.restype = ctypes.c_char_p
            for name, types in _ARGUMENTS.items():
                getattr(self._library, name).argtypes = types  # else addresses lose 32 bits
        except (OSError, AttributeError) as error:
            raise DeviceError(f"NCCL cannot be loaded: {error}") from None
        code = ctypes.c_int()
        self._call("ncclGetVersion", ctypes.byref(code))
        major, rest = divmod(code.value, 10_000)
        self.version = (major, *divmod(rest, 100))

    def unique_id(self) -> bytes:
        """Return the identity of a new communicator, at which its ranks will meet this process."""
        found = _UniqueId()
        self._call("ncclGetUniqueId", ctypes.byref(found))
        return bytes(found)

    def init(self, unique_id: bytes, rank: int, size: int) -> int:
        """Begin to make a communicator, and return it."""
        comm = ctypes.c_void_p()
        self._call(
            "ncclCommInitRankConfig",
            ctypes.byref(comm),
            size,
            _UniqueId.from_buffer_copy(unique_id),
            rank,
            ctypes.byref(_config()),
        )
        return comm.value or 0

    def in_progress(self, comm: int) -> bool:
        """Return whether what was begun last is still being prepared.

        Raises :class:`DeviceError` if that has failed, or the communicator has.
        """
        state = ctypes.c_int()
        self._call("ncclCommGetAsyncError", comm, ctypes.byref(state))
        if state.value not in (SUCCESS, IN_PROGRESS):
            raise DeviceError(self._describe(state.value))
        return state.value == IN_PROGRESS

    def finalize(self, comm: int) -> None:
        """Begin to end a communicator once its operations have reached all ranks."""
        self._call("ncclCommFinalize", comm)

    def destroy(self, comm: int) -> None:
        """Free a communicator that is finalized. Takes its time."""
        self._call("ncclCommDestroy", comm)

    def abort(self, comm: int) -> None:
        """End and free a communicator in any state, with its operations. Takes its time."""
        self._call("ncclCommAbort", comm)

    # -- operations, which are queued in a stream --------------------------------------------------

    @contextlib.contextmanager
    def group(self) -> Iterator[None]:
        """Begin all operations of a block as one."""
        self._call("ncclGroupStart")
        try:
            yield
        finally:
            self._call("ncclGroupEnd")  # an open group would take in later calls

    def allreduce(self, comm: int, stream: int, values: torch.Tensor, op: Op) -> None:
        """Reduce values, in place."""
        at = values.data_ptr()
        self._call("ncclAllReduce", at, at, *_reduction(values, op), comm, stream)

    def broadcast(self, comm: int, stream: int, values: torch.Tensor, root: int) -> None:
        """Copy the bytes of a rank to all others, in place."""
        at = values.data_ptr()
        self._call("ncclBroadcast", at, at, values.nbytes, _BYTES, root, comm, stream)

    def allgather(
        self, comm: int, stream: int, everything: torch.Tensor, values: torch.Tensor
    ) -> None:
        """Collect the bytes of all ranks, one after the other."""
        ends = values.data_ptr(), everything.data_ptr()
        self._call("ncclAllGather", *ends, values.nbytes, _BYTES, comm, stream)

    def reduce_scatter(
        self, comm: int, stream: int, output: torch.Tensor, values: torch.Tensor, op: Op
    ) -> None:
        """Reduce values; each rank receives its part. All parts are equally long."""
        ends = values.data_ptr(), output.data_ptr()
        self._call("ncclReduceScatter", *ends, *_reduction(output, op), comm, stream)

    def send(self, comm: int, stream: int, values: torch.Tensor, to: int) -> None:
        """Send bytes to a rank."""
        self._call("ncclSend", values.data_ptr(), values.nbytes, _BYTES, to, comm, stream)

    def receive(self, comm: int, stream: int, values: torch.Tensor, source: int) -> None:
        """Receive bytes from a rank."""
        self._call("ncclRecv", values.data_ptr(), values.nbytes, _BYTES, source, comm, stream)

    def _call(self, name: str, *arguments: Any) -> None:
        result = getattr(self._library, name)(*arguments)
        if result not in (SUCCESS, IN_PROGRESS):  # without blocking, both are good
            raise DeviceError(f"{name}: {self._describe(result)}")

    def _describe(self, result: int) -> str:
        text = self._library.ncclGetErrorString(result).decode(errors="replace")
        text = text.partition(" (run with")[0]
        detail = self._library.ncclGetLastError(None).decode(errors="replace").strip()
        return f"NCCL reports: {text}" + (f" ({detail})" if detail else "")


def _reduction(values: torch.Tensor, op: Op) -> tuple[int, int, int]:
    """Return count, type and operation."""
    return values.numel(), _TYPES[values.dtype], _OPS[op]


# -- the one of this process ---------------------------------------------------------------------


@functools.cache
def present_library() -> NcclLibrary:
    """Return the NCCL that torch has loaded.

    Raises :class:`DeviceError` if there is none, or one that is too old.
    """
    _stand_apart()  # first, because NCCL reads its variables once
    library = NcclLibrary(loaded_library(_NAME))
    if library.version < OLDEST:
        found, needed = (".".join(map(str, each)) for each in (library.version, OLDEST))
        raise DeviceError(f"NCCL {found} is too old; {needed} is the oldest that works")
    return library


def card_of(device: Device, library: NcclLibrary, rank: int) -> str:
    """Return the GPU as NCCL tells GPUs apart: no two ranks may have the same."""
    host = os.environ.get("NCCL_HOSTID") or host_identity()
    card = f"{host}/{device.identity}"
    if os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1" and library.version >= (2, 30):
        card += f"/{rank}"
    return card


def _stand_apart() -> None:
    """Claim to be on a host of its own if ranks may share a GPU. NCCL reads that once."""
    if os.environ.get(SHARED_GPU_VARIABLE) == "1" and not os.environ.get("NCCL_HOSTID"):
        os.environ["NCCL_HOSTID"] = f"{os.getpid()}-{secrets.token_hex(4)}"
