"""A device whose memory is the host's, for ranks that are threads or processes.

Its stream is as late as it may be: what changes memory is put off until the host waits for the
stream. So a communicator that forgets to wait computes with what was there before.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nbelastic.collectives.gpu.device import DeviceError

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


living: list[FakeMemory] = []  # all memory of this process that was not closed yet


class _Late(TorchDispatchMode):
    """Has a stream do later what changes memory; views are made at once."""

    def __init__(self, stream: Stream) -> None:
        super().__init__()
        self._stream = stream

    def __torch_dispatch__(
        self, function: Any, _types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        schema = function._schema
        if not schema.is_mutable:
            if any(each.alias_info is not None for each in schema.returns):
                return function(*args, **kwargs)  # a view
            if not isinstance(made := function(*args, **kwargs), torch.Tensor):
                return made
            # Its shape is right; its values are what they will be once it is its turn.
            self._stream.add(lambda: made.copy_(function(*args, **kwargs)))
            return made
        self._stream.add(lambda: function(*args, **kwargs))
        if not schema.returns:
            return None
        return kwargs["out"] if "out" in kwargs else args[0]


class Stream:
    """Work in order, done when the host waits for it. It is stuck as long as a test wants it."""

    def __init__(self) -> None:
        self.stuck = threading.Event()
        self._work: list[Callable[[], object]] = []
        self._lock = threading.Lock()

    def add(self, work: Callable[[], object]) -> None:
        self._work.append(work)

    def flush(self, limit_s: float | None = None) -> bool:
        deadline = None if limit_s is None else time.monotonic() + limit_s
        while self.stuck.is_set():
            if deadline is not None and time.monotonic() > deadline:
                return False
            time.sleep(0.001)
        with self._lock:
            work, self._work = self._work, []
            for each in work:
                each()
        return True


class FakeDevice:
    """A device that refuses to ``allocate``, ``open`` or ``drain``, or opens other memory.

    Its process is killed when it `dies_at` a wait for its stream, from 1; 0 for never.
    """

    kind = "cpu"

    def __init__(self, refuses: str = "", *, garbles: bool = False, dies_at: int = 0) -> None:
        self.refuses, self._garbles, self._dies_at = refuses, garbles, dies_at
        self.stream: Any = Stream()
        self._work: Stream = self.stream
        self.drains = 0

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

    def mark(self, tensors: Iterable[torch.Tensor] = ()) -> object:
        return list(tensors)

    @contextlib.contextmanager
    def after(self, mark: Any) -> Iterator[None]:
        assert mark is not None
        with _Late(self._work):
            yield

    def end(self, _mark: Any) -> object:
        return self._work

    def follow(self, end: Any) -> None:
        assert end.flush()

    def drain(self, limit_s: float | None = None) -> None:
        self._refuse("drain")
        self.drains += 1
        if self.drains == self._dies_at:
            os.kill(os.getpid(), signal.SIGKILL)
        # The host waits outside of what is put off.
        with torch.utils._python_dispatch._disable_current_modes():
            if not self._work.flush(limit_s):
                raise DeviceError(f"its GPU has not ended its work within {limit_s:g} s")
