"""Lightning: ranks that are killed in a validation, files, averages, checkpoints of a step."""

import os

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from tests.trainers.functions import await_change, die_once, numbered

ROWS, BATCH, EPOCHS = 24, 4, 4


def trainer_of(callbacks=(), **options):
    """Return a Trainer of Lightning's that shows nothing."""
    import lightning

    import nbelastic.lightning  # noqa: F401 - the strategy

    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return lightning.Trainer(
        strategy="nbelastic",
        accelerator="cpu",
        log_every_n_steps=1,
        callbacks=[*callbacks],
        **quiet | options,
    )


def parts(directory, averaging, joins=()):
    """Return a module, a data module, a trainer's callbacks and loader, on a rank."""
    import lightning
    import torchmetrics
    from lightning.pytorch.callbacks import (
        ModelCheckpoint,
        StochasticWeightAveraging,
        WeightAveraging,
    )

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = torch.nn.Linear(1, 1)
            self.rows = []
            self.counted = torchmetrics.SumMetric()

        def training_step(self, batch, number):
            rows = batch[0].float().view(-1, 1)
            if self.current_epoch in joins:
                await_change(1)  # another is about to join
            self.rows = [*self.rows, *batch[0].tolist()]
            self.log("trained", float(len(rows)), on_step=False, on_epoch=True, reduce_fx="sum",
                     sync_dist=True)  # fmt: skip
            self.counted.update(len(rows))
            self.log("counted", self.counted, on_step=False, on_epoch=True)
            return self.net(rows / ROWS).pow(2).mean()

        def end_at(self, *at):
            """Kill this rank, if it is the one and the epoch is due, once."""
            may_end = joins and dist.get_world_size() == 2 and not self.trainer.sanity_checking
            if may_end and (dist.get_rank(), self.current_epoch) == at:
                die_once(f"{directory}/{at}")

        def validation_step(self, batch, number):
            if number == 1:
                self.end_at(1, 0)
            self.log("value", batch[0].float().mean(), sync_dist=True)
            self.log("number", float(self.current_epoch), sync_dist=True)
            self.log("size", float(dist.get_world_size()), sync_dist=True)

        def test_step(self, batch, number):
            self.log("weight", self.net.weight.sum(), sync_dist=True)

        def on_validation_end(self):
            self.end_at(0, 2)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    class Data(lightning.LightningDataModule):
        epochs = 0

        def train_dataloader(self):
            return DataLoader(rows, BATCH, shuffle=True)

        def val_dataloader(self):
            return DataLoader(rows, BATCH)

        test_dataloader = val_dataloader

        def state_dict(self):
            return {"epochs": self.epochs}

        def load_state_dict(self, state):
            self.epochs = state["epochs"]

    class Watch(lightning.Callback):
        def __init__(self):
            self.found = []

        def on_train_epoch_end(self, trainer, module):
            trainer.datamodule.epochs += 1

        def on_train_epoch_start(self, trainer, module):
            values = trainer.callback_metrics
            self.found = [*self.found, {name: float(values[name]) for name in sorted(values)}]

    rows = numbered(ROWS)
    if averaging:
        average = StochasticWeightAveraging(0.5, swa_epoch_start=1, annealing_epochs=2)
    else:
        average = WeightAveraging()
    files = ModelCheckpoint(f"{directory}/models", monitor="number", mode="max", save_last=True,
                            save_top_k=2, filename="{step}-{size}",
                            save_on_train_epoch_end=False)  # fmt: skip
    return Module(), Data(), [Watch(), average, files]


def train(directory, averaging):
    """Train through a kill in a validation, and one after it, with a join after each."""
    from lightning.pytorch.loggers import CSVLogger

    torch.manual_seed(1)
    module, data, callbacks = parts(directory, averaging, joins=(1, 3))
    logger = CSVLogger(directory, "log", version="one")
    trainer = trainer_of(callbacks, max_epochs=EPOCHS, logger=logger)
    trainer.fit(module, datamodule=data)
    average = callbacks[1]._average_model
    return {
        "found": callbacks[0].found,
        "epochs": data.epochs,
        "rates": [group["lr"] for group in trainer.optimizers[0].param_groups],
        "averages": [each.tolist() for each in average.parameters()],
        "last": callbacks[2].last_model_path,
        "best": sorted(callbacks[2].best_k_models),
        "step": trainer.global_step,
    }


def evaluate(directory):
    """Return what a test as the first call has found, of ranks with weights of their own."""
    torch.manual_seed(os.getpid())
    module, data, _ = parts(directory, averaging=False)
    trainer = trainer_of(enable_checkpointing=False)
    (found,) = trainer.test(module, datamodule=data, verbose=False)
    return found["weight"], float(module.net.weight.sum())


def train_on(directory, steps, from_checkpoint):
    """Train some steps, with a checkpoint after each, or go on from one; return the rows."""
    from lightning.pytorch.callbacks import ModelCheckpoint

    module, data, _ = parts(directory, averaging=False)
    files = {"every_n_train_steps": 1, "save_top_k": -1, "filename": "{step}"}
    trainer = trainer_of(
        [ModelCheckpoint(f"{directory}/steps", **files)],
        max_steps=steps,
        val_check_interval=2,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
    )
    path = f"{directory}/steps/step=2.ckpt" if from_checkpoint else None
    trainer.fit(module, datamodule=data, ckpt_path=path)
    return module.rows


def fail(directory):
    """Train, and raise on one rank; files are written on an exception."""
    import lightning

    class Fails(lightning.Callback):
        def on_train_batch_end(self, trainer, *args):
            if trainer.global_step >= 2 and dist.get_rank() == dist.get_world_size() - 1:
                raise ArithmeticError("the user's own")

    module, data, _ = parts(directory, averaging=False)
    files = lightning.pytorch.callbacks.OnExceptionCheckpoint(directory)
    trainer_of([Fails(), files], max_epochs=2).fit(module, datamodule=data)
