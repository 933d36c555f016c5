"""Training functions with callbacks as tracking libraries write them; rank 0 is killed once."""

from __future__ import annotations

ROWS, BATCH, EPOCHS = 24, 4, 2


class Log:
    """A run of a tracking library, which is opened by one process and refuses all others."""

    def __init__(self, directory):
        self.directory = directory
        self.file = None

    def open(self):
        import os

        path = f"{self.directory}/run.{os.getpid()}"
        assert not os.path.exists(path), "opened twice"
        self.file = open(path, "w")  # noqa: SIM115 - as loggers do

    def write(self, step):
        assert self.file is not None, "You must call open() before write()"
        print(step, file=self.file, flush=True)


def lines(directory):
    """Return what was written, by the process that has."""
    return {
        each.name: [int(line) for line in each.read_text().split()]
        for each in directory.glob("run.*")
    }


def end_once(flag, rank, step, at):
    """Kill this rank, if it is the one and the step is due, once."""
    import os
    import signal
    from pathlib import Path

    if (rank, step) == at and not Path(flag).exists():
        Path(flag).touch()
        os.kill(os.getpid(), signal.SIGKILL)


def with_transformers(directory):
    import os

    import torch
    import torch.distributed as dist
    from transformers import (
        GPT2Config,
        GPT2LMHeadModel,
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )

    import nbelastic.transformers

    class Tracking(TrainerCallback):
        """In the shape of WandbCallback and MLflowCallback."""

        def __init__(self):
            self.run = Log(directory)
            self.rank = dist.get_rank()
            self.path = str(os.getpid())
            self.counts = 0
            self.begins = 0
            self._initialized = False

        def setup(self, state):
            self._initialized = True
            if state.is_world_process_zero:
                self.run.open()

        def on_train_begin(self, args, state, control, **_):
            self.begins += 1
            self.is_main = state.is_world_process_zero
            if not self._initialized:
                self.setup(state)

        def on_step_begin(self, args, state, control, **_):
            end_once(f"{directory}/killed", dist.get_rank(), state.global_step, (0, 2))

        def on_step_end(self, args, state, control, **_):
            self.counts += 1

        def on_log(self, args, state, control, logs=None, **_):
            if not self._initialized:
                self.setup(state)
            if state.is_world_process_zero:
                self.run.write(state.global_step)

    torch.manual_seed(1)
    config = GPT2Config(vocab_size=ROWS, n_positions=4, n_embd=8, n_layer=1, n_head=2)
    data = [{"input_ids": (torch.arange(4) + row) % ROWS} for row in range(ROWS)]
    for each in data:
        each["labels"] = each["input_ids"]
    arguments = TrainingArguments(
        output_dir=f"{directory}/output",
        num_train_epochs=EPOCHS,
        per_device_train_batch_size=BATCH,
        logging_steps=1,
        save_strategy="no",
        report_to=os.environ.get("REPORT_TO", "none"),
        disable_tqdm=True,
    )
    tracking = Tracking()
    rank = tracking.rank
    trainer = nbelastic.transformers.elastic(Trainer)(
        model=GPT2LMHeadModel(config), args=arguments, train_dataset=data, callbacks=[tracking]
    )
    trainer.train()
    assert (tracking.rank, tracking.path) == (rank, str(os.getpid()))
    return {
        "main": tracking.is_main == (dist.get_rank() == 0),
        "begins": tracking.begins,
        "counts": tracking.counts - trainer.state.global_step,
        "steps": trainer.state.global_step,
    }


def with_lightning(directory):
    import os

    import lightning
    import torch
    import torch.distributed as dist

    import nbelastic.lightning

    class Tracking(lightning.Callback):
        def __init__(self):
            self.run = Log(directory)
            self.path = str(os.getpid())
            self.counts = 0
            self.begins = 0
            self._initialized = False

        def setup(self, trainer, module, stage):
            self.rank = trainer.global_rank
            self.is_main = trainer.is_global_zero
            if not self._initialized:
                self._initialized = True
                if self.is_main:
                    self.run.open()
            module.heard.append("setup")

        def on_train_start(self, trainer, module):
            self.begins += 1

        def on_train_batch_start(self, trainer, module, batch, number):
            assert module.heard, "on_train_start was not called"
            end_once(f"{directory}/killed", dist.get_rank(), trainer.global_step, (0, 2))

        def on_train_batch_end(self, trainer, *_):
            self.counts += 1
            if trainer.is_global_zero:
                self.run.write(trainer.global_step)

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = torch.nn.Linear(1, 1)
            self.heard = []

        def on_train_start(self):
            self.heard.append("start")

        def training_step(self, batch, number):
            return self.net(batch[0].float().view(-1, 1)).pow(2).mean()

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), 0.01)

    tracking, module = Tracking(), Module()
    trainer = lightning.Trainer(
        strategy="nbelastic",
        accelerator="cpu",
        max_epochs=EPOCHS,
        callbacks=[tracking],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = torch.utils.data.TensorDataset(torch.arange(ROWS))
    loader = torch.utils.data.DataLoader(data, BATCH, shuffle=True)
    nbelastic.lightning.fit(trainer, module, loader)
    assert tracking.path == str(os.getpid())
    return {
        "main": tracking.is_main == trainer.is_global_zero,
        "begins": tracking.begins,
        "counts": tracking.counts - trainer.global_step,
        "steps": trainer.global_step,
    }


def with_accelerate(directory):
    import os
    import sys
    import types
    from pathlib import Path

    import torch
    import torch.distributed as dist
    from accelerate import Accelerator
    from accelerate.tracking import GeneralTracker, on_main_process

    import nbelastic.torch as hvd
    from nbelastic.accelerate import AccelerateState

    library = sys.modules["wandb"] = types.ModuleType("wandb")

    class Tracker(GeneralTracker):
        """In the shape of WandBTracker; the library goes on with the run that a variable names."""

        name = "tracker"
        requires_logging_directory = False
        tracker = None

        @on_main_process
        def start(self):
            self.begins = 1
            run = os.environ.get("WANDB_RUN_ID", f"of-{os.getpid()}")
            library.run = types.SimpleNamespace(id=run)
            self.run = Log(directory)
            self.run.open()
            with (Path(directory) / "ids").open("a") as file:
                print(run, file=file)

        @on_main_process
        def log(self, values, step=None, **_):
            self.run.write(step)

    accelerator = Accelerator(log_with=[Tracker()])
    torch.manual_seed(1)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    data = torch.utils.data.TensorDataset(torch.arange(ROWS))
    loader = torch.utils.data.DataLoader(data, BATCH, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    accelerator.init_trackers("project")
    state = AccelerateState(accelerator, epoch=0, step=0)

    @hvd.elastic.run
    def train(state):
        for state.epoch in range(state.epoch, EPOCHS):
            for (rows,) in loader:
                end_once(f"{directory}/killed", dist.get_rank(), state.step, (0, 2))
                accelerator.backward(model(rows.float().view(-1, 1)).pow(2).mean())
                optimizer.step()
                optimizer.zero_grad()
                state.step += 1
                accelerator.log({"loss": 1.0}, step=state.step)
                state.commit()
        return state.step

    steps = train(state)
    assert len(set((Path(directory) / "ids").read_text().split())) == 1
    return {"main": True, "begins": 1, "counts": 0, "steps": steps}
