"""Which streams are waited for, with streams that only take notes; test_cuda.py has real ones."""

from __future__ import annotations

import types

import pytest
import torch

from nbelastic.torch.gradients.arrived import Streams

GPU = torch.device("cuda", 0)


class Stream:
    """Equal to all of its number; notes whom it has waited for."""

    def __init__(self, stream_id, device_index=0, device_type=1):
        self.stream_id, self.device_index, self.device_type = stream_id, device_index, device_type
        self.awaited = []
        self.meanwhile = lambda: None

    def __eq__(self, other):
        return self.stream_id == other.stream_id

    def __hash__(self):
        return self.stream_id

    def wait_stream(self, other):
        self.awaited.append(other.stream_id)
        self.meanwhile()


@pytest.fixture
def gpu(monkeypatch):
    """The present stream can be set; gradients are noted on it."""
    gpu = types.SimpleNamespace(present=Stream(0))
    cuda = types.SimpleNamespace(current_stream=lambda device: gpu.present, Stream=Stream)
    monkeypatch.setattr(torch, "cuda", cuda)
    monkeypatch.setattr(
        torch._C,
        "_cuda_getCurrentStream",
        lambda index: (gpu.present.stream_id, index, 1),
        raising=False,
    )
    return gpu


def noting(streams):
    """Return what notes a gradient on the present stream."""
    arrived = []
    parameter = types.SimpleNamespace(device=GPU)
    hook = streams.noting(parameter, arrived.append)
    return lambda: hook(parameter)


def test_each_stream_is_waited_for_once_and_whoever_comes_next_waits_for_the_last(gpu):
    streams = Streams()
    note = noting(streams)
    for number in (1, 2, 2):
        gpu.present = Stream(number)
        note()
    gpu.present = third = Stream(3)
    streams.join(GPU, [])
    streams.join(GPU, [])
    assert sorted(third.awaited) == [1, 2]
    gpu.present = fourth = Stream(4)
    streams.join(GPU, [])
    assert fourth.awaited == [3]


def test_what_is_noted_while_others_are_waited_for_is_left_for_the_next(gpu):
    streams = Streams()
    note = noting(streams)
    gpu.present = first = Stream(1)
    note()
    gpu.present = second = Stream(2)

    def again():
        gpu.present = first
        note()
        gpu.present = second

    second.meanwhile = again
    streams.join(GPU, [])
    second.meanwhile = lambda: None
    streams.join(GPU, [])
    assert second.awaited == [1, 1]


def test_on_the_host_nothing_is_noted(gpu):
    arrived = []
    hook = arrived.append
    assert Streams().noting(torch.ones(1), hook) is hook
    Streams().join(torch.device("cpu"), [])
