"""What scripts of Horovod's import, and the rest of its interface."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path

import pytest
import torch

import nbelastic
import nbelastic.torch as hvd
from nbelastic.elastic import ObjectState, State
from nbelastic.errors import NotInitialized
from nbelastic.torch.elastic import state as registry
from tests.support.world import run_ranks

HOROVODS = {
    "Adasum",
    "Average",
    "Compression",
    "DistributedOptimizer",
    "HorovodInternalError",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "SyncBatchNorm",
    "add_process_set",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "elastic",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "poll",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "sparse_allreduce_async",
    "start_timeline",
    "stop_timeline",
    "synchronize",
}


def test_every_public_name_is_there():
    assert {*hvd.__all__} >= HOROVODS


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("mpi_ops", "synchronize"),
        ("functions", "broadcast_object"),
        ("optimizer", "DistributedOptimizer"),
        ("compression", "Compression"),
        ("sync_batch_norm", "SyncBatchNorm"),
        ("elastic.state", "TorchState"),
        ("elastic.sampler", "ElasticSampler"),
    ],
)
def test_modules_have_horovods_paths(module, name):
    assert hasattr(importlib.import_module(f"nbelastic.torch.{module}"), name)


def test_init_and_shutdown_may_be_repeated():
    def rank_main(context):
        for _ in range(2):
            hvd.init()
            assert hvd.is_initialized()
            assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 2
            hvd.shutdown()
            assert not hvd.is_initialized()
            for call in (hvd.rank, lambda: hvd.allreduce(torch.ones(1))):
                with pytest.raises(NotInitialized, match="shutdown"):
                    call()
        with pytest.raises(ValueError, match="init"):  # as in Horovod
            hvd.size()

    run_ranks(2, rank_main)


def test_states_take_horovods_arguments():
    state = State(hvd.broadcast_object, hvd.rank)
    state.on_hosts_updated(0.0, 1)
    assert ObjectState(bcast_object=hvd.broadcast_object, get_rank=hvd.rank, epoch=3).epoch == 3


def test_hosts_with_equally_many_ranks():
    assert run_ranks(2, lambda context: hvd.is_homogeneous()) == [True, True]


def test_an_optimizer_knows_the_names_of_its_parameters():
    def rank_main(context):
        net = torch.nn.Linear(2, 1)
        wrapped = hvd.DistributedOptimizer(
            torch.optim.SGD(net.parameters(), lr=0.1), net.named_parameters()
        )
        return sorted(wrapped._parameter_names.values())

    assert run_ranks(1, rank_main) == [["bias", "weight"]]


def test_state_of_a_new_optimizer_is_broadcast_with_zeros_as_gradients():
    def rank_main(context):
        net = torch.nn.Sequential(torch.nn.Embedding(3, 2, sparse=True), torch.nn.Linear(2, 1))
        optimizer = torch.optim.SGD(net.parameters(), lr=context.rank + 1.0)
        before = [parameter.detach().clone() for parameter in net.parameters()]
        hvd.broadcast_optimizer_state(optimizer, root_rank=1, model=net)
        assert all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))
        assert [parameter.grad.is_sparse for parameter in net.parameters()] == [True, False, False]
        return optimizer.param_groups[0]["lr"]

    assert run_ranks(2, rank_main) == [2.0, 2.0]


def test_a_timeline_of_all_ranks(tmp_path):
    path = tmp_path / "timeline.json"

    def rank_main(context):
        if context.rank == 0:  # ranks are threads here, and share the recording
            hvd.start_timeline(path, mark_cycles=True)
        hvd.barrier()
        hvd.allreduce(torch.ones(1), name="loss")
        hvd.allgather(torch.ones(1))
        hvd.barrier()
        if context.rank == 0:
            from nbelastic.elastic.ranks.timeline import timeline, write

            write(path, timeline.stop())
        hvd.barrier()
        assert hvd.stop_timeline() is None

    run_ranks(2, rank_main)
    events = json.loads(path.read_text())["traceEvents"]
    assert {"NEGOTIATE_ALLREDUCE", "ALLREDUCE", "ALLGATHER", "CYCLE_START"} <= {
        event["name"] for event in events
    }
    assert any(event.get("args", {}).get("name") == "allreduce.loss" for event in events)


def test_run_is_a_name_of_the_package():
    assert nbelastic.run.__name__ == "run"
    assert "run" in nbelastic.__all__


def named_in_the_table():
    """Return the names in the first column of the table in the page on Horovod's interface."""
    page = (Path(__file__).parents[2] / "docs" / "from-horovod.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| ")]
    return {name for row in rows for name in re.findall(r"`([\w.]+)", row.split(" | ")[0])}


def test_every_public_name_has_a_row_in_the_page_on_horovods_interface():
    table = named_in_the_table()
    assert {*hvd.__all__} - {"elastic"} - table == set()
    assert {*registry.__all__} - {name.removeprefix("elastic.state.") for name in table} == set()
    assert {"elastic.run", "ElasticSampler"} <= table


def test_the_page_names_nothing_that_is_not_there():
    functions = {name for name in named_in_the_table() if name.endswith(("_async", "_async_"))}
    assert functions <= {*hvd.__all__}
