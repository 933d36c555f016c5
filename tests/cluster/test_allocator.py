"""How often training in a Dask worker asks the system for memory that it had before.

Workers that a nanny starts give memory back at once, unless Dask is told otherwise.
"""

import os
import platform
import resource
import signal
import subprocess
import sys

import pytest
import torch
from nbelastic.cluster.worker.allocator import steady_memory

import nbelastic.torch as nbt
from nbelastic.cluster.worker import allocator

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="there is no glibc")

MEASURE = """
import os, resource, threading
import torch
from nbelastic.cluster.worker.allocator import steady_memory

def faults():  # pages of memory that came from the system: for gradients of 44 MB, 11,264
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(5):
        some = [torch.ones(1 << 20), torch.ones(10 << 20)]
        del some
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def resident():  # pages
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1])

def rank():
    print(faults())
    with steady_memory():
        with steady_memory():
            for _ in range(4):
                faults()  # until all of it lies where it fits
        print(faults())
        many = [torch.ones(1 << 20) for _ in range(8)]
        del many
        print(resident())
    print(resident())

thread = threading.Thread(target=rank)  # as Dask runs it
thread.start()
thread.join()
"""


def measured(environment):
    process = subprocess.run(
        [sys.executable, "-c", MEASURE],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return [int(line) for line in process.stdout.split()]


def test_a_rank_keeps_memory_for_its_next_step_and_gives_it_back_in_the_end():
    before, inside, kept, left = measured({"MALLOC_TRIM_THRESHOLD_": "65536"})
    assert before > 50_000
    assert inside < 2_000
    assert left < kept - 7 * 1024


@pytest.mark.parametrize(
    "environment",
    [
        {"MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_MMAP_THRESHOLD_": "131072"},
        {"MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_TOP_PAD_": "131072"},
        {"MALLOC_TRIM_THRESHOLD_": "", "MALLOC_MMAP_THRESHOLD_": "131072"},
    ],
    ids=["large blocks, too", "what is asked for, too", "large blocks only"],
)
def test_what_somebody_has_chosen_stays(environment):
    _, inside, *_ = measured(environment)
    assert inside > 50_000


def test_without_an_environment_nothing_is_touched(monkeypatch):
    monkeypatch.delenv("MALLOC_TRIM_THRESHOLD_", raising=False)
    monkeypatch.setattr(
        "nbelastic.cluster.worker.allocator._glibc", lambda: pytest.fail("was asked for")
    )
    with steady_memory():
        pass


def users():
    return allocator._steady._users


def counted():
    before = users()

    @nbt.elastic.run
    def train(state):
        return before, users()

    return train(nbt.elastic.ObjectState())


def test_each_rank_of_a_job_trains_in_steady_memory_but_is_set_up_without(crew):
    assert crew.fit(counted, np=2).results() == [(0, 1), (0, 1)]
    assert set(crew.client.run(users).values()) == {0}


PAGES = 3 * 2048 * 2048 * 4 // 4096
"""Of the gradients in `taught`."""


def taught(marks):
    nbt.init()
    model = torch.nn.Sequential(*(torch.nn.Linear(2048, 2048, bias=False) for _ in range(3)))
    optimizer = nbt.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=1e-3))
    state = nbt.elastic.TorchState(model, optimizer, whole=0)
    taken = []

    def faults():
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

    @nbt.elastic.run
    def train(state):
        while state.whole < 3:
            before = faults()
            model(torch.ones(4, 2048)).sum().backward()
            optimizer.step()
            taken.append(faults() - before)
            optimizer.zero_grad()
            if nbt.rank() == 1 and not (marks / "killed").exists():
                (marks / "killed").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            state.whole += (marks / "killed").exists() and nbt.size() == 2
            state.commit()

    train(state)
    return taken


def test_what_a_newcomer_needs_for_a_step_it_has_before_others_wait_for_it(crew, tmp_path):
    old, new = crew.fit(taught, args=[tmp_path], np=2, min_np=1).results()
    assert old[0] > 2 * PAGES  # that it is not by chance
    assert new[0] < PAGES / 2  # what Adam computes on the way alone would be more
