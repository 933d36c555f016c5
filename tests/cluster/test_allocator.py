"""How often training in a rank asks the system for memory that it had before.

Workers that a nanny starts give memory back at once, unless Dask is told otherwise, and their ranks
have their environment.
"""

import os
import platform
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="there is no glibc")

MEASURE = """
import resource
import torch
from nbelastic.cluster.worker.rank.allocator import keep_freed_memory

def faults():  # pages of memory that came from the system: for gradients of 44 MB, 11,264
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(5):
        some = [torch.ones(1 << 20), torch.ones(10 << 20)]
        del some
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

print(faults())
keep_freed_memory()
for _ in range(4):
    faults()  # until all of it lies where it fits
print(faults())
"""


def measured(environment):
    process = subprocess.run(
        [sys.executable, "-c", MEASURE],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return [int(line) for line in process.stdout.split()]


@pytest.mark.parametrize("environment", [{"MALLOC_TRIM_THRESHOLD_": "65536"}, {}])
def test_a_rank_keeps_memory_for_its_next_step(environment):
    before, inside = measured(environment)
    assert before > 50_000
    assert inside < 2_000


@pytest.mark.parametrize("name", ["MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_"])
def test_what_a_user_has_chosen_stays(name):
    _, inside = measured({"MALLOC_TRIM_THRESHOLD_": "65536", name: "131072"})
    assert inside > 50_000
