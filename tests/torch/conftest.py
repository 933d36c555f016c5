"""What tests of gradients share: the ways in which gradients go, by turns, and small buckets."""

import threading

import pytest

from nbelastic.elastic.ranks.context import activate
from tests.support.world import world_of
from tests.torch.fakes import ChangingContext, TwinCommunicator
from tests.torch.modes import MODES, set_mode


@pytest.fixture(params=MODES)
def mode(request):
    return request.param


@pytest.fixture
def small_buckets(monkeypatch, mode):
    set_mode(monkeypatch, mode, 200, 800)


@pytest.fixture
def alone():
    """The only rank of a world."""
    context = world_of(0, 1)
    with activate(context):
        yield context


@pytest.fixture
def twin():
    """A rank whose peer computes the same."""
    context = ChangingContext(TwinCommunicator(generation=1))
    with activate(context):
        yield context


@pytest.fixture
def met():
    """An event of all ranks of a test."""
    return threading.Event()


@pytest.fixture
def all_met(size):
    """A barrier of all ranks of a test."""
    return threading.Barrier(size, timeout=20)
