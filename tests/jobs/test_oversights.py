"""Oversights that training does not show get one sentence in the history."""

from __future__ import annotations


def train(kind):
    import torch
    from torch.utils.data import TensorDataset

    import nbelastic
    import nbelastic.torch as hvd

    model = torch.nn.Linear(2, 1)
    seen = []
    if kind == "early hook":
        model.bias.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad is not None))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01))
    if kind == "late hook":
        model.bias.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad is not None))
    rows = TensorDataset(torch.ones(16, 2))
    loader = hvd.elastic.Loader(rows, hvd.elastic.Batch(8, micro=2))
    held_out = hvd.elastic.Loader(rows, hvd.elastic.Batch(8, micro=2))
    values = {} if kind == "in no state" else {"loader": loader}
    state = hvd.elastic.TorchState(model, optimizer, epoch=0, **values)

    @hvd.elastic.run
    def loop(state):
        for state.epoch in range(state.epoch, 2):
            for step in loader:
                optimizer.zero_grad()
                for (x,) in step:
                    model(x).mean().backward()
                optimizer.step()
                state.commit()
                loss = float("nan") if kind == "not finite" and state.epoch else 1.0
                nbelastic.report(loss=loss)
            with torch.no_grad():
                for step in held_out:
                    for (x,) in step:
                        model(x)

    loop(state)


def deal(in_state):
    import torch

    import nbelastic.torch as hvd

    sampler = hvd.elastic.ElasticSampler(range(16))
    held_out = hvd.elastic.ElasticSampler(range(8))
    values = {"sampler": sampler} if in_state else {}
    state = hvd.elastic.TorchState(torch.nn.Linear(1, 1), epoch=0, **values)

    @hvd.elastic.run
    def loop(state):
        for number in range(4):
            sampler.record_batch(number, 2)
            hvd.allreduce(torch.ones(1))
            state.commit()
            list(held_out)

    loop(state)


def iterate(kind):
    import torch

    import nbelastic.torch as hvd

    model = torch.nn.Linear(1, 1)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01))
    sampler = hvd.elastic.ElasticSampler(range(16))
    state = hvd.elastic.TorchState(model, optimizer, epoch=0, sampler=sampler)

    @hvd.elastic.run
    def loop(state):
        for state.epoch in range(state.epoch, 4):
            for number, row in enumerate(sampler):
                optimizer.zero_grad()
                model(torch.full((1, 1), float(row))).sum().backward()
                optimizer.step()
                if kind == "recorded":
                    sampler.record_batch(number, 1)
                if kind != "whole epochs":
                    state.commit()
            sampler.set_epoch(state.epoch + 1)
            state.commit()

    loop(state)


def warnings(crew, kind, function=train):
    job = crew.fit(function, args=(kind,), np=2)
    return [event.detail.partition("\n")[0] for event in job.history if event.kind == "warning"]


def test_a_right_program_gets_no_sentence(crew):
    assert warnings(crew, "right") == []
    assert warnings(crew, "early hook") == []


def test_a_loader_that_trains_and_is_in_no_state(crew):
    assert warnings(crew, "in no state") == ["the Loader that trains is in no state"]


def test_a_hook_that_finds_no_gradient(crew):
    (said,) = warnings(crew, "late hook")
    assert said.startswith("a hook finds no gradient: parameter ")


def test_a_metric_that_is_no_longer_finite(crew):
    assert warnings(crew, "not finite") == ["loss has turned nan at commit 3"]


def test_a_sampler_that_records_and_is_in_no_state(crew):
    assert warnings(crew, True, deal) == []
    assert warnings(crew, False, deal) == ["a sampler that records batches is in no state"]


def test_a_sampler_of_a_state_whose_batches_are_not_recorded(crew):
    (said,) = warnings(crew, "not recorded", iterate)
    assert said == "a sampler of the state has no recorded batches"
    assert warnings(crew, "recorded", iterate) == []
    assert warnings(crew, "whole epochs", iterate) == []
