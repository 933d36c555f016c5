"""What scripts of Horovod's import and find: modules, answers, devices, variables, a timeline."""

import contextlib
import importlib
import json
import logging
import os
import re
import sys
import types
from pathlib import Path
from unittest import mock

import pytest
import torch

import nbelastic
import nbelastic.torch as hvd
from nbelastic.cluster.worker.rank.main import keep_variables
from nbelastic.elastic import ObjectState, State
from nbelastic.elastic.ranks.context import Context, activate
from nbelastic.elastic.ranks.runtime import DASK_CUDA
from nbelastic.elastic.ranks.timeline import timeline, write
from nbelastic.errors import NotInitialized
from nbelastic.torch import environment
from nbelastic.torch.elastic import state as registry
from nbelastic.torch.gradients import layout
from tests.torch.ranks import on_ranks

MODULES = {
    "mpi_ops": "synchronize",
    "functions": "broadcast_object",
    "optimizer": "DistributedOptimizer",
    "compression": "Compression",
    "sync_batch_norm": "SyncBatchNorm",
    "elastic.state": "TorchState",
    "elastic.sampler": "ElasticSampler",
}
FALSE = ("mpi_threads_supported", "mpi_enabled", "mpi_built", "ddl_built", "ccl_built")
ANSWERS = {
    **dict.fromkeys(FALSE, False),
    **dict.fromkeys(("gloo_enabled", "gloo_built"), True),
    "cuda_built": torch.version.cuda is not None,
    "rocm_built": torch.version.hip is not None,
}


def test_modules_have_horovods_paths_and_questions_are_answered_without_init():
    for module, name in MODULES.items():
        assert hasattr(importlib.import_module(f"nbelastic.torch.{module}"), name)
    assert {*ANSWERS} <= {*hvd.__all__}
    assert {name: getattr(hvd, name)() for name in ANSWERS} == ANSWERS
    assert nbelastic.run.__name__ == "run"
    assert "run" in nbelastic.__all__


@pytest.mark.parametrize("missing", [None, "NCCL", "GPU"])
def test_nccl_is_what_a_job_here_would_use(monkeypatch, missing):
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: missing != "NCCL")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: missing != "GPU")
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 21, 5))
    assert hvd.nccl_built() == (22105 if missing is None else 0)


@on_ranks(2)
def test_init_and_shutdown_may_be_repeated(context):
    for _ in range(2):
        hvd.init()
        assert hvd.is_initialized()
        assert hvd.is_homogeneous()
        assert (hvd.rank(), hvd.size()) == (context.rank, 2)
        assert (hvd.local_rank(), hvd.local_size()) == (context.rank, 2)
        assert (hvd.cross_rank(), hvd.cross_size()) == (0, 1)
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 2
        hvd.shutdown()
        assert not hvd.is_initialized()
        for call in (hvd.rank, lambda: hvd.allreduce(torch.ones(1))):
            with pytest.raises(NotInitialized, match="shutdown"):
                call()
    with pytest.raises(ValueError, match="init"):  # as in Horovod
        hvd.size()


@pytest.mark.usefixtures("alone")
def test_states_and_optimizers_take_horovods_arguments():
    state = State(hvd.broadcast_object, hvd.rank)
    state.on_hosts_updated(0.0, 1)
    assert ObjectState(bcast_object=hvd.broadcast_object, get_rank=hvd.rank, epoch=3).epoch == 3
    assert ObjectState(hvd.broadcast_object, hvd.rank, epoch=3).epoch == 3


@on_ranks(2)
def test_a_timeline_of_all_ranks(context, tmp_path):
    path = tmp_path / "timeline.json"
    if context.rank == 0:  # ranks are threads here, and share the recording
        hvd.start_timeline(path, mark_cycles=True)
    hvd.barrier()
    hvd.allreduce(torch.ones(1), name="loss")
    hvd.allgather(torch.ones(1))
    hvd.barrier()
    if context.rank == 0:
        write(path, timeline.stop())
        events = json.loads(path.read_text())["traceEvents"]
        found = {event["name"] for event in events}
        assert {"NEGOTIATE_ALLREDUCE", "ALLREDUCE", "ALLGATHER", "CYCLE_START"} <= found
        assert any(event.get("args", {}).get("name") == "allreduce.loss" for event in events)
    hvd.barrier()
    assert hvd.stop_timeline() is None


OF_OTHER_THINGS = {
    *("horovod.run", "optimizer.synchronize", "skip_synchronize", "zero_grad", "sparse_as_dense"),
    *("State.on_hosts_updated",),
}


def test_the_page_on_horovods_interface_names_what_there_is_and_no_more():
    """So that a name of Horovod's cannot be lost without a word."""
    page = (Path(__file__).parents[2] / "docs" / "from-horovod.md").read_text()
    rows = [line for line in page.partition("\n## ")[0].splitlines() if line.startswith("| ")]
    names = {name for row in rows for name in re.findall(r"`([\w.]+)", row.split(" | ")[0])}
    table = {name.removeprefix("elastic.").removeprefix("state.") for name in names}
    assert {*hvd.__all__, *registry.__all__, "run", "ElasticSampler"} - {"elastic"} <= table
    there = {*hvd.__all__, *registry.__all__, *hvd.elastic.__all__}
    assert table - there == OF_OTHER_THINGS
    assert {"join", "DistributedOptimizer", "grouped_allreduce_async_"} <= table


def test_horovods_variables_of_ranks_are_read(alone, monkeypatch):
    logger = logging.getLogger("nbelastic")
    level = logger.level
    monkeypatch.setenv("HOROVOD_LOG_LEVEL", "ERROR")
    environment.set_log_level.cache_clear()
    try:
        hvd.init()
        assert logger.level == logging.ERROR
    finally:
        logger.setLevel(level)
    for text, size in (("1048576", 1 << 20), ("64MB", layout.BUCKET_BYTES)):
        monkeypatch.setenv("HOROVOD_FUSION_THRESHOLD", text)
        assert layout.fusion_threshold() == size


# -- devices ---------------------------------------------------------------------------------------


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
        (3, "2,0,1", 2, "cuda:2"),  # somebody's own order, the same for all workers
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


@mock.patch.dict(os.environ)
@pytest.mark.parametrize("own", range(4))
def test_accelerate_is_told_the_gpu_of_a_dask_cuda_worker(host, own):
    """The worker has loaded dask-cuda, the rank's own process has not."""
    os.environ.pop("ACCELERATE_TORCH_DEVICE", None)
    host(4, "0,1,2,3")
    keep_variables(Context())
    assert "ACCELERATE_TORCH_DEVICE" not in os.environ, "workers share GPUs"
    os.environ[DASK_CUDA] = "1"
    host(4, ",".join(str((own + n) % 4) for n in range(4)))
    context = Context()
    context.local_rank = own
    with activate(context):
        keep_variables(context)
        assert str(hvd.device()) == os.environ["ACCELERATE_TORCH_DEVICE"] == "cuda:0"
    os.environ["ACCELERATE_TORCH_DEVICE"] = "cuda:3"  # the user's own choice
    keep_variables(context)
    assert os.environ["ACCELERATE_TORCH_DEVICE"] == "cuda:3"
