"""What tests of gradients share: the ways in which gradients go, by turns, and small buckets."""

import pytest

from nbelastic.elastic.ranks.context import activate
from tests.torch.fakes import ChangingContext, TwinCommunicator
from tests.torch.modes import MODES, set_mode


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
