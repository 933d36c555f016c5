from __future__ import annotations

import pytest
import torch

from nbelastic.torch.buckets import Bucket, Scaling
from tests.torch.fakes import LendingCommunicator, TwinCommunicator


@pytest.fixture
def parameters():
    return [torch.empty(2, 3), torch.empty(()), torch.empty(4)]


@pytest.fixture
def bucket(parameters):
    return Bucket(parameters, torch.float32, riders=2)


def test_a_bucket_sums_gradients_riders_and_uses(bucket, parameters):
    communicator = TwinCommunicator(generation=1)
    bucket.begin(communicator, Scaling(before=2.0, after=4.0))
    bucket.put(0, torch.full((2, 3), 3.0))
    assert bucket.missing() == [1, 2]
    bucket.put(2, torch.arange(4.0))
    assert not bucket.full
    bucket.launch(communicator, riders=[0.0, 1.0])
    bucket.wait()
    assert [bucket.used(position) for position in range(3)] == [True, False, True]
    assert [bucket.rider(index) for index in range(2)] == [0.0, 2.0]
    bucket.deliver()
    assert parameters[0].grad.tolist() == [[0.75] * 3] * 2
    assert parameters[1].grad is None
    assert parameters[2].grad.tolist() == [0.0, 0.25, 0.5, 0.75]


def test_a_bucket_is_empty_again_for_the_next_step(bucket, parameters):
    communicator = TwinCommunicator(generation=1)
    for value in (1.0, None, 2.0):
        bucket.begin(communicator)
        for position, parameter in enumerate(parameters):
            parameter.grad = None
            if value is not None:
                bucket.put(position, torch.full_like(parameter, value))
        assert bucket.full == (value is not None)
        bucket.launch(communicator, riders=[0.0, 0.0])
        assert communicator.lent[-1][:-5].tolist() == [2 * (value or 0.0)] * 11
        bucket.wait()
        assert bucket.used(2) == (value is not None)
        bucket.deliver()
        assert (parameters[2].grad is None) == (value is None)


def test_a_buffer_is_one_tensor_of_the_communicator(bucket):
    communicator = LendingCommunicator(generation=1)
    for _ in range(2):
        bucket.begin(communicator)
        bucket.launch(communicator, riders=[0.0, 0.0])
        bucket.wait()
        bucket.deliver()
    (made,) = communicator.made
    assert (made.shape, made.dtype) == ((11 + 3 + 2,), torch.float32)
    assert [lent is made for lent in communicator.lent] == [True, True]


def test_gradients_become_views_of_the_buffer_and_are_copied_once(bucket, parameters):
    communicator = LendingCommunicator(generation=1)
    bucket.begin(communicator, Scaling(before=2.0))
    parameters[0].grad = torch.full((2, 3), 3.0)
    bucket.put(0, parameters[0].grad)
    view = bucket.attach(0)
    assert parameters[0].grad is view
    assert communicator.holds(view)
    bucket.launch(communicator, riders=[0.0, 0.0])
    bucket.wait()
    bucket.deliver()
    assert parameters[0].grad is view
    assert view.tolist() == [[3.0] * 3] * 2
    bucket.begin(communicator, Scaling(before=2.0))
    version = view._version
    bucket.put(0, view)
    assert view.tolist() == [[1.5] * 3] * 2
    assert view._version == version + 1  # was divided where it is
    bucket.begin(communicator)
    bucket.put(0, view)
    assert view._version == version + 1  # was not touched


def test_a_gradient_whose_data_was_replaced_is_copied_back_to_its_place(bucket, parameters):
    communicator = LendingCommunicator(generation=1)
    bucket.begin(communicator)
    bucket.put(2, torch.zeros(4))
    moved = bucket.attach(2)
    moved.data = torch.arange(4.0)
    bucket.begin(communicator)
    bucket.put(2, moved)
    assert bucket.attach(2) is parameters[2].grad is not moved
    assert communicator.holds(parameters[2].grad)
    assert parameters[2].grad.tolist() == [0.0, 1.0, 2.0, 3.0]
    parameters[2].grad.data = torch.ones(4)
    bucket.begin(communicator)
    bucket.launch(communicator, riders=[0.0, 0.0])
    assert not communicator.made[0].any()


def test_each_communicator_has_buffers_of_its_own(bucket, parameters):
    first, second = LendingCommunicator(generation=1), LendingCommunicator(generation=1)
    bucket.begin(first)
    bucket.put(2, torch.ones(4))
    old = bucket.attach(2)
    bucket.begin(second)
    bucket.put(2, parameters[2].grad)
    bucket.attach(2).add_(1.0)
    assert first.holds(old)
    assert second.holds(parameters[2].grad)
    assert old.tolist() == [1.0] * 4


def test_a_dropped_bucket_takes_new_memory_and_its_gradients_are_gone(bucket, parameters):
    communicator = TwinCommunicator(generation=1)
    for _ in range(2):
        bucket.begin(communicator)
        bucket.put(2, torch.ones(4))
        bucket.attach(2)
        parameters[0].grad = torch.ones(2, 3)
        bucket.launch(communicator, riders=[0.0, 0.0])
        bucket.drop()
        bucket.drop()
        assert parameters[2].grad is None
        assert parameters[0].grad is not None  # not in the buffer
    first, second = communicator.lent
    assert first.data_ptr() != second.data_ptr()


def test_gradients_move_out_of_a_bucket_that_is_not_needed_any_more(bucket, parameters):
    communicator = LendingCommunicator(generation=1)
    bucket.begin(communicator)
    bucket.put(2, torch.ones(4))
    bucket.attach(2)
    bucket.release()
    assert not communicator.holds(parameters[2].grad)
    assert parameters[2].grad.tolist() == [1.0] * 4


@pytest.mark.parametrize(
    "parameter",
    [
        torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last),
        torch.ones(3, 2).t(),
        torch.ones(3).expand(2, 3),
        torch.ones(4, dtype=torch.float64),
    ],
    ids=["channels last", "transposed", "expanded", "another type"],
)
def test_what_cannot_be_a_view_is_copied_both_ways(parameter):
    communicator = LendingCommunicator(generation=1)
    bucket = Bucket([parameter], torch.float32)
    bucket.begin(communicator, Scaling(before=4.0))
    assert bucket.views == [None]
    gradient = torch.arange(float(parameter.numel())).view(parameter.shape).to(parameter.dtype)
    bucket.put(0, gradient)
    bucket.launch(communicator)
    bucket.wait()
    bucket.deliver()
    assert not communicator.holds(parameter.grad)
    assert torch.equal(parameter.grad, gradient / 2)
    assert parameter.grad.stride() == torch.empty_like(parameter).stride()


def test_a_view_has_the_strides_of_its_parameter():
    parameter = torch.ones(4, 3, 1, 1).to(memory_format=torch.channels_last)
    bucket = Bucket([torch.ones(5), parameter], torch.float32)
    communicator = LendingCommunicator(generation=1)
    bucket.begin(communicator)
    bucket.put(1, torch.arange(12.0).view(4, 3, 1, 1))
    assert bucket.attach(1).stride() == parameter.stride()
    assert communicator.made[0][5:17].tolist() == list(range(12))


def test_complex_gradients_travel_as_pairs():
    parameter = torch.empty(2, dtype=torch.complex64)
    bucket = Bucket([parameter], torch.complex64, riders=1)
    communicator = LendingCommunicator(generation=1)
    bucket.begin(communicator, Scaling(before=2.0))
    bucket.put(0, torch.tensor([1j, 2.0]))
    bucket.attach(0)
    bucket.launch(communicator, riders=[1.0])
    bucket.wait()
    bucket.deliver()
    assert communicator.lent[0] is communicator.made[0]
    assert communicator.made[0].dtype is torch.float32
    assert communicator.holds(parameter.grad)
    assert parameter.grad.tolist() == [1j, 2.0]
    assert bucket.used(0)
    assert bucket.rider(0) == 2.0
