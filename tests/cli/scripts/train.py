"""A training script in the shape of Horovod's elastic examples: all of it at module level.

It trains so many epochs as ``--sizes`` has numbers. An epoch lasts until the job has that size.
Rank 0 adds a line to ``--log`` for each epoch that is committed; discovery scripts of the tests
read it. With ``--broadcast`` ranks also exchange a value before their elastic loop, so none can
join later. There is no optimizer: the first one of a process imports a compiler, for seconds.
"""

import argparse
import os
import time

import horovod.torch as hvd
import torch
from record import note

parser = argparse.ArgumentParser(description="An elastic example")
parser.add_argument("--log", required=True)
parser.add_argument("--sizes", default="1", help="size of the job in each epoch")
parser.add_argument("--die", default="", help="HOW:EPOCH, HOW being raise or all")
parser.add_argument("--broadcast", action="store_true")
args = parser.parse_args()
sizes = [int(size) for size in args.sizes.split(",")]


@hvd.elastic.run
def train(state):
    while True:
        if hvd.rank() == 0 and state.epoch > 0:
            note(args.log, state.epoch - 1, state.size)
        if state.epoch == len(sizes):
            return
        while state.batch < 3 or hvd.size() != sizes[state.epoch]:
            loss = hvd.allreduce(torch.ones(4), name="loss")
            assert loss.tolist() == [1.0] * 4
            state.batch += 1
            die_if_due(state)
            time.sleep(0.01)
            if state.batch % 2:
                state.check_host_updates()
            else:
                state.commit()
        state.epoch, state.batch, state.size = state.epoch + 1, 0, hvd.size()
        state.commit()


def die_if_due(state):
    how, _, epoch = args.die.partition(":")
    if not how or state.epoch != int(epoch) or state.batch != 2:
        return
    if how == "all":
        raise ValueError("no rank can go on")
    if hvd.rank() != hvd.size() - 1:
        return
    try:
        os.close(os.open(args.log + ".died", os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return
    raise ValueError("this rank cannot go on")


hvd.init()
first = 0
if args.broadcast:
    first = hvd.broadcast(torch.tensor(hvd.rank()), root_rank=0, name="first").item()
train(hvd.elastic.ObjectState(epoch=first, batch=0, size=0))
print("trained", len(sizes), "epochs")
