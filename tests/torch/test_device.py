import contextlib
import os
import sys
import types

import pytest
import torch

import nbelastic.torch as hvd
from nbelastic.cluster.worker.rank.main import keep_variables
from nbelastic.elastic.ranks.context import Context, activate
from nbelastic.elastic.ranks.runtime import DASK_CUDA
from nbelastic.torch.device import what_would_fit


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


@pytest.mark.parametrize(
    ("count", "visible", "local_rank", "expected"),
    [
        (0, None, 3, "cpu"),
        (1, None, None, "cuda:0"),  # which needs no rank
        (4, "0,1,2,3", 2, "cuda:2"),
        (2, None, 3, "cuda:1"),  # more ranks than GPUs
        (4, "3, 0, 1, 2", 3, "cuda:0"),
        (3, "2,1,0", 2, "cuda:2"),  # somebody's own order, the same for all workers
        (2, "GPU-aa,GPU-bb", 1, "cuda:1"),
        (4, "", 2, "cuda:2"),
        # A worker of dask-cuda has its own first.
        (4, "GPU-aa,GPU-bb,GPU-cc,GPU-dd", 2, "dask-cuda: cuda:0"),
    ],
)
def test_a_rank_takes_its_workers_gpu_else_that_of_its_local_rank(
    host, count, visible, local_rank, expected
):
    of_dask, _, chosen = expected.rpartition(": ")
    host(count, visible, dask_cuda=bool(of_dask))
    context = Context()
    context.local_rank = local_rank
    with activate(context) if local_rank is not None else contextlib.nullcontext():
        assert str(hvd.device()) == chosen


@pytest.mark.parametrize("own", range(4))
def test_accelerate_is_told_the_gpu_of_a_dask_cuda_worker(host, monkeypatch, own):
    """The worker has loaded dask-cuda, the rank's own process has not."""
    names = "ACCELERATE_TORCH_DEVICE", "MASTER_ADDR", "RANK", "WORLD_SIZE"
    for name in (*names, "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "")  # so that it is restored
        del os.environ[name]
    host(4, "0,1,2,3")
    keep_variables(Context())
    assert "ACCELERATE_TORCH_DEVICE" not in os.environ, "workers share GPUs"
    monkeypatch.setenv(DASK_CUDA, "1")
    host(4, ",".join(str((own + n) % 4) for n in range(4)))
    context = Context()
    context.local_rank = own
    with activate(context):
        keep_variables(context)
        assert hvd.device() == torch.device(os.environ["ACCELERATE_TORCH_DEVICE"]) == CUDA_0
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", "cuda:3")  # the user's own choice
    keep_variables(context)
    assert os.environ["ACCELERATE_TORCH_DEVICE"] == "cuda:3"


CUDA_0 = torch.device("cuda", 0)


def test_what_would_have_fitted_is_said_of_a_batch_beside_the_state(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1 << 30, 80 << 30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 75 << 30)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 74 << 30)
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 16.00 GiB. GPU 0 has …")
    said = what_would_fit(error, 26 << 30)
    assert said.startswith("\nAt most 78% of the batch would have fitted: it needed more than 64.0")
    assert what_would_fit(torch.OutOfMemoryError("all is full"), 0) == ""
