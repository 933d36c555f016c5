"""The script that benchmarks/terminal.py starts: rank 0 notes when it begins and has made a step.

All times are of the machine's monotonic clock, which the benchmark reads, too.
"""

import time

BEGUN = time.monotonic()

import json  # noqa: E402 -- imports are timed
import sys  # noqa: E402

import torch  # noqa: E402

import nbelastic.torch as hvd  # noqa: E402

IMPORTED = time.monotonic()


@hvd.elastic.run
def train(state):
    state.model(torch.ones(4, 8)).sum().backward()
    state.optimizer.step()
    state.commit()
    return time.monotonic()


hvd.init()
model = torch.nn.Linear(8, 1)
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.01), named_parameters=model.named_parameters()
)
stepped = train(hvd.elastic.TorchState(model, optimizer))
if hvd.rank() == 0:
    with open(sys.argv[1], "w", encoding="utf-8") as out:
        json.dump({"begun": BEGUN, "imported": IMPORTED, "stepped": stepped}, out)
