"""Accelerate, as its quick tour writes it; three lines make it elastic.

Run it with ``dask elastic run examples/trainers/with_accelerate.py``. The marked lines are new.
"""

from __future__ import annotations

import torch
from accelerate import Accelerator

import nbelastic.torch as hvd
from nbelastic.accelerate import AccelerateState


def main() -> None:
    """Train a small model on random rows."""
    accelerator = Accelerator()
    torch.manual_seed(0)
    model = torch.nn.Linear(20, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
    rows = torch.utils.data.TensorDataset(torch.randn(256, 20), torch.randn(256, 1))
    loader = torch.utils.data.DataLoader(rows, batch_size=8, shuffle=True)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    state = AccelerateState(accelerator, epoch=0)  # new

    @hvd.elastic.run  # new
    def train(state: AccelerateState) -> None:
        for state.epoch in range(state.epoch, 3):
            for inputs, targets in loader:
                optimizer.zero_grad()
                loss = torch.nn.functional.mse_loss(model(inputs), targets)
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                state.commit()  # new
            accelerator.print(f"epoch {state.epoch}: {accelerator.num_processes} ranks")

    train(state)


if __name__ == "__main__":
    main()
