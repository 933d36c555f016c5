"""Storms that end with the bits of a training on one rank without faults."""

from __future__ import annotations

import re

import pytest

from nbelastic.torch.gradients import micro_batches

from .__main__ import story
from .exact import BadMemory, storm

STORMS, SHARDS = 60, 2


@pytest.mark.parametrize("shard", range(SHARDS))
def test_a_storm_changes_no_bit(shard: int) -> None:
    finished = changes = 0
    for seed in range(shard, 2 * STORMS, SHARDS):
        try:
            world = storm(seed)
        except Exception:
            pytest.fail(story(seed, storm))
        finished += world.end == "finished"
        changes += world.changes
        if finished == STORMS // SHARDS:
            assert changes, "no storm has changed quotas"
            return
    pytest.fail(f"of {2 * STORMS // SHARDS} storms, only {finished} left a result")


@pytest.mark.parametrize("seed", range(6))
def test_a_rank_whose_memory_fails_is_named_and_left_out(seed, monkeypatch):
    """It would change all parameters by its gradients, if it was not noticed in that step."""
    monkeypatch.setattr(micro_batches, "WITNESS_EVERY", 1)
    world = storm(seed, kind=BadMemory)
    assert world.end == "finished"
    assert world.struck
    errors = [failure.summary for failure in world.driver.log.failures.values()]
    (named,) = {error for error in errors if "are not those of most" in error}
    assert re.search(
        r"the parameters of rank \d are not those of most \(rank 0: [0-9a-f]{13}, ", named
    )
