"""Fixtures of the conformance suite, for communicators of every kind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch._dynamo  # noqa: F401 - as in tests/support/processes.py

from tests.collectives.worlds import KINDS, MAKERS, Maker, World

# A rank alone has the same communicator whatever the kind. Two and five ranks in shared memory are
# added by different loops; of five, hosts have slices.
SIZES = {"shm": (2, 5), "hierarchical": (5,)}
WHOLE = [pytest.param(("auto", 1), id="auto-1"), pytest.param(("own", 2), id="own-2")]
WHOLE += [
    pytest.param((name, size), marks=kind.marks, id=f"{name}-{size}")
    for kind in KINDS
    for name in kind.values
    for size in SIZES.get(name, (3,))
]


@pytest.fixture(params=KINDS, scope="session")
def make(request: pytest.FixtureRequest) -> Maker:
    """Make a communicator of the kind that is tested."""
    return MAKERS[request.param]


@pytest.fixture(params=WHOLE, scope="module")
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    """A whole world of each kind, for tests that leave it whole."""
    kind, size = request.param
    with World(MAKERS[kind], size) as world:
        yield world


@pytest.fixture
def pair(make: Maker) -> Iterator[World]:
    """Two ranks, for tests that break them."""
    with World(make, 2) as world:
        yield world
