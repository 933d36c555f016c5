"""Memory that a GPU's driver is told of: here one that takes notes, a real one in test_cuda.py."""

from __future__ import annotations

import contextlib
import mmap
import types

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nbelastic.collectives import SoloCommunicator
from nbelastic.torch.gradients.staging import Pinned

GPU = torch.device("cuda", 1)
REFUSED = 1


class Driver:
    """What is registered, and what happened in what order."""

    def __init__(self, answer=0):
        self.known = {}
        self.events = []
        self.devices = []
        self._answer = answer

    def cudaHostRegister(self, address, nbytes, flags):
        self.events.append("registered")
        self.known[address] = nbytes
        return self._answer

    def cudaHostUnregister(self, address):
        self.events.append("unregistered")
        del self.known[address]

    def synchronize(self):
        self.events.append("awaited")

    @contextlib.contextmanager
    def device(self, device):
        self.devices.append(device)
        yield


@contextlib.contextmanager
def pin(driver, count, dtype=torch.float32):
    with pytest.MonkeyPatch.context() as monkeypatch:
        cuda = types.SimpleNamespace(cudart=lambda: driver, device=driver.device)
        monkeypatch.setattr(torch, "cuda", cuda)
        held = Pinned(SoloCommunicator(generation=1), count, dtype, GPU, [driver])
        yield held.memory
        del held


@given(
    count=st.integers(0, 5000),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
)
def test_whole_pages_are_pinned_on_which_nothing_else_lies(count, dtype):
    driver = Driver()
    with pin(driver, count, dtype) as memory:
        assert memory.shape == (count,)
        assert memory.dtype is dtype
        assert len(driver.known) == (count > 0)
        storage = memory.untyped_storage()
        for address, nbytes in driver.known.items():
            assert address == memory.data_ptr()
            assert address % mmap.PAGESIZE == nbytes % mmap.PAGESIZE == 0
            assert nbytes >= memory.nbytes
            assert address >= storage.data_ptr()
            assert address + nbytes <= storage.data_ptr() + storage.nbytes()


def test_copies_are_awaited_before_memory_is_let_go_of():
    driver = Driver()
    with pin(driver, 100):
        assert driver.events == ["registered"]
    assert driver.events == ["registered", "awaited", "unregistered"]
    assert driver.devices == [GPU, GPU]  # nothing is set up on another


def test_where_the_driver_refuses_it_is_pytorchs_own_pinned_memory(monkeypatch):
    def report(*_, **__):
        raise RuntimeError("what the driver has refused is reported once more")

    def own(count, *, dtype, pin_memory=False):
        return torch.ones(count).to(dtype) if pin_memory else plain(count, dtype=dtype)

    plain, driver = torch.empty, Driver(REFUSED)
    monkeypatch.setattr(torch, "zeros", report)
    monkeypatch.setattr(torch, "empty", own)
    with pin(driver, 3) as memory:
        assert memory.tolist() == [1, 1, 1]
    assert driver.events == ["registered"]
