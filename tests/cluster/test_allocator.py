"""How often training in a Dask worker asks the system for memory that it had before."""

import os
import platform
import subprocess
import sys

import pytest

from nbelastic.cluster import allocator
from nbelastic.cluster.allocator import steady_memory

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="there is no glibc")

MEASURE = """
import os, resource, threading
import torch
from nbelastic.cluster.allocator import steady_memory

def faults():  # pages of memory that came from the system: for a gradient of 4 MB, 1024
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        torch.ones(1 << 20)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def resident():  # pages
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1])

def rank():
    print(faults())
    with steady_memory():
        with steady_memory():
            faults()
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
    assert before > 20_000
    assert inside < 2_000
    assert left < kept - 7 * 1024


@pytest.mark.parametrize(
    "environment",
    [
        {"MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_MMAP_THRESHOLD_": "131072"},
        {"MALLOC_TRIM_THRESHOLD_": "", "MALLOC_MMAP_THRESHOLD_": "131072"},
    ],
    ids=["both were chosen", "only the other was"],
)
def test_what_somebody_has_chosen_stays(environment):
    _, inside, *_ = measured(environment)
    assert inside > 20_000


def test_without_an_environment_nothing_is_touched(monkeypatch):
    monkeypatch.delenv("MALLOC_TRIM_THRESHOLD_", raising=False)
    monkeypatch.setattr("nbelastic.cluster.allocator._glibc", lambda: pytest.fail("was asked for"))
    with steady_memory():
        pass


def users():
    return allocator._steady._users


def test_each_rank_of_a_job_runs_in_steady_memory(crew):
    crew.client.run(lambda: os.environ.update(MALLOC_TRIM_THRESHOLD_="65536"))
    try:
        assert crew.fit(users, np=2).results() == [1, 1]
        assert set(crew.client.run(users).values()) == {0}
    finally:
        crew.client.run(lambda: os.environ.pop("MALLOC_TRIM_THRESHOLD_", None))
