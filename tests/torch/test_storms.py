"""Storms over real transports, which change no bit of a training; thousands: tests/simulation."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import pytest

from tests.collectives.worlds import KINDS, MAKERS
from tests.support.exact_training import STEPS, one_thread, train_alone

from .storms import Storm, blows_of

if TYPE_CHECKING:
    from .storms import Blow

STORMS = 3

alone = functools.cache(train_alone)


@pytest.mark.parametrize("number", range(STORMS))
@pytest.mark.parametrize("kind", KINDS)
def test_a_storm_over_real_transports_changes_no_bit(kind: str, number: int) -> None:
    seed = number + STORMS * list(MAKERS).index(kind)
    blows = blows_of(seed)
    storm = play(kind, blows, 2 + seed % 3)
    assert storm.generations > 1, blows
    assert storm.backends <= {kind, "solo"}


def play(kind: str, blows: list[Blow], size: int) -> Storm:
    """Play a storm and check what came out."""
    storm = Storm(blows, size, MAKERS[kind])
    print(f"{kind}, {size} ranks: {blows}")
    with one_thread():
        results = storm.run()
    digest, ledger = alone(random=False)
    assert set(results) == {(STEPS, digest)}
    assert storm.ledger == ledger
    return storm
