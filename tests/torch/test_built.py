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
        ("ddl_built", False),
        ("ccl_built", False),
        ("cuda_built", torch.version.cuda is not None),
        ("rocm_built", torch.version.hip is not None),
    ],
)
def test_questions_are_answered_without_init(name, answer):
    assert name in hvd.__all__
    assert getattr(hvd, name)() is answer


@pytest.mark.parametrize("missing", [None, "NCCL", "GPU"])
def test_nccl_is_what_a_job_here_would_use(monkeypatch, missing):
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: missing != "NCCL")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: missing != "GPU")
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 21, 5))
    assert hvd.nccl_built() == (22105 if missing is None else 0)


def test_nccl_is_not_built_without_a_gpu():
    """As it is, and in any process: a job on a machine without GPUs does not use it."""
    if not torch.cuda.is_available():
        assert hvd.nccl_built() == 0
