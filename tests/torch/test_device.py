from __future__ import annotations

import sys
import types

import pytest
import torch

import nbelastic.torch as hvd
from nbelastic.elastic.ranks.context import LocalContext, activate


@pytest.fixture
def host(monkeypatch):
    """Pretend to be a process that sees so many GPUs."""

    def pretend(count, visible=None, dask_cuda=False):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        if visible is None:
            monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        else:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        if dask_cuda:
            monkeypatch.setitem(sys.modules, "dask_cuda", types.ModuleType("dask_cuda"))

    return pretend


def device_of(local_rank):
    context = LocalContext()
    context.local_rank = local_rank
    with activate(context):
        return str(hvd.device())


def test_without_a_gpu_it_is_the_cpu(host):
    host(0)
    assert str(hvd.device()) == "cpu"


def test_a_single_gpu_needs_no_rank(host):
    host(1)
    assert str(hvd.device()) == "cuda:0"


@pytest.mark.parametrize(
    ("count", "visible", "local_rank", "expected"),
    [
        (1, None, 3, "cuda:0"),
        (1, "2", 3, "cuda:0"),
        (4, None, 2, "cuda:2"),
        (4, "0,1,2,3", 2, "cuda:2"),
        (2, "2,3", 1, "cuda:1"),
        (2, None, 3, "cuda:1"),  # more ranks than GPUs
        (4, "1,2,3,0", 1, "cuda:0"),
        (4, "3, 0, 1, 2", 3, "cuda:0"),
        (2, "7,2", 1, "cuda:0"),
        (3, "2,0,1", 2, "cuda:0"),
        (3, "2,1,0", 2, "cuda:2"),  # somebody's own order, the same for all workers
        (2, "GPU-aa,GPU-bb", 1, "cuda:1"),
        (4, "", 2, "cuda:2"),
    ],
)
def test_a_rank_takes_its_workers_gpu_else_that_of_its_local_rank(
    host, count, visible, local_rank, expected
):
    host(count, visible)
    assert device_of(local_rank) == expected


@pytest.mark.parametrize("visible", ["0,1,2,3", "GPU-aa,GPU-bb,GPU-cc,GPU-dd"])
def test_a_dask_cuda_worker_has_its_own_first(host, visible):
    host(4, visible, dask_cuda=True)
    assert device_of(2) == "cuda:0"
