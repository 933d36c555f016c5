"""Warm-up of a rank: a generation that it forms alone."""

from __future__ import annotations

import threading

import pytest

from nbelastic.collectives import Rendezvous, RendezvousServer
from nbelastic.elastic.ranks import warmup


def terms(store: tuple[str, int], backend: str = "auto") -> Rendezvous:
    return Rendezvous(
        job="alone", generation=0, rank=0, size=1, store=store, bind="127.0.0.1", backend=backend
    )


def left() -> list[str]:
    return [each.name for each in threading.enumerate() if "warmup" in each.name]


@pytest.mark.parametrize("backend", ["auto", "gloo"])
def test_a_generation_formed_alone_leaves_no_thread(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    met = []

    def connect(rendezvous: Rendezvous) -> object:
        met.append((rendezvous.rank, rendezvous.size, rendezvous.backend))
        return original(rendezvous)

    original = warmup.connect
    monkeypatch.setattr(warmup, "connect", connect)
    store = RendezvousServer("127.0.0.1")
    warmup.form_alone(terms(store.address, backend))
    store.close()
    assert sorted(met) == [(0, 2, backend), (1, 2, backend)]
    assert not left()


def test_an_error_of_a_generation_formed_alone_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warmup, "LIMIT_S", 0.2)
    store = RendezvousServer("127.0.0.1")
    store.close()
    warmup.form_alone(terms(store.address))
    assert not left()
