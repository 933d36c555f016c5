"""What tests of gradients share: the ways in which gradients go, by turns, and small buckets."""

from __future__ import annotations

import pytest

from tests.torch.modes import MODES, set_mode


@pytest.fixture(params=MODES)
def mode(request):
    return request.param


@pytest.fixture
def small_buckets(monkeypatch, mode):
    set_mode(monkeypatch, mode, 200, 800)
