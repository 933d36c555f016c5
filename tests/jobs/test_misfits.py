"""A layer that is added while it trains: a newcomer says so, and may come again."""

from __future__ import annotations

from tests.support.clusters import kinds, until


def train(added):
    import time

    import torch

    import nbelastic.torch as hvd

    hvd.init()
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    state = hvd.elastic.TorchState(model, optimizer, step=0)

    @hvd.elastic.run
    def loop(state):
        while True:
            if state.step == 2 and len(model) == 1:
                model.append(torch.nn.Linear(2, 1))
                optimizer.add_param_group({"params": list(model[1].parameters())})
                added.touch()
            optimizer.zero_grad()
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            state.step += 1
            state.commit()
            time.sleep(0.01)
            if hvd.allreduce(torch.tensor(float((added.parent / "enough").exists()))) > 0:
                return hvd.size()

    return loop(state)


def test_a_newcomer_that_lacks_a_layer_is_named_and_the_others_go_on(crew, tmp_path):
    first, second = sorted(crew.workers())[:2]
    options = {"min_np": 1, "max_np": 1, "workers": [first, second]}
    job = crew.fit(train, args=[tmp_path / "added"], block=False, **options)
    until((tmp_path / "added").exists, "a layer")
    job.scale(max_np=2)
    until(lambda: "cooldown" in kinds(job), "a newcomer")
    (tmp_path / "enough").touch()
    assert job.results() == [1]
    (warning,) = [each for each in job.status.warnings if "could not join" in each]
    assert "parameter model.1.weight: expected nothing, came float32 [1, 2]" in warning
    assert "build all of it before the state is made" in warning
    (rest,) = [event.detail for event in job.history if event.kind == "cooldown"]
    assert "for good" not in rest
