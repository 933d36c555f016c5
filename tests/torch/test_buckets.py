from __future__ import annotations

import pytest
import torch

from nbelastic.collectives import Op
from nbelastic.errors import CollectiveError
from nbelastic.torch.gradients.arrived import ArrivedGradients
from nbelastic.torch.gradients.groups import Bucket, Scaling
from nbelastic.torch.gradients.layout_agreement import LayoutAgreement
from nbelastic.torch.gradients.options import ReduceOptions
from nbelastic.torch.ops.compression import Compression
from tests.torch.fakes import LendingCommunicator, TwinCommunicator


@pytest.fixture
def parameters():
    return [torch.empty(2, 3), torch.empty(()), torch.empty(4)]


def make_bucket(communicator, parameters, scaling=None, dtype=torch.float32, trailer=0):
    return Bucket(communicator, parameters, dtype, ArrivedGradients({}), scaling, trailer)


def arrive(bucket, position, gradient):
    """Have a gradient be a parameter's and arrive; return whether it was the last expected."""
    bucket.parameters[position].grad = gradient
    return bucket.arrive(position, gradient)


def reduce(bucket, communicator):
    """Reduce and deliver what has arrived."""
    bucket.complete()
    there = [float(each) for each in bucket.present]
    bucket.launch(communicator, [0.0, 1.0, *there])
    bucket.wait()
    bucket.deliver(bucket.sums[2:])


def test_a_bucket_sums_gradients_and_its_trailer(parameters):
    communicator = TwinCommunicator(generation=1)
    bucket = make_bucket(communicator, parameters, Scaling(before=2.0, after=4.0), trailer=5)
    assert not arrive(bucket, 0, torch.full((2, 3), 3.0))
    assert not arrive(bucket, 2, torch.arange(4.0))
    assert bucket.expected == 1
    reduce(bucket, communicator)
    assert bucket.present == [True, False, True]
    assert bucket.sums == [0.0, 2.0, 2.0, 0.0, 2.0]
    assert parameters[0].grad.tolist() == [[0.75] * 3] * 2
    assert parameters[1].grad is None
    assert parameters[2].grad.tolist() == [0.0, 0.25, 0.5, 0.75]


def test_a_bucket_is_empty_again_for_the_next_step(parameters):
    communicator = TwinCommunicator(generation=1)
    bucket = make_bucket(communicator, parameters, trailer=5)
    for value in (1.0, None, 2.0):
        bucket.begin()
        for position, parameter in enumerate(parameters):
            parameter.grad = None
            if value is not None:
                last = arrive(bucket, position, torch.full_like(parameter, value))
                assert last == (position == 2)
        reduce(bucket, communicator)
        assert communicator.lent[-1][:-5].tolist() == [2 * (value or 0.0)] * 11
        assert bucket.present == [value is not None] * 3
        assert (parameters[2].grad is None) == (value is None)


def test_a_buffer_is_one_tensor_of_the_communicator(parameters):
    communicator = LendingCommunicator(generation=1)
    bucket = make_bucket(communicator, parameters, trailer=5)
    for _ in range(2):
        bucket.begin()
        reduce(bucket, communicator)
    (made,) = communicator.made
    assert (made.shape, made.dtype) == ((11 + 5,), torch.float32)
    assert [lent is made for lent in communicator.lent] == [True, True]


def test_gradients_become_views_of_the_buffer_and_are_copied_once():
    parameter = torch.empty(2, 3)
    communicator = LendingCommunicator(generation=1)
    bucket = make_bucket(communicator, [parameter], Scaling(before=2.0))
    assert arrive(bucket, 0, torch.full((2, 3), 3.0))
    view = parameter.grad
    assert communicator.holds(view)
    bucket.launch(communicator)
    bucket.wait()
    bucket.deliver([2.0])
    assert parameter.grad is view
    assert view.tolist() == [[3.0] * 3] * 2
    bucket.begin()
    version = view._version
    arrive(bucket, 0, view)
    assert view.tolist() == [[1.5] * 3] * 2
    assert view._version == version + 1  # was divided where it is
    assert parameter.grad is view


def test_a_gradient_that_the_user_changes_after_it_became_a_view_is_noticed():
    parameter, arrived = torch.empty(4), ArrivedGradients({})
    communicator = LendingCommunicator(generation=1)
    bucket = Bucket(communicator, [parameter], torch.float32, arrived, Scaling(before=2.0))
    parameter.grad = torch.ones(4)
    arrived.note(parameter, parameter.grad)
    bucket.arrive(0, parameter.grad)
    arrived.check_untouched()
    parameter.grad.mul_(2)
    with pytest.raises(RuntimeError, match="was changed"):
        arrived.check_untouched()


def test_a_gradient_whose_data_was_replaced_is_copied_back_to_its_place():
    parameter = torch.empty(4)
    communicator = LendingCommunicator(generation=1)
    bucket = make_bucket(communicator, [parameter])
    arrive(bucket, 0, torch.zeros(4))
    moved = parameter.grad
    moved.data = torch.arange(4.0)
    bucket.begin()
    arrive(bucket, 0, moved)
    assert parameter.grad is not moved
    assert communicator.holds(parameter.grad)
    assert parameter.grad.tolist() == [0.0, 1.0, 2.0, 3.0]
    parameter.grad.data = torch.ones(4)
    parameter.grad = None
    bucket.begin()
    bucket.launch(communicator)
    assert not communicator.made[0].any()


def make_agreement():
    options = ReduceOptions(
        op=Op.SUM,
        compression=Compression.none,
        predivide=1.0,
        passes=1,
        groups=0,
        sparse_as_dense=False,
    )
    return LayoutAgreement("SGD", options, {}, ArrivedGradients({}))


def test_each_communicator_has_buffers_of_its_own():
    parameter, agreement = torch.empty(4), make_agreement()
    first, second = LendingCommunicator(generation=1), LendingCommunicator(generation=1)
    arrive(agreement.arrange(first, [parameter]).groups[0], 0, torch.ones(4))
    old = parameter.grad
    arrive(agreement.arrange(second, [parameter]).groups[0], 0, old)
    parameter.grad.add_(1.0)
    assert first.holds(old)
    assert second.holds(parameter.grad)
    assert old.tolist() == [1.0] * 4


@pytest.mark.parametrize("fails", [False, True])
def test_gradients_move_out_of_memory_that_is_released_and_are_lost_with_a_generation(fails):
    parameters, agreement = [torch.empty(4), torch.empty(4)], make_agreement()
    communicator = LendingCommunicator(generation=1)
    bucket = agreement.arrange(communicator, parameters).groups[0]
    for position in range(2):
        arrive(bucket, position, torch.full((4,), 1.0 + position))
    first, second = bucket.parameters
    assert communicator.holds(first.grad)
    second.grad = torch.ones(4)  # not in the buffer
    if fails:
        agreement.fail(1)
        with pytest.raises(CollectiveError, match="left half-way"):
            agreement.arrange(communicator, parameters)
        assert first.grad is None
    else:
        agreement.release()
        assert first.grad.tolist() == [1.0] * 4
        assert not communicator.holds(first.grad)
        agreement.arrange(communicator, parameters)
        assert len(communicator.made) == 2
    assert second.grad is not None


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
    bucket = make_bucket(communicator, [parameter], Scaling(before=4.0))
    assert bucket.views == [None]
    gradient = torch.arange(float(parameter.numel())).view(parameter.shape).to(parameter.dtype)
    parameter.grad = None
    bucket.arrive(0, gradient)
    bucket.launch(communicator)
    bucket.wait()
    bucket.deliver([2.0])
    assert not communicator.holds(parameter.grad)
    assert torch.equal(parameter.grad, gradient / 2)
    assert parameter.grad.stride() == torch.empty_like(parameter).stride()


def test_a_view_has_the_strides_of_its_parameter():
    parameter = torch.ones(4, 3, 1, 1).to(memory_format=torch.channels_last)
    communicator = LendingCommunicator(generation=1)
    bucket = make_bucket(communicator, [torch.ones(5), parameter])
    arrive(bucket, 1, torch.arange(12.0).view(4, 3, 1, 1))
    arrive(bucket, 0, torch.ones(5))
    assert communicator.holds(parameter.grad)
    assert parameter.grad.stride() == parameter.stride()
    assert communicator.made[0][5:17].tolist() == list(range(12))


def test_complex_gradients_travel_as_pairs():
    parameter = torch.empty(2, dtype=torch.complex64)
    communicator = LendingCommunicator(generation=1)
    bucket = make_bucket(communicator, [parameter], Scaling(before=2.0), torch.complex64, 2)
    arrive(bucket, 0, torch.tensor([1j, 2.0]))
    bucket.launch(communicator, [1.0, 1.0])
    bucket.wait()
    bucket.deliver(bucket.sums[1:])
    assert communicator.lent[0] is communicator.made[0]
    assert communicator.made[0].dtype is torch.float32
    assert communicator.holds(parameter.grad)
    assert parameter.grad.tolist() == [1j, 2.0]
    assert bucket.sums == [2.0, 2.0]


def test_a_bucket_of_nothing_but_empty_gradients_has_something_to_reduce():
    parameter = torch.empty(0)
    communicator = LendingCommunicator(generation=1)
    bucket = make_bucket(communicator, [parameter])
    arrive(bucket, 0, torch.empty(0))
    bucket.launch(communicator)
    bucket.wait()
    bucket.deliver([2.0])
    assert communicator.lent[0].numel() == 1
    assert parameter.grad.numel() == 0
