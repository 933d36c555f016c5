"""Clusters whose ranks train with Keras; all of it is skipped where Keras is not installed."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.clusters import Crew, a_crew

HERE = Path(__file__).parent
BACKEND = os.environ.setdefault("KERAS_BACKEND", "torch")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip, visibly, what needs Keras or another back end."""
    missing = importlib.util.find_spec("keras") is None
    for item in items:
        if not item.path.is_relative_to(HERE):
            continue
        if missing:
            item.add_marker(pytest.mark.skip(reason="Keras is not installed: `make test-keras`"))
            continue
        mark = item.get_closest_marker("backends")
        if mark is not None and BACKEND not in mark.args:
            item.add_marker(pytest.mark.skip(reason=f"not for KERAS_BACKEND={BACKEND}"))


@pytest.fixture(scope="session")
def _three_workers() -> Iterator[Crew]:
    with a_crew(n_workers=3) as crew:
        yield crew


@pytest.fixture
def one_rank() -> Iterator[Any]:
    """``nbelastic.keras`` on one rank, in this process."""
    import nbelastic.keras

    nbelastic.keras.init()
    yield nbelastic.keras
    nbelastic.keras.shutdown()


@pytest.fixture
def keras_crew(_three_workers: Crew) -> Iterator[Crew]:
    """Three workers; whatever a test kills is back before the next."""
    _three_workers.wait_until_whole(3)
    yield _three_workers
    _three_workers.end_jobs()
