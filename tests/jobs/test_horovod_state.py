"""What Horovod's users bring along, through resets: handlers of their own, sparse gradients."""

from __future__ import annotations

import pytest

from tests.support.clusters import sizes


def with_a_handler(marks):
    """Train a ledger that cannot be copied; rank 0 dies, so the state outlives it."""
    import os
    import signal
    import time

    import nbelastic.torch as hvd
    from nbelastic.torch.elastic.state import (
        StateHandler,
        get_handler_registry,
        set_handler_registry,
    )

    class Ledger:
        def __init__(self):
            self.entries = []

        def __reduce_ex__(self, protocol):
            raise TypeError("a ledger is neither copied nor sent")

    class LedgerHandler(StateHandler):
        def __init__(self, ledger):
            super().__init__(ledger)
            self.kept = list(ledger.entries)

        def save(self):
            self.kept = list(self.value.entries)

        def restore(self):
            self.value.entries = list(self.kept)

        def sync(self):
            self.value.entries = hvd.broadcast_object(self.value.entries, root_rank=0)

    hvd.init()
    set_handler_registry([(Ledger, LedgerHandler), *get_handler_registry()])
    ledger = Ledger()
    told = []

    class Told(hvd.elastic.TorchState):
        def on_hosts_updated(self, timestamp, update_res):
            told.append(update_res)

    state = Told(ledger=ledger, batch=0, waited=0)

    @hvd.elastic.run
    def train(state):
        while state.batch < 30 or (hvd.size() < 3 and state.waited < 3000):
            ledger.entries.append(state.batch)
            state.waited += state.batch >= 30
            if state.batch == 12 and hvd.rank() == 0:
                try:
                    os.close(os.open(marks / "killed", os.O_CREAT | os.O_EXCL))
                except FileExistsError:
                    pass
                else:
                    os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(0.01)  # a step
            state.batch += 1
            state.commit()

    train(state)
    assert state.ledger is ledger
    return ledger.entries, state.batch, told


def test_a_handler_of_the_users_keeps_a_value_through_a_kill_and_a_join(crew, tmp_path):
    job = crew.fit(with_a_handler, args=(tmp_path,), np=3, min_np=2)
    assert sizes(job)[:2] == [3, 2]
    assert sizes(job)[-1] == 3
    for entries, batch, _ in job.results():
        assert entries == [*range(batch)]
    assert any(told == [3] for _, _, told in job.results())


def with_sparse_gradients(marks):
    """Train an embedding by SparseAdam over a Loader; a rank dies once, if there are several."""
    import os
    import signal

    import torch
    from torch.utils.data import TensorDataset

    import nbelastic.torch as hvd

    hvd.init()
    words = torch.randint(0, 50, (24, 3), generator=torch.Generator().manual_seed(1))
    table = torch.nn.Embedding(50, 4, sparse=True)
    torch.nn.init.uniform_(table.weight, generator=torch.Generator().manual_seed(2))
    optimizer = hvd.DistributedOptimizer(torch.optim.SparseAdam(table.parameters(), lr=0.05))
    batch = hvd.elastic.Batch(8, micro=2, exact=True)
    loader = hvd.elastic.Loader(TensorDataset(words), batch, seed=3)
    state = hvd.elastic.TorchState(table, optimizer, loader=loader, epoch=0)

    @hvd.elastic.run
    def train(state):
        for state.epoch in range(state.epoch, 4):
            for step in state.loader:
                optimizer.zero_grad()
                for (rows,) in step:
                    torch.tanh(table(rows).sum(1)).square().sum().backward()
                optimizer.step()
                if state.epoch == 1 and hvd.size() > 1 and hvd.rank() == hvd.size() - 1:
                    try:
                        os.close(os.open(marks / "killed", os.O_CREAT | os.O_EXCL))
                    except FileExistsError:
                        pass
                    else:
                        os.kill(os.getpid(), signal.SIGKILL)
                state.commit()

    train(state)
    return table.weight.view(-1).view(torch.int32).tolist()


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_sparse_gradients_have_the_bits_of_one_rank_through_a_kill(crew, tmp_path, backend):
    for name in ("one", "three"):
        (tmp_path / name).mkdir()
    expected = crew.fit(with_sparse_gradients, args=(tmp_path / "one",), np=1).results()
    job = crew.fit(
        with_sparse_gradients, args=(tmp_path / "three",), np=3, min_np=1, backend=backend
    )
    assert (tmp_path / "three" / "killed").exists()
    for found in job.results():
        assert found == expected[0]
