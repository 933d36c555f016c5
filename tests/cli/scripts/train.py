"""A training script in the shape of Horovod's elastic examples: all of it at module level.

It makes the calls of all three: the state has a schedule and a sampler, some batches only check for
changes, a metric is averaged in each epoch. With ``--broadcast`` ranks also exchange a value before
their elastic loop, so none can join later.

It trains so many epochs as ``--sizes`` has numbers. An epoch lasts until the job has that size.
Rank 0 adds a line to ``--log`` at the end of each epoch; discovery scripts of the tests read it.
"""

import argparse
import json
import os
import signal
import time

import horovod.torch as hvd
import torch
import torch.nn.functional as F
import torch.utils.data.distributed
from model import Net

parser = argparse.ArgumentParser(description="An elastic example")
parser.add_argument("--log", required=True)
parser.add_argument("--sizes", default="1", help="size of the job in each epoch")
parser.add_argument("--die", default="", help="HOW:EPOCH, HOW being raise, kill or all")
parser.add_argument("--workers", type=int, default=0)
parser.add_argument("--context", default=None)
parser.add_argument("--broadcast", action="store_true")
args = parser.parse_args()
sizes = [int(size) for size in args.sizes.split(",")]


class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        x = torch.randn(8, generator=generator)
        return x, (x.sum() > 0).long()


def run():
    hvd.init()
    torch.manual_seed(42)
    resume_from_epoch = 0
    if args.broadcast:
        resume_from_epoch = hvd.broadcast(
            torch.tensor(hvd.rank()), root_rank=0, name="resume_from_epoch"
        ).item()
    samples = Samples()
    sampler = torch.utils.data.distributed.DistributedSampler(
        samples, num_replicas=hvd.size(), rank=hvd.rank()
    )
    more = {"multiprocessing_context": args.context} if args.workers else {}
    loader = torch.utils.data.DataLoader(
        samples, batch_size=16, sampler=sampler, num_workers=args.workers, **more
    )
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * hvd.size(), momentum=0.5)
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.fp16 if hvd.nccl_built() else hvd.Compression.none,
        op=hvd.Average,
    )

    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=200)

    def on_state_reset():
        scheduler.base_lrs = [0.01 * hvd.size() for _ in scheduler.base_lrs]

    state = hvd.elastic.TorchState(
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        train_sampler=sampler,
        epoch=resume_from_epoch,
        batch=0,
    )
    state.register_reset_callbacks([on_state_reset])
    train(state, loader)
    print("trained", state.epoch, "epochs")


@hvd.elastic.run
def train(state, loader):
    while state.epoch < len(sizes):
        state.train_sampler.set_epoch(state.epoch)
        loss = torch.tensor(0.0)
        # Processes of a loader take seconds to start, so one epoch of it is enough.
        batches = iter(loader if state.epoch == 0 or not args.workers else ())
        while state.batch < 3 or hvd.size() != sizes[state.epoch]:
            data, target = next(batches, (None, None))
            if data is None:
                data, target = torch.ones(16, 8), torch.ones(16, dtype=torch.long)
            state.optimizer.zero_grad()
            loss = F.cross_entropy(state.model(data), target)
            loss.backward()
            state.optimizer.step()
            state.batch += 1
            die_if_due(state)
            time.sleep(0.01)
            if state.batch % 2:
                state.check_host_updates()
            else:
                state.commit()
        hvd.allreduce(loss.detach(), name="loss")
        if hvd.rank() == 0:
            with open(args.log, "a") as log:
                print(json.dumps({"epoch": state.epoch, "size": hvd.size()}), file=log, flush=True)
        state.scheduler.step()
        assert state.scheduler.last_epoch == state.epoch + 1
        state.epoch += 1
        state.batch = 0
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
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    raise ValueError("this rank cannot go on")


if __name__ == "__main__":
    run()
