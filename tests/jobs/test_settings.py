"""What one job sets is not there in the next, nor after a reset."""

from __future__ import annotations


def read():
    import decimal
    import os

    import torch

    return {
        "directory": os.getcwd(),
        "variable": os.environ.get("OF_A_JOB"),
        "gradients": torch.is_grad_enabled(),
        "type": torch.get_default_dtype(),
        "device": torch.get_default_device(),
        "decimals": decimal.getcontext().prec,
    }


def unsettle():
    import decimal
    import os

    import torch

    before = read()
    os.chdir("/")
    os.environ["OF_A_JOB"] = "1"
    torch.set_grad_enabled(False)
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    decimal.getcontext().prec = 5
    return before


def test_a_job_finds_the_workers_as_they_were(crew):
    workers = sorted(crew.workers())[:2]
    first = crew.fit(unsettle, np=2, workers=workers)
    second = crew.fit(read, np=2, workers=workers)
    assert second.results() == first.results()


def evaluated_when_a_peer_fails():
    import torch

    import nbelastic.torch as hvd

    hvd.init()
    state = hvd.elastic.ObjectState(calls=[])

    @hvd.elastic.run
    def train(state):
        state.calls.append((torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")))
        state.commit()
        if len(state.calls) == 1:
            torch.set_grad_enabled(False)
            torch.set_autocast_enabled("cpu", True)
            raise hvd.HorovodInternalError("a peer has failed")
        return state.calls

    return train(state)


def test_gradients_are_enabled_again_after_a_reset(crew):
    job = crew.fit(evaluated_when_a_peer_fails, np=2)
    assert job.results() == [[(True, False), (True, False)]] * 2
