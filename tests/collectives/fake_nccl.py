"""NCCL in memory of the host, and a device whose stream it works on; see ``fake_nccl.c``."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import itertools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.utils._python_dispatch import _get_current_dispatch_mode

from nbelastic.collectives.nccl.library import NcclLibrary
from tests.collectives.fake_device import FakeDevice

if TYPE_CHECKING:
    import torch

COMPILER = shutil.which("cc")

_numbers = itertools.count()


@functools.cache
def library_path(name: str = "nccl") -> str:
    """Compile a library, once for all processes, and return its path."""
    source = Path(__file__).with_name(f"fake_{name}.c")
    digest = hashlib.blake2b(source.read_bytes(), digest_size=6).hexdigest()
    path = Path(tempfile.gettempdir()) / f"nbelastic-fake-{name}-{os.getuid()}-{digest}.so"
    if not path.exists():
        with tempfile.TemporaryDirectory() as folder:
            made = Path(folder) / f"lib{name}.so"
            options = ["-O2", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror"]
            subprocess.run([COMPILER, *options, "-o", made, source, "-lm", "-lpthread"], check=True)
            # Another thread or process may have loaded its own by now, which must keep its name.
            with contextlib.suppress(FileExistsError):
                os.link(made, path)
    return str(path)


def fake_library() -> NcclLibrary:
    return NcclLibrary(library_path())


@functools.cache
def _streams() -> Any:
    library = ctypes.CDLL(library_path())
    library.fakeStreamCreate.restype = ctypes.c_void_p
    library.fakeStreamBegun.restype = ctypes.c_long
    return library


class NcclDevice:
    """A device whose only stream is that of the fake; what torch does there is done at once."""

    kind = "cpu"

    def __init__(self, identity: str = "") -> None:
        self.identity = identity or f"fake-{os.getpid()}-{next(_numbers)}"
        self.stream: int = _streams().fakeStreamCreate()

    def holds(self, tensor: torch.Tensor) -> bool:
        return tensor.is_cpu

    def near(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def using(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def mark(self, tensors: Iterable[torch.Tensor] = ()) -> object:
        return list(tensors)

    @contextlib.contextmanager
    def after(self, mark: Any) -> Iterator[None]:
        assert mark is not None
        yield

    def end(self, _mark: Any) -> int:
        return int(_streams().fakeStreamBegun(ctypes.c_void_p(self.stream)))

    def reached(self, end: int) -> bool:
        stream = ctypes.c_void_p(self.stream)
        return bool(_streams().fakeStreamReached(stream, ctypes.c_long(end)))

    def follow(self, end: int) -> None:
        assert self.reached(end)


class LateNcclDevice(FakeDevice):
    """A device for CUDA IPC, on which the fake of NCCL has a stream as well."""

    def __init__(self, refuses: str = "") -> None:
        super().__init__(refuses)
        self._nccl = NcclDevice()
        self.identity, self.stream = self._nccl.identity, self._nccl.stream
        self.near, self.using = self._nccl.near, self._nccl.using

    def mark(self, tensors: Iterable[torch.Tensor] = ()) -> object:
        # What is marked from within the stream is for NCCL, whose thread also calls the host.
        return [_get_current_dispatch_mode() is not None, *tensors]

    def after(self, mark: Any) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if mark[0] else super().after(mark)

    def end(self, mark: Any) -> object:
        return super().end(mark), self._nccl.end(mark)

    def reached(self, end: Any) -> bool:
        return self._nccl.reached(end[1])

    def follow(self, end: Any) -> None:
        super().follow(end[0])
        self._nccl.follow(end[1])
