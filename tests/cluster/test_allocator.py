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
from nbelastic.cluster.worker.rank.main import keep_freed_memory

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


def measured(environment, code=MEASURE, *arguments):
    process = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return [int(line) for line in process.stdout.split()]


def test_a_rank_keeps_memory_for_its_next_step():
    before, inside = measured({"MALLOC_TRIM_THRESHOLD_": "65536"})
    assert before > 50_000
    assert inside < 2_000


def test_what_a_user_has_chosen_stays():
    _, inside = measured({"MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_TOP_PAD_": "131072"})
    assert inside > 50_000


FIRST_STEP = """
import os, resource, sys
import torch
import nbelastic.torch as hvd
from nbelastic.cluster.worker.rank.main import keep_freed_memory

hvd.init()
small = [bytearray(n % 5000) for n in range(50_000)]  # as code before the loop leaves them
model = torch.nn.Sequential(*(torch.nn.Linear(2048, 2048, bias=False) for _ in range(3)))
optimizer = torch.optim.Adam(model.parameters())
state = hvd.elastic.TorchState(model, optimizer)
for parameter in model.parameters():  # as if received
    entry = optimizer.state[parameter]
    entry["step"] = torch.tensor(1.0)
    entry["exp_avg"], entry["exp_avg_sq"] = torch.ones(2, *parameter.shape)
keep_freed_memory(state._step_bytes() if sys.argv[1:] else 0)
del small[::2]
more = [bytearray(n % 6000) for n in range(1_000)]  # as code after it takes them
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
model(torch.ones(4, 2048)).sum().backward()
optimizer.step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
os._exit(0 if sys.stdout.flush() is None else 1)
"""


def test_a_newcomer_has_the_memory_of_its_first_step_before_others_wait_for_it():
    pages = 3 * 2048 * 2048 * 4 // 4096  # of the gradients
    old, new = (measured({}, FIRST_STEP, *more)[0] for more in ((), ("now",)))
    assert old > pages  # that it is not by chance
    assert new < pages / 2  # first touches of libraries are in it
