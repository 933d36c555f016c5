from __future__ import annotations

import pytest
import torch

from nbelastic.collectives import SoloCommunicator
from nbelastic.torch.buckets import BUCKET_BYTES, FIRST_BUCKET_BYTES, Bucket, plan_buckets
from nbelastic.torch.compression import Compression
from tests.torch.fakes import TwinCommunicator

MEGA = 1 << 20


def tensors(*megabytes, dtype=torch.float32):
    return [torch.empty(int(size * MEGA) // dtype.itemsize, dtype=dtype) for size in megabytes]


def same(dtype):
    return dtype


def test_the_first_bucket_is_small_and_the_others_are_not():
    assert (FIRST_BUCKET_BYTES, BUCKET_BYTES) == (MEGA, 25 * MEGA)
    parameters = tensors(10, 10, 10, 10, 0.5, 0.5, 0.5)
    order = [6, 5, 4, 3, 2, 1, 0]
    assert plan_buckets(parameters, order, same) == [[6, 5], [4, 3, 2, 1], [0]]


def test_a_bucket_has_one_type_on_the_wire():
    parameters = [*tensors(1, 1), *tensors(1, 1, dtype=torch.float64)]
    order = [0, 2, 1, 3]
    assert plan_buckets(parameters, order, same) == [[0], [2], [1], [3]]
    halved = Compression.fp16.wire_dtype
    assert plan_buckets(parameters, order, halved) == [[0, 2, 1], [3]]


def test_buckets_are_ordered_by_when_they_are_full():
    parameters = tensors(0.1, 2, 2)
    parameters[0] = parameters[0].double()
    assert plan_buckets(parameters, [0, 1, 2], same) == [[0], [1], [2]]
    assert plan_buckets(parameters, [1, 0, 2], same, groups=[[0, 2]]) == [[1], [0], [2]]
    single = tensors(0.1, 2, 2)
    assert plan_buckets(single, [0, 1, 2], same, groups=[[0, 2]]) == [[1], [0, 2]]


def test_groups_have_any_size():
    parameters = tensors(30, 30, 0.1, 0.1)
    assert plan_buckets(parameters, [3, 2, 1, 0], same, [[3], [0, 1]]) == [[3], [2], [1, 0]]


@pytest.fixture
def bucket():
    parameters = [torch.empty(2, 3), torch.empty(()), torch.empty(4)]
    return Bucket(parameters, torch.float32, riders=2)


def test_a_bucket_sums_gradients_riders_and_uses(bucket):
    bucket.begin()
    bucket.put(0, torch.full((2, 3), 3.0), divisor=2.0)
    assert bucket.missing() == [1, 2]
    bucket.put(2, torch.arange(4.0))
    assert not bucket.full
    bucket.launch(TwinCommunicator(generation=1), riders=[0.0, 1.0])
    bucket.wait()
    assert [bucket.used(position) for position in range(3)] == [True, False, True]
    assert [bucket.rider(index) for index in range(2)] == [0.0, 2.0]
    out = torch.empty(2, 3)
    bucket.take(0, out, divisor=2.0)
    assert out.tolist() == [[1.5] * 3] * 2
    out = torch.empty(4, dtype=torch.float64)
    bucket.take(2, out, divisor=4.0)
    assert out.tolist() == [0.0, 0.5, 1.0, 1.5]


def test_a_bucket_is_empty_again_for_the_next_step(bucket):
    communicator = SoloCommunicator(generation=1)
    for value in (1.0, None, 2.0):
        bucket.begin()
        if value is not None:
            for position, parameter in enumerate(bucket.parameters):
                bucket.put(position, torch.full_like(parameter, value))
        assert bucket.full == (value is not None)
        bucket.launch(communicator, riders=[0.0, 0.0])
        bucket.wait()
        out = torch.empty(4)
        bucket.take(2, out)
        assert out.tolist() == [value or 0.0] * 4
        assert bucket.used(2) == (value is not None)


def test_a_dropped_bucket_takes_new_memory(bucket):
    communicator = TwinCommunicator(generation=1)
    for _ in range(2):
        bucket.begin()
        bucket.launch(communicator, riders=[0.0, 0.0])
        bucket.drop()
        bucket.drop()
    first, second = communicator.lent
    assert first.data_ptr() != second.data_ptr()


def test_complex_gradients():
    bucket = Bucket([torch.empty(2, dtype=torch.complex64)], torch.complex64, riders=1)
    bucket.begin()
    bucket.put(0, torch.tensor([1j, 2.0]))
    bucket.launch(TwinCommunicator(generation=1), riders=[1.0])
    bucket.wait()
    out = torch.empty(2, dtype=torch.complex64)
    bucket.take(0, out, divisor=2.0)
    assert out.tolist() == [1j, 2.0]
    assert bucket.used(0)
    assert bucket.rider(0) == 2.0
