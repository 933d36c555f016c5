"""The NCCL that torch has loaded, by ctypes.

No other NCCL is loaded into the process. Every function returns at once, because communicators are
made with ``blocking=0``, except :meth:`NcclLibrary.abort` and :meth:`NcclLibrary.destroy`, which
take half a second and more. ctypes holds no lock of the interpreter meanwhile.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from nbelastic.collectives.gpu.device import DeviceError
from nbelastic.collectives.topology import host_identity
from nbelastic.collectives.transport import Op

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nbelastic.collectives.gpu.device import Device

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


def _config() -> _Config:
    size = ctypes.sizeof(_Config)
    return _Config(size, 0xCAFEBEEF, 21800, 0, _UNSET, _UNSET, _UNSET, None, _UNSET)


class NcclLibrary:
    """The functions of NCCL that a communicator needs, in the file at `path`.

    A communicator of NCCL, ``comm``, is the address of one. The `version` is ``(2, 28, 9)`` or so.
    """

    def __init__(self, path: str) -> None:
        try:
            self._library = ctypes.CDLL(path)
            self._library.ncclGetErrorString.restype = ctypes.c_char_p
            self._library.ncclGetLastError.restype = ctypes.c_char_p
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
            ctypes.c_int(size),
            _UniqueId.from_buffer_copy(unique_id),
            ctypes.c_int(rank),
            ctypes.byref(_config()),
        )
        return comm.value or 0

    def in_progress(self, comm: int) -> bool:
        """Return whether what was begun last is still being prepared.

        Raises :class:`DeviceError` if that has failed, or the communicator has.
        """
        state = ctypes.c_int()
        self._call("ncclCommGetAsyncError", ctypes.c_void_p(comm), ctypes.byref(state))
        if state.value not in (SUCCESS, IN_PROGRESS):
            raise DeviceError(self._describe(state.value))
        return state.value == IN_PROGRESS

    def finalize(self, comm: int) -> None:
        """Begin to end a communicator once its operations have reached all ranks."""
        self._call("ncclCommFinalize", ctypes.c_void_p(comm))

    def destroy(self, comm: int) -> None:
        """Free a communicator that is finalized. Takes its time."""
        self._call("ncclCommDestroy", ctypes.c_void_p(comm))

    def abort(self, comm: int) -> None:
        """End and free a communicator in any state, with its operations. Takes its time."""
        self._call("ncclCommAbort", ctypes.c_void_p(comm))

    # -- operations, which are queued in a stream --------------------------------------------------

    @contextlib.contextmanager
    def group(self) -> Iterator[None]:
        """Begin all operations of a block as one."""
        self._call("ncclGroupStart")
        try:
            yield
        finally:
            self._call("ncclGroupEnd")

    def allreduce(self, comm: int, stream: int, values: torch.Tensor, op: Op) -> None:
        """Reduce values, in place."""
        address = ctypes.c_void_p(values.data_ptr())
        self._begin(comm, stream, "ncclAllReduce", address, address, *_reduction(values, op))

    def broadcast(self, comm: int, stream: int, values: torch.Tensor, root: int) -> None:
        """Copy the bytes of a rank to all others, in place."""
        address = ctypes.c_void_p(values.data_ptr())
        self._begin(
            comm, stream, "ncclBroadcast", address, address, *_bytes(values), ctypes.c_int(root)
        )

    def allgather(
        self, comm: int, stream: int, everything: torch.Tensor, values: torch.Tensor
    ) -> None:
        """Collect the bytes of all ranks, one after the other."""
        into = ctypes.c_void_p(everything.data_ptr())
        self._begin(
            comm,
            stream,
            "ncclAllGather",
            ctypes.c_void_p(values.data_ptr()),
            into,
            *_bytes(values),
        )

    def reduce_scatter(
        self, comm: int, stream: int, output: torch.Tensor, values: torch.Tensor, op: Op
    ) -> None:
        """Reduce values; each rank receives its part. All parts are equally long."""
        self._begin(
            comm,
            stream,
            "ncclReduceScatter",
            ctypes.c_void_p(values.data_ptr()),
            ctypes.c_void_p(output.data_ptr()),
            *_reduction(output, op),
        )

    def send(self, comm: int, stream: int, values: torch.Tensor, to: int) -> None:
        """Send bytes to a rank."""
        address = ctypes.c_void_p(values.data_ptr())
        self._begin(comm, stream, "ncclSend", address, *_bytes(values), ctypes.c_int(to))

    def receive(self, comm: int, stream: int, values: torch.Tensor, source: int) -> None:
        """Receive bytes from a rank."""
        address = ctypes.c_void_p(values.data_ptr())
        self._begin(comm, stream, "ncclRecv", address, *_bytes(values), ctypes.c_int(source))

    def _begin(self, comm: int, stream: int, name: str, *arguments: Any) -> None:
        self._call(name, *arguments, ctypes.c_void_p(comm), ctypes.c_void_p(stream))

    def _call(self, name: str, *arguments: Any) -> None:
        result = getattr(self._library, name)(*arguments)
        if result not in (SUCCESS, IN_PROGRESS):
            raise DeviceError(f"{name}: {self._describe(result)}")

    def _describe(self, result: int) -> str:
        text = self._library.ncclGetErrorString(result).decode(errors="replace")
        text = text.partition(" (run with")[0]
        detail = self._library.ncclGetLastError(None).decode(errors="replace").strip()
        return f"NCCL reports: {text}" + (f" ({detail})" if detail else "")


def _reduction(values: torch.Tensor, op: Op) -> tuple[ctypes.c_size_t, ctypes.c_int, ctypes.c_int]:
    """Return count, type and operation."""
    return (
        ctypes.c_size_t(values.numel()),
        ctypes.c_int(_TYPES[values.dtype]),
        ctypes.c_int(_OPS[op]),
    )


def _bytes(values: torch.Tensor) -> tuple[ctypes.c_size_t, ctypes.c_int]:
    """Return count and type for what is only moved."""
    return ctypes.c_size_t(values.nbytes), ctypes.c_int(_TYPES[torch.uint8])


# -- the one of this process ---------------------------------------------------------------------

_present: list[NcclLibrary] = []


def present_library() -> NcclLibrary:
    """Return the NCCL that torch has loaded, or would load.

    Raises :class:`DeviceError` if there is none, or one that is too old.
    """
    if not _present:
        _stand_apart()
        library = NcclLibrary(_path())
        if library.version < OLDEST:
            found, needed = (".".join(map(str, each)) for each in (library.version, OLDEST))
            raise DeviceError(f"NCCL {found} is too old; {needed} is the oldest that works")
        _present.append(library)
    return _present[0]


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


def _path() -> str:
    with open("/proc/self/maps") as maps:
        lines = [line.rstrip("\n").split(maxsplit=5) for line in maps if _NAME in line]
    paths = sorted({fields[5] for fields in lines if len(fields) > 5})
    if not paths:
        paths = _packaged()
    if not paths:
        raise DeviceError("torch has loaded no NCCL, and its package is not installed")
    return paths[0]


def _packaged() -> list[str]:
    """Return the file in the package that torch's wheels depend on."""
    try:
        spec = importlib.util.find_spec("nvidia.nccl")
    except (ImportError, ValueError):
        return []
    places = [] if spec is None else list(spec.submodule_search_locations or [])
    return sorted(str(path) for place in places for path in Path(place).glob(f"lib/{_NAME}*"))
