"""A rank whose process dies is back, its worker keeps what it holds, and the cause is known."""

import os
from pathlib import Path

import dask
import pytest

from nbelastic.driver import explain_journal
from tests.support.cgroups import limit_memory, remove_group
from tests.support.clusters import a_crew, kinds, sizes


def segfault():
    import ctypes

    ctypes.string_at(0)


def fill_memory():
    taken = []
    while True:
        taken.append(bytearray(os.urandom(1 << 20) * 16))


def train(die, mark):
    """Sum for thirty steps; rank 1 dies in the sixth, once."""
    import torch

    import nbelastic.torch as hvd

    hvd.init()

    @hvd.elastic.run
    def loop(state):
        while state.step < 30 or (hvd.size() < 4 and state.step < 3000):
            if state.step == 5 and hvd.rank() == 1 and not os.path.exists(mark):
                Path(mark).touch()
                die()
            state.total += hvd.allreduce(torch.ones(1), op=hvd.Average).item()
            state.step += 1
            state.commit()
        return state.step, state.total

    return loop(hvd.elastic.ObjectState(step=0, total=0.0))


def _whole_again(crew, die, cause, mark):
    """Run the job; the dead rank's worker keeps what it holds, and its rank is back."""
    workers = crew.workers()
    held = {
        address: crew.client.submit(bytes, 1000, workers=[address], pure=False)
        for address in workers
    }
    crew.client.gather(list(held.values()))
    job = crew.fit(train, args=(die, str(mark)), np=4)
    assert job.results() == [(steps, float(steps)) for steps, _ in job.results()]
    assert sizes(job)[-1] == 4
    # Its neighbours may report its end before its agent does, or after.
    died = next(e for e in job.history if e.kind in ("died", "lost") and cause in e.detail)
    assert died.rank == 1
    assert cause in job.why(rank=1)
    assert "seen by the agent of rank 1 on " in job.why(rank=1)
    assert "restarted" not in kinds(job)
    assert crew.workers() == workers
    for address, future in held.items():
        assert crew.client.who_has([future])[future.key] == (address,)


def test_a_rank_dies_alone_and_is_back(crew, tmp_path):
    cause = "killed by signal 11 (SIGSEGV), at "
    with dask.config.set({"nbelastic.debug.journal": str(tmp_path / "journals")}):
        _whole_again(crew, segfault, cause, tmp_path / "mark")
    (path,) = (tmp_path / "journals").iterdir()
    assert cause in explain_journal(path, rank=1), "the journal comes to the same decisions"


@pytest.mark.nightly
def test_a_rank_out_of_memory_dies_alone_and_is_told_apart(tmp_path):
    """Each worker and all that it starts may use a gigabyte."""
    name = f"nbelastic-test-{os.getpid()}"
    with a_crew(n_workers=4) as crew:
        try:
            for number, address in enumerate(crew.workers()):
                found = crew.client.run(
                    limit_memory, f"{name}-{number}", 1 << 30, workers=[address]
                )
                if found[address]:
                    pytest.skip(found[address])
            cause = "killed by the system: out of memory"
            _whole_again(crew, fill_memory, cause, tmp_path / "mark")
        finally:
            for number in range(4):
                remove_group(f"{name}-{number}")
