"""Callbacks on the rank that becomes the main one, and attributes that are a rank's own."""

from __future__ import annotations

import pytest

from tests.support.clusters import sizes
from tests.trainers import main_rank

pytest.importorskip("accelerate")
pytest.importorskip("transformers")
pytest.importorskip("lightning")


@pytest.mark.parametrize("name", ["transformers", "lightning", "accelerate"])
def test_a_rank_that_becomes_the_main_one_begins_its_callbacks(crew, tmp_path, name):
    function = getattr(main_rank, f"with_{name}")
    job = crew.fit(function, args=(str(tmp_path),), np=2, min_np=1, max_np=2)
    assert sizes(job)[:2] == [2, 1]
    found = job.results()
    assert len({each["steps"] for each in found}) == 1
    for each in found:
        assert (each["main"], each["begins"], each["counts"]) == (True, 1, 0)
    written = main_rank.lines(tmp_path)
    assert len(written) == 2, "one by each main rank, and none by others"
    steps = sorted(step for each in written.values() for step in each)
    assert set(steps) == set(range(1, found[0]["steps"] + 1))
