"""DistributedDataParallel, as PyTorch's tutorial writes it; three lines make it elastic.

Run it with ``dask elastic run examples/trainers/ddp.py``. The marked lines are new.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import nbelastic.torch as hvd


def main() -> None:
    """Train a small model on random rows."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(20, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    rows = torch.utils.data.TensorDataset(torch.randn(256, 20), torch.randn(256, 1))
    sampler = hvd.elastic.ElasticSampler(rows)  # was DistributedSampler
    loader = torch.utils.data.DataLoader(rows, batch_size=8, sampler=sampler)
    state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0)  # new

    @hvd.elastic.run  # new
    def train(state: hvd.elastic.TorchState) -> None:
        for state.epoch in range(state.epoch, 3):
            for number, (inputs, targets) in enumerate(loader):
                optimizer.zero_grad()
                loss = torch.nn.functional.mse_loss(model(inputs), targets)
                loss.backward()
                optimizer.step()
                sampler.record_batch(number, 8)
                state.commit()
            sampler.set_epoch(state.epoch + 1)
            print(f"epoch {state.epoch}: rank {dist.get_rank()} of {dist.get_world_size()}")

    train(state)


if __name__ == "__main__":
    main()
