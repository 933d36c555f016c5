"""Which streams are waited for, with streams that only take notes; test_gpu.py has real ones."""

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


def test_each_stream_is_waited_for_once_and_whoever_comes_next_waits_for_the_last(gpu):
    streams, parameter = Streams(), types.SimpleNamespace(device=GPU)
    hook = streams.noting(parameter, lambda _: None)
    seen = [Stream(number) for number in range(6)]

    def note(*numbers):
        for number in numbers:
            before, gpu.present = gpu.present, seen[number]
            hook(parameter)
            gpu.present = before

    def join(number):
        gpu.present = seen[number]
        streams.join(GPU, [])
        return sorted(seen[number].awaited)

    note(1, 2, 2)
    assert join(3) == join(3) == [1, 2]
    assert join(4) == [3]
    seen[5].meanwhile = lambda: note(1)  # noted while others are waited for: left for the next
    assert join(5) == [4]
    seen[5].meanwhile = lambda: None
    assert join(5) == [1, 4]
