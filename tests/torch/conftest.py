"""What tests of gradients share: the ways in which gradients go, by turns, and small buckets."""

from __future__ import annotations

import pytest
import torch

from nbelastic.elastic.ranks.context import activate
from tests.collectives.worlds import KINDS
from tests.support.processes import Ranks
from tests.torch.fakes import ChangingContext, TwinCommunicator
from tests.torch.modes import MODES, set_mode


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def ranks():
    """Ranks in processes: backward has one thread for a GPU in each, so they cannot be threads."""
    with Ranks(3) as ranks:
        if torch.cuda.is_available():
            ranks.run(3, use_gpu)
        yield ranks


def use_gpu(_context=None):
    """Use the GPU: a rank that has not done so when a generation is formed does not reduce there.

    Processes are kept from test to test.
    """
    torch.zeros(1, device="cuda")


@pytest.fixture(params=MODES)
def mode(request):
    return request.param


@pytest.fixture
def small_buckets(monkeypatch, mode):
    set_mode(monkeypatch, mode, 200, 800)


@pytest.fixture
def twin():
    """A rank whose peer computes the same."""
    context = ChangingContext(TwinCommunicator(generation=1))
    with activate(context):
        yield context
