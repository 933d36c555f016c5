import pytest
import torch

from nbelastic.torch.compression import Compression
from nbelastic.torch.gradients.layout import (
    BUCKET_BYTES,
    FIRST_BUCKET_BYTES,
    Manifest,
    plan_buckets,
)

MEGA = 1 << 20
ORDER = [6, 5, 4, 3, 2, 1, 0]


def tensors(*megabytes, dtype=torch.float32):
    return [torch.empty(int(size * MEGA) // dtype.itemsize, dtype=dtype) for size in megabytes]


MIXED = [*tensors(1, 1), *tensors(1, 1, dtype=torch.float64)]
LATE = [*tensors(0.1, dtype=torch.float64), *tensors(20, 20)]


@pytest.mark.parametrize(
    ("parameters", "order", "groups", "compression", "expected"),
    [
        # Of several, the first is small.
        (tensors(10, 10, 10, 10, *[0.5] * 3), ORDER, [], "none", [[6, 5], [4, 3, 2, 1], [0]]),
        # A bucket has one type on the wire.
        (MIXED, [0, 2, 1, 3], [], "none", [[0, 1], [2, 3]]),
        (MIXED, [0, 2, 1, 3], [], "fp16", [[0, 2, 1, 3]]),
        # Buckets are in the order in which they are full.
        (LATE, [0, 1, 2], [], "none", [[0], [1], [2]]),
        (LATE, [1, 0, 2], [[0, 2]], "none", [[1], [0], [2]]),
        (tensors(0.1, 20, 20), [0, 1, 2], [[0, 2]], "none", [[1], [0, 2]]),
        # The trailer of no parameter needs one, too.
        ([], [], [], "none", [[]]),
    ],
)
def test_parameters_in_buckets(parameters, order, groups, compression, expected):
    assert (FIRST_BUCKET_BYTES, BUCKET_BYTES) == (MEGA, 25 * MEGA)
    manifest = Manifest(order, after_backward=False)
    wire_dtype = getattr(Compression, compression).wire_dtype
    assert plan_buckets(parameters, manifest, wire_dtype, groups) == expected
