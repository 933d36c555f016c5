"""Fixtures of the conformance suite, for communicators of every kind."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.collectives.worlds import KINDS, MAKERS, World

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.collectives.worlds import Maker

SIZES = [1, 2, 3, *(pytest.param(size, marks=pytest.mark.nightly) for size in (4, 5))]


@pytest.fixture(params=KINDS, scope="session")
def make(request: pytest.FixtureRequest) -> Maker:
    """Make a communicator of the kind that is tested."""
    return MAKERS[request.param]


@pytest.fixture(params=SIZES, ids="size{}".format, scope="module")
def world(make: Maker, request: pytest.FixtureRequest) -> Iterator[World]:
    """A whole world of each size, for tests that leave it whole."""
    with World(make, request.param) as world:
        yield world


@pytest.fixture
def pair(make: Maker) -> Iterator[World]:
    """Two ranks, for tests that break them."""
    with World(make, 2) as world:
        yield world
