"""What scripts of Horovod's import, and the rest of its interface."""

import importlib
import json
import re
from pathlib import Path

import pytest
import torch

import nbelastic
import nbelastic.torch as hvd
from nbelastic.elastic import ObjectState, State
from nbelastic.elastic.ranks.context import activate
from nbelastic.errors import NotInitialized
from nbelastic.torch.elastic import state as registry
from tests.support.world import run_ranks, world_of

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


def test_init_and_shutdown_may_be_repeated():
    def rank_main(context):
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

    run_ranks(2, rank_main)


def test_states_and_optimizers_take_horovods_arguments():
    state = State(hvd.broadcast_object, hvd.rank)
    state.on_hosts_updated(0.0, 1)
    assert ObjectState(bcast_object=hvd.broadcast_object, get_rank=hvd.rank, epoch=3).epoch == 3
    assert ObjectState(hvd.broadcast_object, hvd.rank, epoch=3).epoch == 3
    with activate(world_of(0, 1)):
        net = torch.nn.Linear(2, 1)
        sgd = torch.optim.SGD(net.parameters(), lr=0.1)
        wrapped = hvd.DistributedOptimizer(sgd, net.named_parameters())
        assert sorted(wrapped._parameter_names.values()) == ["bias", "weight"]


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


def named_in_the_table():
    """Return the names in the first column of the table in the page on Horovod's interface."""
    page = (Path(__file__).parents[2] / "docs" / "from-horovod.md").read_text()
    rows = [line for line in page.partition("\n## ")[0].splitlines() if line.startswith("| ")]
    names = {name for row in rows for name in re.findall(r"`([\w.]+)", row.split(" | ")[0])}
    return {name.removeprefix("elastic.").removeprefix("state.") for name in names}


OF_OTHER_THINGS = {
    *("horovod.run", "optimizer.synchronize", "skip_synchronize", "zero_grad", "sparse_as_dense"),
    *("State.on_hosts_updated",),
}


def test_the_page_on_horovods_interface_names_what_there_is_and_no_more():
    """So that a name of Horovod's cannot be lost without a word."""
    table = named_in_the_table()
    assert {*hvd.__all__, *registry.__all__, "run", "ElasticSampler"} - {"elastic"} <= table
    there = {*hvd.__all__, *registry.__all__, *hvd.elastic.__all__}
    assert table - there == OF_OTHER_THINGS
    assert {"join", "DistributedOptimizer", "grouped_allreduce_async_"} <= table
