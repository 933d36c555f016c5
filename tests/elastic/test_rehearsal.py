"""A newcomer's try by itself."""

from __future__ import annotations

import threading

import pytest

from nbelastic.collectives import Rendezvous, open_store
from nbelastic.elastic import rehearsal


def terms(store: tuple[str, int], backend: str = "auto") -> Rendezvous:
    return Rendezvous(
        job="alone", generation=0, rank=0, size=1, store=store, bind="127.0.0.1", backend=backend
    )


def left() -> list[str]:
    return [each.name for each in threading.enumerate() if "rehearsal" in each.name]


@pytest.mark.parametrize("backend", ["auto", "gloo"])
def test_a_rehearsal_meets_nobody_and_leaves_nothing(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    met = []

    def connect(rendezvous: Rendezvous) -> object:
        met.append((rendezvous.rank, rendezvous.size, rendezvous.backend))
        return original(rendezvous)

    original = rehearsal.connect
    monkeypatch.setattr(rehearsal, "connect", connect)
    store = open_store("127.0.0.1")
    rehearsal.rehearse(terms(store.address, backend))
    store.close()
    assert sorted(met) == [(0, 2, backend), (1, 2, backend)]
    assert not left()


def test_one_that_fails_is_nobodys_business(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rehearsal, "LIMIT_S", 0.2)
    store = open_store("127.0.0.1")
    store.close()
    rehearsal.rehearse(terms(store.address))
    assert not left()
