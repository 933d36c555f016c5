"""Training functions of the trainers, each as its own documentation writes it."""

from __future__ import annotations

import hashlib
import os
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import nbelastic.torch as hvd
from nbelastic.elastic.ranks.context import current
from tests.support.training import once

ROWS = 48
EPOCHS = 3
BATCH = 4


@dataclass
class Outcome:
    """What a rank has come to."""

    digest: str  # of the parameters
    seen: list  # epoch, and rows that all ranks have trained, by step
    facts: dict = field(default_factory=dict)  # the same on all ranks, and after a resumption
    redone: int = 0  # batches that the rank has begun twice; negative if it has joined later
    # Whether the rank's callback knows if it is the main one, how often it has begun, how many
    # batches it has missed, and the last step that is logged.
    callback: tuple = (True, 1, 0, 0)

    def check(self):
        assert self.facts["epochs"] == EPOCHS
        assert self.facts["evaluations"] == EPOCHS
        assert self.callback[:3] == (True, 1, 0)


class Log:
    """A run of a tracking library, which is opened by one process and refuses all others."""

    def __init__(self, directory):
        self.directory = directory
        self.file = None

    def open(self):
        path = f"{self.directory}/run.{os.getpid()}"
        assert not os.path.exists(path), "opened twice"
        self.file = open(path, "w")  # noqa: SIM115 - as loggers do

    def write(self, step):
        assert self.file is not None, "You must call open() before write()"
        print(step, file=self.file, flush=True)


class Watch:
    """Callback of a trainer, which tracks in the shape of WandbCallback and MLflowCallback."""

    def __init__(self, directory):
        self.seen, self.step, self.counts, self.begins = [], 0, 0, 0
        self.run, self.path, self._initialized = Log(directory), str(os.getpid()), False

    def open(self, main):
        if not self._initialized:
            self._initialized = True
            if main:
                self.run.open()

    def trained(self, epoch, rows):
        self.seen = [*self.seen, [epoch, everyones(rows)]]
        self.step += 1


def digest_of(model):
    data = [each.detach().float().numpy().tobytes() for each in model.parameters()]
    return hashlib.sha1(b"".join(data)).hexdigest()


def everyones(rows):
    """Return the rows of all ranks."""
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, rows.tolist())
    return [row for rows in everyone for row in rows]


def network():
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))


def loss_of(model, rows):
    return model(rows.float().view(-1, 1).expand(-1, 4) / ROWS).pow(2).mean()


def optimizers_of(model):
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 8, 0.9)


def numbered(rows):
    return torch.utils.data.TensorDataset(torch.arange(rows))


def half():
    """Draw the first rows; the others are held out."""
    return torch.utils.data.SubsetRandomSampler(range(ROWS))


def die_once(flag):
    """Kill this rank, unless a rank was killed before."""
    if once(Path(flag)):
        os.kill(os.getpid(), signal.SIGKILL)


class Trial:
    """What the test does to this rank, at the batches that it begins.

    ``"kill"``: the main rank is killed, another joins; ``"leave"``: it leaves when the test has
    ordered it, another joins; ``"stop"``: an error after some commits.
    """

    def __init__(self, how, flag):
        self.how = how
        self.flag = flag  # a file that is there once a rank was killed
        self.begun = 0  # batches of this rank, with those that it does twice

    def begin(self, epoch, step):
        self.begun += 1
        if self.how == "stop" and epoch == 1 and step == 3:
            raise RuntimeError("stopped here")
        if self.how == "kill" and epoch == 1 and step == 2 and dist.get_rank() == 0:
            die_once(self.flag)
        if self.how == "leave" and epoch == 1 and step >= 2:
            await_change(2)  # the order of the test
        if self.how in ("kill", "leave") and epoch == 2:
            await_change(1)  # another is about to join


def await_change(size):
    """Wait in a world of a size until that is about to change."""
    while dist.get_world_size() == size and not current().change_flag():
        time.sleep(0.01)


def with_ddp(how, flag, directory):
    """Keep torch's own sampler, which is in no state, and has no batches recorded."""
    dist.init_process_group("gloo")
    model = DistributedDataParallel(network())
    optimizer, scheduler = optimizers_of(model)
    data = numbered(ROWS)
    sampler = torch.utils.data.distributed.DistributedSampler(data)
    loader = DataLoader(data, BATCH, sampler=sampler)
    state = hvd.elastic.TorchState(
        model, optimizer, scheduler=scheduler, epoch=0, step=0, seen=[], ends=0
    )
    trial = Trial(how, flag)

    @hvd.elastic.run
    def train(state):
        for state.epoch in range(state.epoch, EPOCHS):
            sampler.set_epoch(state.epoch)
            for (rows,) in loader:
                trial.begin(state.epoch, state.step)
                optimizer.zero_grad()
                loss_of(model, rows).backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                state.seen = [*state.seen, (state.epoch, everyones(rows))]
                state.step += 1
                state.commit()
            state.step, state.ends = 0, state.ends + 1
        facts = {"epochs": state.epoch + 1, "evaluations": state.ends}
        facts["rate"] = scheduler.get_last_lr()
        return Outcome(digest_of(model), state.seen, facts, trial.begun - len(state.seen))

    return train(state)


def with_accelerate(how, flag, directory):
    from accelerate import Accelerator
    from accelerate.tracking import GeneralTracker, on_main_process

    from nbelastic.accelerate import AccelerateState

    class Tracker(GeneralTracker):
        name = "tracker"
        requires_logging_directory = False
        tracker = None

        @on_main_process
        def start(self):
            self.run = Log(directory)
            self.run.open()

        @on_main_process
        def log(self, values, step=None, **_):
            self.run.write(step)

    accelerator = Accelerator(gradient_accumulation_steps=2, log_with=[Tracker()])
    model, data = network(), numbered(2 * ROWS)
    optimizer, scheduler = optimizers_of(model)
    loader = DataLoader(data, BATCH, sampler=half())
    test = DataLoader(data, BATCH, sampler=range(ROWS))
    prepared = accelerator.prepare(model, optimizer, loader, scheduler, test)
    model, optimizer, loader, scheduler, test = prepared
    accelerator.init_trackers("project")
    state = AccelerateState(accelerator, epoch=0, step=0, seen=[], evaluations=0)
    trial = Trial(how, flag)

    @hvd.elastic.run
    def train(state):
        for state.epoch in range(state.epoch, EPOCHS):
            for (rows,) in loader:
                trial.begin(state.epoch, state.step)
                with accelerator.accumulate(model):
                    accelerator.backward(loss_of(model, rows))
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                state.seen = [*state.seen, (state.epoch, everyones(rows))]
                state.step += 1
                accelerator.log({"loss": 1.0}, step=len(state.seen))
                state.commit()
            found = torch.cat([accelerator.gather_for_metrics(rows) for (rows,) in test])
            assert sorted(found.tolist()) == list(range(ROWS))
            assert accelerator.num_processes == dist.get_world_size()
            state.step, state.evaluations = 0, state.evaluations + 1
        facts = {"epochs": state.epoch + 1, "evaluations": state.evaluations}
        facts["rate"] = scheduler.get_last_lr()
        callback = (True, 1, 0, len(state.seen))
        return Outcome(digest_of(model), state.seen, facts, trial.begun - len(state.seen), callback)

    outcome = train(state)
    accelerator.save_state(f"{directory}/state")
    return outcome


def with_transformers(how, flag, directory, lora=False):
    from transformers import (
        EarlyStoppingCallback,
        GPT2Config,
        GPT2LMHeadModel,
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )

    import nbelastic.transformers

    Trainer = nbelastic.transformers.elastic(Trainer)  # noqa: N806

    class Callback(Watch, TrainerCallback):
        epochs = 0

        def on_train_begin(self, args, state, control, **_):
            self.begins += 1
            self.is_main = state.is_world_process_zero
            self.open(self.is_main)

        def on_epoch_begin(self, *_, **__):
            self.step = 0
            self.epochs += 1

        def on_step_end(self, args, state, control, **_):
            self.counts += 1

        def on_log(self, args, state, control, logs=None, **_):
            self.open(state.is_world_process_zero)
            if state.is_world_process_zero:
                self.run.write(state.global_step)

    class Watched(Trainer):
        def _get_train_sampler(self, dataset):
            return super()._get_train_sampler(dataset) if lora else half()

        def training_step(self, model, inputs, *arguments, **named):
            epoch = watch.epochs - 1
            trial.begin(epoch, watch.step)
            rows = inputs["input_ids"][:, 0]
            loss = super().training_step(model, inputs, *arguments, **named)
            watch.trained(epoch, rows)
            return loss

    torch.manual_seed(1)
    config = GPT2Config(
        vocab_size=ROWS, n_positions=8, n_embd=16, n_layer=1, n_head=2,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    if lora:
        from peft import LoraConfig, get_peft_model

        wanted = LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["c_attn"], lora_dropout=0)
        model = get_peft_model(model, wanted)
    size = ROWS if lora else 2 * ROWS
    data = [{"input_ids": (torch.arange(8) + row) % ROWS} for row in range(size)]
    for each in data:
        each["labels"] = each["input_ids"]
    arguments = TrainingArguments(
        output_dir=f"{directory}/output",
        num_train_epochs=EPOCHS,
        per_device_train_batch_size=BATCH,
        gradient_accumulation_steps=2,
        eval_strategy="epoch",
        save_strategy="epoch",
        load_best_model_at_end=True,
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
    )
    watch, trial = Callback(directory), Trial(how, flag)
    watch.rank = dist.get_rank()
    own = watch.rank, watch.path
    trainer = Watched(
        model=model,
        args=arguments,
        train_dataset=data,
        eval_dataset=data[:10],
        callbacks=[watch, EarlyStoppingCallback(early_stopping_patience=9)],
    )
    trainer.train()
    evaluations = [each for each in trainer.state.log_history if "eval_loss" in each]
    facts = {"epochs": watch.epochs, "evaluations": len(evaluations)}
    facts["losses"] = [each["loss"] for each in trainer.state.log_history if "loss" in each]
    facts["rates"] = [each["learning_rate"] for each in trainer.state.log_history if "loss" in each]
    facts["steps"] = trainer.state.global_step, trainer.state.max_steps
    assert trainer.state.global_step == trainer.state.max_steps
    assert (watch.rank, watch.path) == own
    steps = trainer.state.global_step
    callback = watch.is_main == (dist.get_rank() == 0), watch.begins, steps - watch.counts, steps
    return Outcome(digest_of(model), watch.seen, facts, trial.begun - len(watch.seen), callback)


def train_and_resume(directory, stop, resume=None, flag=None):
    """Train a Trainer up to a step, with a checkpoint there, or from such a one to the end.

    The second rank dies in the second step, if a file to note that is given.
    """
    from transformers import Trainer, TrainerCallback, TrainingArguments

    import nbelastic.transformers

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.net = network()

        def forward(self, rows):
            return {"loss": loss_of(self.net, rows)}

    class Stop(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            rates.append(state.global_step and trainer.lr_scheduler.get_last_lr()[0])
            control.should_training_stop = state.global_step == stop

    class Watched(nbelastic.transformers.elastic(Trainer)):
        def training_step(self, model, inputs, *arguments, **named):
            if flag and len(seen) == 1 and dist.get_rank() == 1:
                die_once(flag)
            seen.append([int(self.state.epoch or 0), everyones(inputs["rows"])])
            return super().training_step(model, inputs, *arguments, **named)

    seen, rates = [], []
    arguments = TrainingArguments(
        output_dir=directory,
        num_train_epochs=2,
        per_device_train_batch_size=BATCH,
        save_strategy="steps" if stop else "no",
        save_steps=max(stop, 1),
        report_to=[],
        disable_tqdm=True,
    )
    data = [{"rows": row} for row in range(ROWS)]
    trainer = Watched(model=Model(), args=arguments, train_dataset=data, callbacks=[Stop()])
    trainer.train(resume_from_checkpoint=resume)
    return seen, rates


def with_lora(**options):
    return with_transformers(lora=True, **options)


def with_lightning(how, flag, directory):
    import lightning
    from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

    import nbelastic.lightning
    from tests.trainers.validation import trainer_of

    class Callback(Watch, lightning.Callback):
        evaluations = 0

        def setup(self, trainer, module, stage):
            self.rank = trainer.global_rank
            self.is_main = trainer.is_global_zero
            self.open(self.is_main)
            module.heard.append("setup")

        def on_train_start(self, trainer, module):
            self.begins += 1

        def on_train_batch_start(self, trainer, module, batch, number):
            assert module.heard, "on_train_start was not called"

        def on_train_batch_end(self, trainer, *_):
            self.counts += 1
            if trainer.is_global_zero:
                self.run.write(trainer.global_step)

        def on_train_epoch_start(self, *_):
            self.step = 0

        def on_validation_end(self, *_):
            self.evaluations += 1

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = network()
            self.heard = []

        def on_train_start(self):
            self.heard.append("start")

        def training_step(self, batch, number):
            (rows,) = batch
            trial.begin(self.current_epoch, watch.step)
            loss = loss_of(self.net, rows)
            self.log("loss", loss, sync_dist=True)
            watch.trained(self.current_epoch, rows)
            return loss

        def validation_step(self, batch, number):
            self.log("value", loss_of(self.net, batch[0]), sync_dist=True)

        def configure_optimizers(self):
            optimizer = torch.optim.AdamW(self.parameters(), 0.01)
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
            schedule = {"scheduler": plateau, "monitor": "value"}
            return {"optimizer": optimizer, "lr_scheduler": schedule}

    watch, module, trial = Callback(directory), Module(), Trial(how, flag)
    stopping = EarlyStopping("value", patience=9)
    trainer = trainer_of(
        [watch, stopping, ModelCheckpoint(f"{directory}/models", monitor="value")],
        max_epochs=EPOCHS,
        accumulate_grad_batches=2,
        num_sanity_val_steps=0,
    )
    data = numbered(2 * ROWS)
    loaders = DataLoader(data, BATCH, sampler=half()), DataLoader(data, BATCH)
    nbelastic.lightning.fit(trainer, module, *loaders)
    facts = {"epochs": trainer.current_epoch, "evaluations": watch.evaluations}
    facts["best"] = float(stopping.best_score), stopping.wait_count
    facts["steps"] = trainer.global_step
    assert watch.path == str(os.getpid())
    missed = len(watch.seen) - watch.counts
    callback = watch.is_main == trainer.is_global_zero, watch.begins, missed, trainer.global_step
    return Outcome(digest_of(module), watch.seen, facts, trial.begun - len(watch.seen), callback)


def with_a_state_of_torch():
    """Keep what accelerate has prepared in a state that does not know it."""
    import accelerate

    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    prepared = accelerate.Accelerator(cpu=True).prepare(model, optimizer)
    hvd.elastic.run(lambda state: state.commit())(hvd.elastic.TorchState(*prepared))


def with_combined_loaders(checks):
    """Train on a batch of two loaders, after some of a validation."""
    import lightning
    from lightning.pytorch.utilities import CombinedLoader

    import nbelastic.lightning
    from tests.trainers.validation import trainer_of

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net, self.drawn = network(), []

        def training_step(self, batch, number):
            self.drawn.append(torch.rand(1).item())
            return sum(loss_of(self.net, rows) for (rows,) in batch)

        def validation_step(self, batch, number):
            torch.rand(1)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.01)

    torch.manual_seed(1)
    options = {"num_sanity_val_steps": checks, "enable_checkpointing": False}
    trainer = trainer_of(max_epochs=1, limit_train_batches=1, profiler="simple", **options)
    loaders = CombinedLoader([DataLoader(numbered(8), 2) for _ in range(2)], "min_size")
    module = Module()
    nbelastic.lightning.fit(trainer, module, loaders, DataLoader(numbered(8), 2))
    assert "run" not in vars(trainer.fit_loop.epoch_loop)
    return module.drawn, "run_training_epoch" in trainer.profiler.summary()
