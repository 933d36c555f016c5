"""What tests of gradients share: the ways in which gradients go, by turns, and small buckets."""

from __future__ import annotations

import pytest

from tests.collectives.worlds import KINDS
from tests.support.processes import Ranks
from tests.torch.modes import MODES, set_mode


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def ranks():
    """Ranks in processes: backward has one thread for a GPU in each, so they cannot be threads."""
    with Ranks(3) as ranks:
        yield ranks


@pytest.fixture(params=MODES)
def mode(request):
    return request.param


@pytest.fixture
def small_buckets(monkeypatch, mode):
    set_mode(monkeypatch, mode, 200, 800)
