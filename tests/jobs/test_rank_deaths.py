"""A rank whose process dies is back, its worker keeps what it holds, and the cause is known."""

import ctypes
import io
import os
import signal

import pytest

import nbelastic.torch as hvd
from nbelastic.cluster.worker import rank_process
from tests.support.clusters import kinds, sizes
from tests.support.training import once, step_by_step


def train(mark):
    """Take thirty steps; rank 1 dies in the sixth, once."""

    def over(state):
        if state.step == 5 and hvd.rank() == 1 and once(mark):
            ctypes.string_at(0)
        return state.step >= (30 if hvd.size() == 4 else 3000)

    return step_by_step(over).step


def test_a_rank_dies_alone_and_is_back(crew, tmp_path):
    cause = "killed by signal 11 (SIGSEGV)"
    workers = crew.workers()
    held = {
        address: crew.client.submit(bytes, 1000, workers=[address], pure=False)
        for address in workers
    }
    crew.client.gather(list(held.values()))
    job = crew.fit(train, args=[tmp_path / "mark"], np=4)
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


@pytest.mark.parametrize(
    ("own", "file"),
    [
        ("0::/ours", "/sys/fs/cgroup/ours/memory.events"),
        ("0::/outside", "/sys/fs/cgroup/memory.events"),
        ("5:cpu:/\n4:memory:/ours", "/sys/fs/cgroup/memory/ours/memory.oom_control"),
    ],
)
def test_a_rank_killed_for_its_memory_is_told_apart(monkeypatch, own, file):
    files = {"/proc/self/cgroup": f"{own}\n", file: "oom 3\noom_kill 2\n"}

    def opened(path):
        if os.path.normpath(path) in files:
            return io.StringIO(files[os.path.normpath(path)])
        raise FileNotFoundError

    monkeypatch.setattr(rank_process, "open", opened, raising=False)
    assert rank_process.out_of_memory_kills() == 2
    for status in (signal.SIGKILL, signal.SIGTERM):
        end = rank_process.ProcessExit(int(status), out_of_memory=True)
        assert ("killed by the system: out of memory" in str(end)) == (status == signal.SIGKILL)
