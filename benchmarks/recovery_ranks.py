"""Ranks that train until they are killed, and log their moments: see benchmarks/recovery.py.

Each process appends to a file of its own, named after it: what has just happened, the time on a
clock that all processes of a machine share, and the number of ranks.
"""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

CHECKPOINT_EVERY = 10
"""Steps between two checkpoints on disk, from which torchrun's ranks start again."""


ENDLESS = 1_000_000
"""Samples of a trainer's epoch."""


class Log:
    """A file of moments."""

    def __init__(self, folder: str) -> None:
        self._file = os.open(
            Path(folder) / f"{os.getpid()}.log", os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600
        )

    def __call__(self, what: str, size: int) -> None:
        os.write(self._file, f"{what} {time.monotonic():.6f} {size}\n".encode())


def ours(folder: str, task: str) -> None:
    import torch

    import nbelastic.torch as hvd
    from benchmarks.training_models import TASKS
    from nbelastic.errors import CollectiveError

    hvd.init()
    log = Log(folder)
    model = TASKS[task].model()
    optimizer = hvd.DistributedOptimizer(TASKS[task].optimizer(model.parameters()))
    state = hvd.elastic.TorchState(model, optimizer, batch=0)
    inputs, labels = TASKS[task].batch(torch.Generator().manual_seed(1))

    @hvd.elastic.run
    def train(state: Any) -> None:
        log("enter", hvd.size())
        try:
            while True:
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(model(inputs), labels).backward()
                log("back", hvd.size())
                optimizer.synchronize()
                log("met", hvd.size())  # all ranks are here at once
                with optimizer.skip_synchronize():
                    optimizer.step()
                log("step", hvd.size())  # it counts, even if the commit ends the generation
                state.batch += 1
                state.commit()
        except CollectiveError:
            log("fail", hvd.size())
            raise

    train(state)


def ours_ddp(folder: str, task: str) -> None:
    """Train with torch's DDP, unmodified, over the job's process group."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    import nbelastic.torch as hvd
    from benchmarks.training_models import TASKS
    from nbelastic.errors import CollectiveError

    dist.init_process_group("nbelastic")
    log = Log(folder)
    model = DistributedDataParallel(TASKS[task].model())
    optimizer = TASKS[task].optimizer(model.parameters())
    state = hvd.elastic.TorchState(model, optimizer, batch=0)
    inputs, labels = TASKS[task].batch(torch.Generator().manual_seed(1))

    @hvd.elastic.run
    def train(state: Any) -> None:
        log("enter", hvd.size())
        try:
            while True:
                optimizer.zero_grad()
                loss = torch.nn.functional.cross_entropy(model(inputs), labels)
                log("back", hvd.size())
                loss.backward()
                log("met", hvd.size())
                optimizer.step()
                log("step", hvd.size())
                state.batch += 1
                state.commit()
        except CollectiveError:
            log("fail", hvd.size())
            raise

    train(state)


def ours_accelerate(folder: str, task: str) -> None:
    """Train with accelerate."""
    import torch
    from accelerate import Accelerator

    import nbelastic.torch as hvd
    from benchmarks.training_models import TASKS
    from nbelastic.accelerate import AccelerateState
    from nbelastic.errors import CollectiveError

    log = Log(folder)
    accelerator = Accelerator()
    model = TASKS[task].model()
    optimizer = TASKS[task].optimizer(model.parameters())
    model, optimizer = accelerator.prepare(model, optimizer)
    state = AccelerateState(accelerator, batch=0)
    inputs, labels = TASKS[task].batch(torch.Generator().manual_seed(1))

    @hvd.elastic.run
    def train(state: Any) -> None:
        log("enter", hvd.size())
        try:
            while True:
                optimizer.zero_grad()
                loss = torch.nn.functional.cross_entropy(model(inputs), labels)
                log("back", hvd.size())
                accelerator.backward(loss)
                log("met", hvd.size())
                optimizer.step()
                log("step", hvd.size())
                state.batch += 1
                state.commit()
        except CollectiveError:
            log("fail", hvd.size())
            raise

    train(state)


def ours_lightning(folder: str, task: str) -> None:
    """Train with Lightning's Trainer."""
    import lightning
    import torch

    import nbelastic.lightning
    import nbelastic.torch as hvd
    from benchmarks.training_models import TASKS

    log = Log(folder)
    inputs, labels = TASKS[task].batch(torch.Generator().manual_seed(1))

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = TASKS[task].model()

        def training_step(self, *_: Any) -> torch.Tensor:
            return torch.nn.functional.cross_entropy(self.model(inputs), labels)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return TASKS[task].optimizer(self.parameters())

        def on_train_batch_end(self, *_: Any) -> None:
            log("step", hvd.size())

    trainer = lightning.Trainer(
        strategy="nbelastic",
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    rows = torch.utils.data.TensorDataset(torch.arange(ENDLESS))
    nbelastic.lightning.fit(trainer, Module(), torch.utils.data.DataLoader(rows, shuffle=True))


def ours_transformers(folder: str, task: str) -> None:
    """Train with the Trainer of Transformers."""
    import torch
    import transformers

    import nbelastic.torch as hvd
    import nbelastic.transformers
    from benchmarks.training_models import TASKS

    log = Log(folder)
    inputs, labels = TASKS[task].batch(torch.Generator().manual_seed(1))
    model = TASKS[task].model()
    elastic: Any = nbelastic.transformers.elastic(transformers.Trainer)

    class Trainer(elastic):  # type: ignore[misc]
        def compute_loss(self, model: Any, *_: Any, **__: Any) -> torch.Tensor:
            return torch.nn.functional.cross_entropy(model(inputs), labels)

    class Steps(transformers.TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            log("step", hvd.size())

    arguments = transformers.TrainingArguments(
        output_dir=f"{folder}/output",
        max_steps=ENDLESS,
        per_device_train_batch_size=1,
        remove_unused_columns=False,
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    rows = torch.arange(ENDLESS)
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=torch.utils.data.StackDataset(row=rows),
        optimizers=(TASKS[task].optimizer(model.parameters()), None),
        callbacks=[Steps()],
    )
    trainer.train()


def torchrun(folder: str, task: str) -> None:
    """Train as torchrun's documentation shows: all ranks start again from a checkpoint."""
    import torch
    import torch.distributed as dist

    from benchmarks.training_models import TASKS

    torch.set_num_threads(1)
    # Otherwise, restarted ranks would find the addresses of the earlier ones.
    store = dist.PrefixStore(
        f"attempt-{os.environ['TORCHELASTIC_RESTART_COUNT']}",
        dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])),
    )
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    log = Log(folder)
    model = TASKS[task].model()
    trained = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = TASKS[task].optimizer(model.parameters())
    path = Path(folder) / "checkpoint.pt"
    step = 0
    if path.exists():
        kept = torch.load(path)
        model.load_state_dict(kept["model"])
        optimizer.load_state_dict(kept["optimizer"])
        step = kept["step"]
    inputs, labels = TASKS[task].batch(torch.Generator().manual_seed(1))
    while True:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(trained(inputs), labels).backward()
        optimizer.step()
        step += 1
        if step % CHECKPOINT_EVERY == 0 and dist.get_rank() == 0:
            kept = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            torch.save(kept, path.with_suffix(".new"))
            path.with_suffix(".new").rename(path)
        log("step", dist.get_world_size())


def torchft(folder: str, task: str) -> None:
    """Train as torchft's example does, with timeouts of a second.

    Its other class for DDP fails an assertion, on all ranks, when Gloo reports a lost peer at once.
    """
    import torch
    import torch.distributed as dist
    from torchft import Manager, Optimizer, ProcessGroupGloo
    from torchft.ddp import PureDistributedDataParallel

    from benchmarks.training_models import TASKS

    torch.set_num_threads(1)
    log = Log(folder)
    model = TASKS[task].model()
    optimizer = TASKS[task].optimizer(model.parameters())

    def load(kept: dict[str, Any]) -> None:
        model.load_state_dict(kept["model"])
        optimizer.load_state_dict(kept["optimizer"])

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=1)),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        min_replica_size=2,
        timeout=timedelta(seconds=1),
        quorum_timeout=timedelta(seconds=20),
        connect_timeout=timedelta(seconds=20),
        store_addr="127.0.0.1",
        store_port=store.port,
        rank=0,
        world_size=1,
        replica_id=f"replica-{os.getpid()}",
    )
    trained = PureDistributedDataParallel(manager, model)
    managed = Optimizer(manager, optimizer)
    inputs, labels = TASKS[task].batch(torch.Generator().manual_seed(1))
    while True:
        before = manager.current_step()
        managed.zero_grad()
        torch.nn.functional.cross_entropy(trained(inputs), labels).backward()
        managed.step()
        if manager.current_step() > before:
            log("step", manager.num_participants())


if __name__ == "__main__":
    {"torchrun": torchrun, "torchft": torchft}[sys.argv[1]](*sys.argv[2:])
