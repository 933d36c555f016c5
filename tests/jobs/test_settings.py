"""What one job sets is not there in the next, nor after a reset."""

import os

import torch

import nbelastic.torch as hvd
from tests.support.training import step_by_step


def variables():
    return os.environ.get("NCCL_DEBUG"), os.environ.get("OF_A_JOB"), os.environ["WORLD_SIZE"]


def test_a_job_gives_its_ranks_variables_and_the_next_job_has_none(crew):
    workers = sorted(crew.workers())[:2]
    env = {"NCCL_DEBUG": "INFO", "OF_A_JOB": "a=b, c"}
    given = crew.fit(variables, np=2, workers=workers, env=env)
    assert given.results() == [("INFO", "a=b, c", "2")] * 2
    assert crew.fit(variables, np=2, workers=workers).results() == [(None, None, "2")] * 2


def evaluated_when_a_peer_fails():
    hvd.init()

    def over(state):
        state.calls.append(torch.is_grad_enabled())
        if len(state.calls) == 2:
            return True
        state.commit()
        torch.set_grad_enabled(False)
        raise hvd.HorovodInternalError("a peer has failed")

    return step_by_step(over, calls=[]).calls


def test_gradients_are_enabled_again_after_a_reset(crew):
    job = crew.fit(evaluated_when_a_peer_fails, np=2)
    assert job.results() == [[True, True]] * 2


def torchs_settings():
    return (
        torch.get_default_dtype(),
        str(torch.empty(1).device),
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )


def test_torchs_settings_of_the_kernel_are_those_of_its_ranks(crew):
    plain = torchs_settings()
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    torch.set_float32_matmul_precision("high")
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        changed = torchs_settings()
        found = crew.fit(torchs_settings, np=2).results()
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
        torch.set_float32_matmul_precision("highest")
        torch.use_deterministic_algorithms(False)
    assert changed != plain
    assert found == [changed] * 2
    assert crew.fit(torchs_settings, np=2).results() == [plain] * 2
