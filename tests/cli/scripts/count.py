"""A script that counts, in the place of ``train.py``, where ranks start from nothing.

The first optimizer of a process imports a compiler, which takes seconds, and here there is none.
Options and log are those of ``train.py``.
"""

import argparse
import json
import time

import horovod.torch as hvd
import model  # noqa: F401 -- it has travelled, too

parser = argparse.ArgumentParser()
parser.add_argument("--log", required=True)
parser.add_argument("--sizes", required=True)
args = parser.parse_args()
sizes = [int(size) for size in args.sizes.split(",")]


@hvd.elastic.run
def count(state):
    while True:
        note(state.epoch - 1, state.size)
        if state.epoch == len(sizes):
            return
        while hvd.size() != sizes[state.epoch]:
            time.sleep(0.01)
            state.commit()
        state.epoch, state.size = state.epoch + 1, hvd.size()
        state.commit()


def note(epoch, size):
    """Write a line about an epoch that all ranks have committed, once."""
    if hvd.rank() == 0 and epoch >= 0:
        with open(args.log, "a+") as log:
            log.seek(0)
            if epoch not in [json.loads(line)["epoch"] for line in log]:
                print(json.dumps({"epoch": epoch, "size": size}), file=log, flush=True)


hvd.init()
count(hvd.elastic.ObjectState(epoch=0, size=0))
