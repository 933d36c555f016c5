from __future__ import annotations

import math

import torch

from nbelastic.torch.gradients.layout import (
    BUCKET_BYTES,
    FIRST_BUCKET_BYTES,
    LARGE_BYTES,
    Manifest,
    plan_groups,
)
from nbelastic.torch.ops.compression import Compression

MEGA = 1 << 20


def tensors(*megabytes, dtype=torch.float32):
    return [torch.empty(int(size * MEGA) // dtype.itemsize, dtype=dtype) for size in megabytes]


def same(dtype):
    return dtype


def planned(parameters, order, wire_dtype=same, groups=(), in_place_bytes=LARGE_BYTES):
    manifest = Manifest(order, after_backward=False)
    return plan_groups(parameters, manifest, wire_dtype, groups, in_place_bytes)


def packed(parameters, order, wire_dtype=same, groups=()):
    plan = planned(parameters, order, wire_dtype, groups, math.inf)
    assert not any(each.in_place for each in plan)
    return [each.indices for each in plan]


def test_of_several_the_first_is_small():
    assert (FIRST_BUCKET_BYTES, BUCKET_BYTES) == (MEGA, 25 * MEGA)
    parameters = tensors(10, 10, 10, 10, 0.5, 0.5, 0.5)
    order = [6, 5, 4, 3, 2, 1, 0]
    assert packed(parameters, order) == [[6, 5], [4, 3, 2, 1], [0]]


def test_what_fits_one_bucket_is_in_one():
    assert packed(tensors(10, 10, 4, 0.5, 0.5), [4, 3, 2, 1, 0]) == [[4, 3, 2, 1, 0]]


def test_a_bucket_has_one_type_on_the_wire():
    parameters = [*tensors(1, 1), *tensors(1, 1, dtype=torch.float64)]
    order = [0, 2, 1, 3]
    assert packed(parameters, order) == [[0, 1], [2, 3]]
    assert packed(parameters, order, Compression.fp16.wire_dtype) == [order]


def test_buckets_are_ordered_by_when_they_are_full():
    parameters = tensors(0.1, 20, 20)
    parameters[0] = parameters[0].double()
    assert packed(parameters, [0, 1, 2]) == [[0], [1], [2]]
    assert packed(parameters, [1, 0, 2], groups=[[0, 2]]) == [[1], [0], [2]]
    single = tensors(0.1, 20, 20)
    assert packed(single, [0, 1, 2], groups=[[0, 2]]) == [[1], [0, 2]]


def test_groups_have_any_size():
    parameters = tensors(30, 30, 0.1, 0.1)
    assert packed(parameters, [3, 2, 1, 0], groups=[[3], [0, 1]]) == [[3], [2], [1, 0]]


def test_a_large_gradient_is_by_itself():
    parameters = tensors(8, 1, 7, 1, 30)
    plan = planned(parameters, [4, 3, 2, 1, 0])
    assert LARGE_BYTES == 8 * MEGA
    assert [tuple(each) for each in plan] == [([4], True), ([0], True), ([3, 2, 1], False)]


def test_what_all_share_comes_last_even_if_all_are_large():
    assert planned(tensors(8, 8), [1, 0])[-1] == ([], False)
    plan = planned(tensors(20, 10, 20, 7), [3, 2, 1, 0], groups=[[0, 2]])
    assert [tuple(each) for each in plan] == [([3], False), ([1], True), ([2, 0], False)]


def test_where_many_are_reduced_at_once_they_share_groups_wherever_they_are():
    parameters = tensors(5, 0.01, 5, 4, 0.01)
    plan = planned(parameters, [4, 3, 2, 1, 0], in_place_bytes=MEGA)
    assert [tuple(each) for each in plan] == [([3, 2], True), ([0], True), ([4, 1], False)]


def test_what_is_changed_on_the_wire_or_is_elsewhere_is_not_large():
    parameters = tensors(20)
    assert not planned(parameters, [0], Compression.fp16.wire_dtype)[0].in_place
    on_device = [torch.empty(20 * MEGA, device="meta")]
    assert not planned(on_device, [0])[0].in_place
    assert not planned([torch.empty(20 * MEGA, dtype=torch.complex64)], [0])[0].in_place
