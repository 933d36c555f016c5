"""Backends by name, and one that another package brings: the seam that a transport fits."""

from __future__ import annotations

import inspect

import pytest
import torch

from nbelastic import collectives
from nbelastic.collectives import Op, Rendezvous, backend_names, connect
from nbelastic.collectives.reduction_tree import Blocks
from nbelastic.driver.options import Options
from nbelastic.errors import CollectiveError, OptionError
from tests.collectives.worlds import PATIENCE_S, World, of
from tests.support import own_transport


@pytest.fixture
def another_package(tmp_path, monkeypatch):
    """Install a package with an entry point."""
    info = tmp_path / "somebodys-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: somebodys\nVersion: 1.0\n")
    points = "[nbelastic.backends]\nown = tests.support.own_transport:OwnTransport\n"
    (info / "entry_points.txt").write_text(points)
    monkeypatch.syspath_prepend(tmp_path)
    collectives._brought.cache_clear()
    yield
    collectives._brought.cache_clear()


def test_a_backend_of_another_package_is_an_option_while_that_is_installed(another_package):
    assert backend_names()[-1] == "own"
    assert Options(backend="own").backend == "own"


def test_an_unknown_backend_is_refused():
    with pytest.raises(OptionError, match="backend='own': must be one of auto, gloo, shm"):
        Options(backend="own")
    its = Rendezvous(job="a", generation=1, rank=0, size=2, store=("", 0), bind="", backend="own")
    with pytest.raises(ValueError, match=r"backend must be one of .*'auto', 'gloo'.* not 'own'"):
        connect(its)


def test_a_transport_is_a_page():
    lines = inspect.getsource(own_transport.OwnTransport).splitlines()
    assert sum(bool(line.strip()) for line in lines) < 60


@pytest.mark.parametrize("size", [2, 3])
def test_a_transport_of_another_package_has_all_operations(another_package, size):
    """Also those with checks, empty tensors, trees and several tensors, which it does not know."""
    blocks = Blocks.even(5, size)

    def rank_main(c):
        assert c.name == "own"
        mine = torch.arange(3.0) + c.rank
        summed, averaged = mine.clone(), mine.clone()
        handles = [c.allreduce_async(summed), c.allreduce_async(averaged, Op.AVERAGE)]
        c.allreduce_coalesced([torch.ones(2), torch.ones(0)], Op.MAX)
        for handle in handles:
            handle.wait()
        sent = mine.clone()
        c.broadcast(sent, root=1)
        gathered = [torch.empty(3) for _ in range(size)]
        c.allgather(gathered, mine)
        scattered = torch.empty(3)
        c.reduce_scatter(scattered, [mine * rank for rank in range(size)])
        swapped = [torch.empty(c.rank + 1) for _ in range(size)]
        c.all_to_all(swapped, [torch.full((rank + 1,), float(c.rank)) for rank in range(size)])
        leaves = [[torch.full((2,), float(sum(range(*node))))] for node in blocks.covers[c.rank]]
        total = torch.empty(2)
        c.allreduce_tree(leaves, blocks, [total])
        assert c.agree("the same", c.rank) == list(range(size))
        if c.rank == 0:
            c.send(mine, 1)
        if c.rank == 1:
            c.receive(gathered[0], 0)
        with pytest.raises(ValueError, match="not contiguous"):
            c.allreduce(torch.ones(2, 3).t())
        c.barrier()
        return summed, averaged, sent, gathered, scattered, swapped, total

    with World(of("own"), size) as world:
        outcomes = world.run(rank_main)
    everyone = torch.stack([torch.arange(3.0) + rank for rank in range(size)])
    for rank, (summed, averaged, sent, gathered, scattered, swapped, total) in enumerate(outcomes):
        assert summed.equal(everyone.sum(0))
        assert averaged.equal(everyone.mean(0))
        assert sent.equal(everyone[1])
        assert torch.stack(gathered).equal(everyone)
        assert scattered.equal(everyone.sum(0) * rank)
        assert [each.unique().tolist() for each in swapped] == [[float(r)] for r in range(size)]
        assert total.tolist() == [10.0, 10.0]


def test_an_abort_frees_a_rank_that_waits_in_it(another_package):
    with World(of("own"), 2) as world:
        waiting = world.start(0, lambda c: c.allreduce(torch.ones(3)))
        world.wait_until_waiting([0])
        world[0].abort("enough")
        assert isinstance(waiting.exception(PATIENCE_S), CollectiveError)
