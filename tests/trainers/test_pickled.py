"""Objects of an earlier cell: made in the kernel, and pickled to the ranks."""

from __future__ import annotations

import cloudpickle
import pytest

from nbelastic.errors import NotPicklable, OptionError

accelerate = pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")


def pickled(value):
    return cloudpickle.loads(cloudpickle.dumps(value))


def test_training_arguments_have_the_ranks_of_this_process():
    from nbelastic.transformers.trainer import renew

    made = transformers.TrainingArguments(output_dir="unused", use_cpu=True, report_to=[])
    made.distributed_state.num_processes = 7  # as if the kernel were one of seven
    sent = pickled(made)
    made.distributed_state.num_processes = 1
    assert sent.world_size == 7
    renew(sent)
    assert sent.world_size == 1
    assert vars(sent.distributed_state) is accelerate.PartialState._shared_state
    state = sent.distributed_state
    renew(sent)
    assert sent.distributed_state is state


def test_an_accelerator_and_a_trainer_of_another_process_are_refused():
    import torch

    from nbelastic.accelerate import AccelerateState
    from nbelastic.transformers import elastic

    accelerator = accelerate.Accelerator(cpu=True)
    accelerator.prepare(torch.nn.Linear(1, 1))
    with pytest.raises(OptionError, match="Accelerator of this AccelerateState was made in anoth"):
        AccelerateState(pickled(accelerator))
    arguments = transformers.TrainingArguments(output_dir="unused", use_cpu=True, report_to=[])
    kind = elastic(transformers.Trainer)
    trainer = kind(model=torch.nn.Linear(1, 1), args=arguments, train_dataset=[{"x": 1}])
    trainer.accelerator = pickled(trainer.accelerator)
    with pytest.raises(OptionError, match="this Trainer was made in another process"):
        trainer._train_elastically()


def test_what_accelerate_has_prepared_in_the_kernel_is_refused_before_it_is_sent():
    import torch

    from nbelastic.cluster.kernel.preflight import pack_function

    accelerator = accelerate.Accelerator(cpu=True)
    optimizer = torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), 0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    rows = torch.utils.data.DataLoader([1.0, 2.0])
    arguments = transformers.TrainingArguments(output_dir="unused", use_cpu=True, report_to=[])
    trainer = transformers.Trainer(model=torch.nn.Linear(1, 1), args=arguments)
    for made in (accelerator, trainer, *accelerator.prepare(optimizer, scheduler, rows)):
        with pytest.raises(NotPicklable, match=f"a {type(made).__name__} that was made in this pr"):
            pack_function(lambda found: found, ([made],), {})
    pack_function(lambda found: found, (arguments, accelerator.prepare(torch.nn.Linear(1, 1))), {})
