"""What is said where pygloo is asked for and missing."""

from __future__ import annotations

import sys

import pytest

from nbelastic.collectives import Rendezvous, SoloCommunicator, connect


def rendezvous(size):
    return Rendezvous(
        job="job", generation=1, rank=0, size=size, store=("", 0), bind="", backend="pygloo"
    )


def test_it_says_which_package_is_missing_and_for_which_python(monkeypatch):
    monkeypatch.setitem(sys.modules, "pygloo", None)
    monkeypatch.delitem(sys.modules, "nbelastic.collectives.gloo.with_pygloo", raising=False)
    with pytest.raises(ImportError, match=r"pygloo.*Python 3.8 to 3.10.*pip install"):
        connect(rendezvous(2))


def test_a_rank_alone_needs_none(monkeypatch):
    monkeypatch.setitem(sys.modules, "pygloo", None)
    assert isinstance(connect(rendezvous(1)), SoloCommunicator)
