"""What Horovod's scripts ask of the package before they begin."""

from __future__ import annotations

import pytest
import torch

import nbelastic.torch as hvd


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("mpi_threads_supported", False),
        ("mpi_enabled", False),
        ("mpi_built", False),
        ("gloo_enabled", True),
        ("gloo_built", True),
        ("nccl_built", 0),
        ("ddl_built", False),
        ("ccl_built", False),
        ("cuda_built", torch.version.cuda is not None),
        ("rocm_built", torch.version.hip is not None),
    ],
)
def test_questions_are_answered_without_init(name, answer):
    assert name in hvd.__all__
    assert getattr(hvd, name)() is answer
