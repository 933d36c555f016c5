"""Wrong trainings that no operation fails of get a sentence each, right ones none."""

import time

import pytest
import torch
from torch.utils.data import TensorDataset

import nbelastic
import nbelastic.torch as hvd
from nbelastic.errors import RankFailed
from nbelastic.render import JobSnapshot, text
from tests.support.clusters import kinds, until


def trains_alone():
    return nbelastic.rank()


def test_ranks_that_never_met_are_warned_of_in_result_history_and_panel(crew):
    job = crew.fit(trains_alone, np=2)
    (warning,) = job.status.warnings
    assert "nbelastic.torch.DistributedOptimizer" in warning
    assert kinds(job)[-2:] == ["warning", "finished"]
    headline = "ranks never met: 2 separate trainings"
    assert job.status.headlines == (headline,)
    assert headline in repr(job)
    assert headline in text(JobSnapshot.of(job))


def test_process_groups_that_are_not_there_come_with_advice(crew):
    def train():
        torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))

    with pytest.raises(RankFailed, match=r'init_process_group\("nbelastic"\)') as caught:
        crew.fit(train, np=2)
    assert str(caught.value).count("first: in a rank it needs neither") == 1


def train(marks, commits, wrapped):
    hvd.init()
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    if wrapped:
        optimizer = hvd.DistributedOptimizer(optimizer)
    state = hvd.elastic.TorchState(model, optimizer, steps=0)

    @hvd.elastic.run
    def loop(state):
        while True:
            optimizer.zero_grad()
            model(torch.randn(8, 4) + hvd.rank()).pow(2).sum().backward()
            optimizer.step()
            state.steps += 1
            done = torch.tensor(state.steps >= 15 and (marks / "enough").exists())
            if commits:
                state.commit()
            if hvd.allreduce(done.int(), op=hvd.Min):
                return
            time.sleep(0.001)

    loop(state)
    return model.weight.detach()


@pytest.mark.parametrize(
    ("commits", "wrapped", "headline"),
    [(True, False, "ranks train different parameters"), (False, True, "no commit yet")],
)
def test_a_wrong_loop_is_warned_of_while_it_trains(crew, tmp_path, commits, wrapped, headline):
    job = crew.fit(train, args=[tmp_path, commits, wrapped], np=2, block=False)
    until(lambda: job.status.warnings, "the warning")
    assert not job.done()
    (tmp_path / "enough").touch()
    first, second = job.results(60)
    assert first.equal(second) == wrapped
    assert job.status.headlines == (headline,)
    assert f"warning: {headline}" in text(JobSnapshot.of(job))


def over_a_loader(kind):
    model = torch.nn.Linear(2, 1)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01))
    rows, batch = TensorDataset(torch.ones(16, 2)), hvd.elastic.Batch(8, micro=2)
    loader, held_out = (hvd.elastic.Loader(rows, batch) for _ in range(2))
    values = {} if kind == "in no state" else {"loader": loader}

    @hvd.elastic.run
    def loop(state):
        for state.epoch in range(state.epoch, 2):
            for step in loader:
                optimizer.zero_grad()
                for (x,) in step:
                    model(x).mean().backward()
                optimizer.step()
                state.commit()
            with torch.no_grad():
                for step in held_out:
                    for (x,) in step:
                        model(x)

    loop(hvd.elastic.TorchState(model, optimizer, epoch=0, **values))


def over_a_sampler(kind):
    model = torch.nn.Linear(1, 1)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01))
    sampler, held_out = (hvd.elastic.ElasticSampler(range(count)) for count in (16, 8))
    values = {} if kind == "sampler in no state" else {"sampler": sampler}

    @hvd.elastic.run
    def loop(state):
        for state.epoch in range(state.epoch, 4):
            for number, row in enumerate(sampler):
                optimizer.zero_grad()
                model(torch.full((1, 1), float(row))).sum().backward()
                optimizer.step()
                sampler.record_batch(number, 1)
                if kind != "whole epochs":
                    state.commit()
            sampler.set_epoch(state.epoch + 1)
            state.commit()
            list(held_out)

    loop(hvd.elastic.TorchState(model, optimizer, epoch=0, **values))


OVERSIGHTS = [
    (over_a_loader, "right", ""),
    (over_a_sampler, "recorded", ""),
    (over_a_sampler, "whole epochs", ""),
    (over_a_loader, "in no state", "the Loader that trains is in no state"),
    (over_a_sampler, "sampler in no state", "a sampler that records batches is in no state"),
]
"""Programs that run one after the other in the same ranks, and what is said of each."""


def test_each_oversight_gets_one_sentence(crew):
    def one_after_the_other():
        for program, kind, _ in OVERSIGHTS:
            program(kind)

    job = crew.fit(one_after_the_other, np=2)
    said = [event.detail for event in job.history if event.kind == "warning"]
    expected = [sentence for _, _, sentence in OVERSIGHTS if sentence]
    assert len(said) == len(expected), said
    assert [each.startswith(one) for each, one in zip(said, expected, strict=True)] == [True] * 2
