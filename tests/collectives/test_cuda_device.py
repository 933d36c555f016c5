"""How CUDA's runtime and its streams are used, with a runtime in C and streams that take notes."""

import contextlib
import ctypes
import types
from functools import cache

import pytest
import torch

from nbelastic.collectives.gpu import device as cuda
from nbelastic.collectives.gpu.device import Device, DeviceError, present_device
from tests.collectives.fake_nccl import COMPILER, library_path

BYTES = 8192
GPU, OTHER_GPU = torch.device("cuda", 0), torch.device("cuda", 1)


class Stream:
    """Notes which events it waits for."""

    def __init__(self, device, priority=0):
        self.device, self.priority, self.awaited = device, priority, []

    def wait_event(self, event):
        self.awaited.append(event)


class Event:
    """Is reached at once, unless its stream is stuck."""

    def __init__(self, blocking=False):
        self.blocking, self.stream, self.stuck = blocking, None, False

    def record(self, stream):
        self.stream, self.stuck = stream, getattr(stream, "stuck", False)

    def query(self):
        return not self.stuck

    def synchronize(self):
        assert self.blocking  # it would keep a processor busy
        assert not self.stuck


@pytest.fixture
def gpus(monkeypatch):
    """Two GPUs: the streams that are current there, and what else a test may look at."""
    gpus = types.SimpleNamespace(current={}, emptied=0, contexts=[0], initialized=True)

    def current_stream(device):
        return gpus.current.setdefault(device, Stream(device))

    @contextlib.contextmanager
    def stream(its):
        before = current_stream(its.device)
        gpus.current[its.device] = its
        yield
        gpus.current[its.device] = before

    def empty_cache():
        gpus.emptied += 1

    fakes = types.SimpleNamespace(
        Stream=Stream,
        Event=Event,
        current_stream=current_stream,
        stream=stream,
        device=lambda _: contextlib.nullcontext(),
        empty_cache=empty_cache,
        is_available=lambda: True,
        is_initialized=lambda: gpus.initialized,
        device_count=lambda: 2,
        current_device=lambda: 0,
    )
    monkeypatch.setattr(torch, "cuda", fakes)
    monkeypatch.setattr(cuda, "_has_context", lambda index: index in gpus.contexts)
    monkeypatch.setattr(cuda, "_device_at", cache(Device))
    return gpus


def lying_on(device):
    """Return a tensor, as far as marking goes."""
    lent = []
    return types.SimpleNamespace(device=device, record_stream=lent.append, lent=lent)


# -- streams -------------------------------------------------------------------------------------


def test_a_process_has_one_device_which_is_the_one_that_it_uses(gpus):
    gpus.initialized = False
    assert present_device() is None  # to use it would take memory of a GPU that nobody wants
    gpus.initialized = True
    gpus.contexts = [1]
    device = present_device()
    assert device is present_device()
    assert device._device == OTHER_GPU
    gpus.contexts = [0, 1]
    assert present_device()._device == GPU


def test_work_follows_the_callers_streams_and_they_follow_it(gpus):
    device = Device(0)
    callers = torch.cuda.current_stream(GPU)
    other = torch.cuda.current_stream(OTHER_GPU)
    here, there = lying_on(GPU), lying_on(OTHER_GPU)
    mark = device.mark([here, there])
    assert here.lent == there.lent == [device._stream]  # not freed before it has read them
    with device.after(mark):
        assert torch.cuda.current_stream(GPU) is device._stream
    assert {event.stream for event in device._stream.awaited} == {callers, other}
    assert [event.stream for event in other.awaited] == [other]
    assert callers.awaited == []
    other.awaited.clear()
    device.follow(device.end(mark))
    for stream in (callers, other):
        assert [event.stream for event in stream.awaited] == [device._stream]


@pytest.mark.usefixtures("gpus")
def test_the_host_waits_for_the_own_stream_and_no_longer_than_it_may():
    device = Device(0)
    device.drain()
    device.drain(0.1)
    assert device.reached(device.end(device.mark()))
    device._stream.stuck = True
    assert not device.reached(device.end(device.mark())), "asked without waiting"
    with pytest.raises(DeviceError, match=r"its GPU has not ended its work within 0\.1 s"):
        device.drain(0.1)


# -- memory --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def library():
    """A runtime, loaded as torch would."""
    if COMPILER is None:
        pytest.skip("there is no C compiler")
    return ctypes.CDLL(library_path("cudart"))


@pytest.fixture
def device(gpus, library, monkeypatch):
    def tensor_at(address, nbytes, _device):
        return torch.frombuffer((ctypes.c_ubyte * nbytes).from_address(address), dtype=torch.uint8)

    monkeypatch.setattr(cuda, "_runtime", cache(cuda._runtime.__wrapped__))
    monkeypatch.setattr(cuda, "_NAME", "nbelastic-fake-cudart")
    monkeypatch.setattr(cuda, "_tensor_at", tensor_at)
    return Device(0)


@pytest.fixture
def elsewhere(monkeypatch):
    """Have what follows happen in another process, as far as handles go."""
    return lambda: monkeypatch.setattr(cuda, "_token", b"another.")


def mapped():
    with open("/proc/self/maps", encoding="utf-8") as file:
        return sum("memfd:fake-cudart" in line for line in file)


def test_others_open_what_a_process_has_allocated_and_keeps_for_the_next_generation(
    device, elsewhere
):
    """A peer that has it open may be slow to close it."""
    before = mapped()
    own = device.allocate(BYTES)
    own.tensor.copy_(torch.arange(BYTES) % 251)
    elsewhere()
    opened = device.open(own.handle, BYTES)
    assert torch.equal(opened.tensor, own.tensor)
    opened.tensor[5] = 99
    assert own.tensor[5] == 99
    assert mapped() == before + 2
    for _ in range(2):
        opened.close()
        assert mapped() == before + 1
    for _ in range(2):
        own.close()
    again, other = device.allocate(BYTES), device.allocate(BYTES)
    assert again.handle == own.handle != other.handle
    assert mapped() == before + 2


def test_refusals_name_the_function_and_the_reason(device, gpus, elsewhere, monkeypatch):
    def refused(what, act):
        monkeypatch.setenv("FAKE_CUDART_REFUSES", what.partition(":")[0])
        with pytest.raises(DeviceError, match=what):
            act()

    own = device.allocate(BYTES)
    with pytest.raises(DeviceError, match="it shares its process with another rank"):
        device.open(own.handle, BYTES)
    refused("cudaMalloc: out of memory", lambda: device.allocate(BYTES))
    assert gpus.emptied == 1  # what torch keeps may have been too much
    before = mapped()
    refused("cudaIpcGetMemHandle: out of memory", lambda: device.allocate(BYTES))
    assert mapped() == before
    elsewhere()
    refused("cudaIpcOpenMemHandle: out of memory", lambda: device.open(own.handle, BYTES))
    monkeypatch.delenv("FAKE_CUDART_REFUSES")
    with pytest.raises(DeviceError, match="cudaIpcOpenMemHandle: invalid argument"):
        device.open(own.handle[:16] + bytes(64), BYTES)
    cuda._runtime.cache_clear()
    monkeypatch.setattr(cuda, "_NAME", "libcudart-of-another-make")
    with pytest.raises(DeviceError, match="torch has loaded no libcudart-of-another-make"):
        device.allocate(BYTES)
