"""A rank that forks, and goes on in both processes; a rank with two threads."""

from __future__ import annotations

import pytest


def forks_and_goes_on(how):
    import os
    import warnings

    import torch

    import nbelastic.torch as hvd

    torch.set_num_threads(1)
    torch.manual_seed(hvd.rank())
    model = torch.nn.Linear(4, 1)
    hvd.broadcast_parameters(model.state_dict())
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, step=0, child=0)

    @hvd.elastic.run
    def loop(state):
        while state.step < 12:
            if state.step == 4 and hvd.rank() == 0 and not state.child:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    state.child = os.fork()
                if state.child == 0 and how == "operation":
                    hvd.allreduce(torch.ones(4))
            if state.child == 0 and state.step == 4 and hvd.rank() == 0:
                state.child = -1  # the fork, which goes on
            optimizer.zero_grad()
            model(torch.full((2, 4), float(hvd.rank()))).sum().backward()
            optimizer.step()
            state.step += 1
            state.commit()

    loop(state)
    status = 0
    if state.child > 0:
        status = os.waitstatus_to_exitcode(os.waitpid(state.child, 0)[1])
    return [p.tolist() for p in model.parameters()], status


@pytest.mark.parametrize("backend", ["shm", "gloo"])
@pytest.mark.parametrize("how", ["operation", "training"])
def test_a_fork_that_goes_on_ends_by_an_error_and_costs_nothing(crew, how, backend):
    job = crew.fit(forks_and_goes_on, args=(how,), np=2, backend=backend, block=False)
    (first, status), (second, _) = job.results(60)
    assert first == second
    assert status == 1
    assert job.status.resets == 0
    assert len(crew.workers()) == 4
