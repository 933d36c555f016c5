"""Lightning, as its documentation writes it; two lines make it elastic.

Run it with ``dask elastic run examples/trainers/with_lightning.py``. The marked lines are new.
"""

from __future__ import annotations

import lightning
import torch

import nbelastic.lightning


class Regression(lightning.LightningModule):
    """A linear model."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(20, 1)

    def training_step(self, batch: list[torch.Tensor], number: int) -> torch.Tensor:
        """Return the loss of a batch."""
        del number
        inputs, targets = batch
        loss = torch.nn.functional.mse_loss(self.layer(inputs), targets)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.SGD(self.parameters(), lr=0.01)


def main() -> None:
    """Train on random rows."""
    torch.manual_seed(0)
    rows = torch.utils.data.TensorDataset(torch.randn(256, 20), torch.randn(256, 1))
    loader = torch.utils.data.DataLoader(rows, batch_size=8, shuffle=True)
    trainer = lightning.Trainer(max_epochs=2, strategy="nbelastic", logger=False)  # new
    nbelastic.lightning.fit(trainer, Regression(), loader)  # was trainer.fit(…)


if __name__ == "__main__":
    main()
