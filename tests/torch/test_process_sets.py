"""N19: groups of some of the ranks are refused by name, nowhere ignored and nowhere lost."""

from __future__ import annotations

import inspect

import pytest
import torch

import nbelastic.torch as hvd
from tests.support.world import run_ranks

TAKERS = sorted(
    name
    for name in hvd.__all__
    if callable(getattr(hvd, name))
    and not isinstance(getattr(hvd, name), type)
    and "process_set" in inspect.signature(getattr(hvd, name)).parameters
)


class SomeRanks:
    """What Horovod's ``add_process_set`` would have given."""

    process_set_id = 1
    ranks = (0,)


def test_the_operations_that_take_a_set_are_found():
    assert {"DistributedOptimizer", "allgather_object", "allreduce", "barrier"} <= set(TAKERS)
    assert len(TAKERS) >= 20


@pytest.mark.parametrize("name", TAKERS)
def test_N19_every_operation_refuses_a_set_of_some_ranks(name):
    first = {
        "DistributedOptimizer": torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0),
        "broadcast_optimizer_state": torch.optim.SGD([torch.zeros(1)], lr=1.0),
        "broadcast_parameters": {},
        "grouped_allreduce": [torch.ones(1)],
        "grouped_allreduce_": [torch.ones(1)],
    }.get(name, torch.ones(1))
    arguments = {} if name == "barrier" else {0: first}
    wanted = inspect.signature(getattr(hvd, name)).parameters
    more = {"root_rank": 0} if "root_rank" in wanted else {}

    def rank_main(context):
        for some in (SomeRanks(), [0], 1):
            with pytest.raises(ValueError, match="process_set must be None or global_process_set"):
                getattr(hvd, name)(*arguments.values(), **more, process_set=some)
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 1, "nothing was sent"

    run_ranks(1, rank_main)


@pytest.mark.parametrize("arguments", [{"process_sets": [SomeRanks()]}, {"comm": [0]}])
def test_N19_init_refuses_sets(arguments):
    with pytest.raises(ValueError, match="must be None"):
        hvd.init(**arguments)


@pytest.mark.parametrize("name", ["ProcessSet", "add_process_set", "remove_process_set"])
def test_N19_there_is_nothing_to_make_a_set_with(name):
    assert not hasattr(hvd, name)


def test_N19_torchs_own_groups_are_refused_by_torch_in_a_rank():
    from torch import distributed

    def rank_main(context):
        assert not distributed.is_initialized(), "no default group that a reset would leave behind"
        with pytest.raises(ValueError, match="has not been initialized"):
            distributed.new_group([0])
        with pytest.raises(ValueError, match="has not been initialized"):
            distributed.all_reduce(torch.ones(1))

    run_ranks(2, rank_main)
