"""An elastic script of Horovod's with only its import changed."""

import os
import signal

import torch
from torch import nn, optim
from torch.nn import functional

import nbelastic.torch as hvd  # was: import horovod.torch as hvd
from tests.support.clusters import kinds, sizes


def script(marks):
    hvd.init()

    batch_size, batches_per_commit, epochs, lr = 16, 5, 6, 0.01
    torch.manual_seed(0)
    inputs = torch.randn(960, 4)
    targets = (inputs.sum(dim=1) > 0).long()
    dataset = torch.utils.data.TensorDataset(inputs, targets)
    sampler = hvd.elastic.ElasticSampler(dataset)
    loader = torch.utils.data.DataLoader(dataset, batch_size=batch_size, sampler=sampler)

    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
    optimizer = optim.SGD(model.parameters(), lr * hvd.size())
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

    @hvd.elastic.run
    def train(state):
        for state.epoch in range(state.epoch, epochs):
            for state.batch, (data, target) in enumerate(loader):
                optimizer.zero_grad()
                output = model(data)
                loss = functional.cross_entropy(output, target)
                loss.backward()
                optimizer.step()
                state.sampler.record_batch(state.batch, batch_size)
                if state.epoch == 2 and hvd.rank() == 1:
                    try:
                        os.close(os.open(marks / "killed", os.O_CREAT | os.O_EXCL))
                    except FileExistsError:
                        pass
                    else:
                        os.kill(os.getpid(), signal.SIGKILL)
                if state.batch % batches_per_commit == 0:
                    state.commit()
            state.batch = 0
            state.sampler.set_epoch(state.epoch + 1)
            state.commit()

    def on_state_reset():
        for param_group in optimizer.param_groups:
            param_group["lr"] = lr * hvd.size()

    state = hvd.elastic.TorchState(model, optimizer, batch=0, epoch=0, sampler=sampler)
    state.register_reset_callbacks([on_state_reset])
    train(state)

    with torch.no_grad():
        accuracy = (model(inputs).argmax(1) == targets).float().mean().item()
    return accuracy, optimizer.param_groups[0]["lr"] / lr, hvd.size(), state.epoch


def test_a_horovod_script_runs_with_its_import_changed(crew, tmp_path):
    job = crew.fit(script, args=[tmp_path], np=4, min_np=2)
    assert kinds(job).count("lost") == 1
    assert 3 in sizes(job)  # the first generation may end before all ranks have said that it formed
    for accuracy, factor, size, epoch in job.results():
        assert accuracy > 0.8
        assert round(factor) == size
        assert epoch == 5
