"""A rank that runs out of memory over a Loader goes on with parts of its micro-batches."""

import pytest
import torch
from torch.utils.data import TensorDataset

import nbelastic.torch as hvd
from nbelastic.errors import OptionError, RankFailed
from tests.support.clusters import sizes

ROWS = 48


def train(how, kind="OutOfMemoryError", exact="auto", micro=4):
    def compute(x, y):
        """Compute on a device that has room for two rows, from the fifth step on."""
        full = hvd.rank() == 1 and how == "runs out" and steps >= 5
        full = full and (len(x) > 2 or kind == "one row")
        if full and kind == "in backward":
            x = x.requires_grad_()
            x.register_hook(lambda _: (_ for _ in ()).throw(torch.OutOfMemoryError("all is full")))
        elif full and kind == "MemoryError":
            raise MemoryError("all is full")
        elif full:
            raise torch.OutOfMemoryError("all is full")
        (model(x) - y).pow(2).mean().backward()

    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1))
    optimizer = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters(), 0.05))
    rows = TensorDataset(torch.rand(ROWS, 3), torch.rand(ROWS, 1))
    loader = hvd.elastic.Loader(rows, hvd.elastic.Batch(24, micro=micro, exact=exact))
    state = hvd.elastic.TorchState(model, optimizer, epoch=0, loader=loader)
    steps = 0

    @hvd.elastic.run
    def loop(state):
        nonlocal steps
        for state.epoch in range(state.epoch, 4):
            for step in loader:
                steps = 2 * state.epoch + step.number
                optimizer.zero_grad()
                for x, y in step:
                    compute(x, y)
                optimizer.step()
                state.commit()

    loop(state)
    return torch.cat([each.flatten() for each in model.parameters()]).tolist(), loader.parts


@pytest.mark.parametrize("kind", ["MemoryError", "in backward"])
def test_training_goes_on_as_if_it_had_been_in_parts_from_the_start(crew, kind):
    whole = crew.fit(train, args=("whole",), np=3).results()[0][0]
    job = crew.fit(train, args=("runs out", kind), np=3)
    assert job.results()[0][0] == pytest.approx(whole, rel=1e-4)
    assert [parts for _, parts in job.results()] == [1, 2, 1]
    assert sizes(job) == [3, 3]
    (data,) = job.status.data
    assert (data.seen, data.lost) == (4 * ROWS, 0)
    said = [each for each in job.status.warnings if "out of memory with 4 rows at a time" in each]
    assert len(said) == 1 and "goes on with 2" in said[0]


def test_what_cannot_be_smaller_is_the_error_itself(crew):
    with pytest.raises(RankFailed, match="OutOfMemoryError: all is full"):
        crew.fit(train, args=("runs out",), kwargs={"micro": 1, "kind": "one row"}, min_np=3, np=3)
    with pytest.raises(RankFailed, match=r"Batch\(exact=True\): a rank ran out of memory") as found:
        crew.fit(train, args=("runs out",), kwargs={"exact": True}, min_np=3, np=3)
    assert isinstance(found.value.__cause__, OptionError)
