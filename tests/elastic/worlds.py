"""Samplers of a world of many ranks, in one thread."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nbelastic.collectives import SoloCommunicator
from nbelastic.elastic.ranks.context import activate
from nbelastic.elastic.sampler import ShardSampler, least_progress
from tests.support.world import StaticContext

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from nbelastic.elastic.sampler import SamplerProgress


def world_of(rank: int, size: int) -> StaticContext:
    context = StaticContext(SoloCommunicator(generation=1))
    context.rank, context.size = rank, size
    return context


def sampler_at(rank: int, size: int, length: int, **options: Any) -> ShardSampler:
    with activate(world_of(rank, size)):
        return ShardSampler(range(length), **options)


def settle_all(samplers: Sequence[ShardSampler], source: int, behind: Collection[int]) -> None:
    """Do what the ranks of a new generation do together; sampler i is that of rank i."""
    progress = progress_of_all(samplers, source, behind)
    for rank, sampler in enumerate(samplers):
        sampler.install(progress, rank, len(samplers), resumed=True)


def progress_of_all(
    samplers: Sequence[ShardSampler], source: int, behind: Collection[int]
) -> SamplerProgress:
    """Return what each rank would install."""
    [found] = least_progress([[each.progress()] for each in samplers], source, behind)
    return found
