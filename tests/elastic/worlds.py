"""Samplers of a world of many ranks, in one thread."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nbelastic.collectives import SoloCommunicator
from nbelastic.elastic.context import activate
from nbelastic.elastic.sampler import ShardSampler
from nbelastic.elastic.shards import choose_root
from tests.support.world import StaticContext

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from nbelastic.elastic.shards import Deal


def world_of(rank: int, size: int) -> StaticContext:
    context = StaticContext(SoloCommunicator(generation=1))
    context.rank, context.size = rank, size
    return context


def sampler_at(rank: int, size: int, length: int, **options: Any) -> ShardSampler:
    with activate(world_of(rank, size)):
        return ShardSampler(range(length), **options)


def settle_all(samplers: Sequence[ShardSampler], source: int, behind: Collection[int]) -> None:
    """Do what the ranks of a new generation do together; sampler i is that of rank i."""
    deals = deals_of_all(samplers, source, behind)
    for rank, (sampler, deal) in enumerate(zip(samplers, deals, strict=True)):
        sampler.install(deal, rank, resumed=True)


def deals_of_all(
    samplers: Sequence[ShardSampler], source: int, behind: Collection[int]
) -> list[Deal]:
    """Return what each rank would install."""
    size = len(samplers)
    claims = {r: [s.claim()] for r, s in enumerate(samplers) if r not in behind}
    root, apart = choose_root(claims, source)
    column = [each[0] for each in claims.values()]
    wire = samplers[root].merge_claims(column, size).pack()
    deals = [
        sampler.unpack(wire, size)
        if rank in behind or rank in apart
        else sampler.merge_claims(column, size)
        for rank, sampler in enumerate(samplers)
    ]
    assert len({deal.key for deal in deals}) == 1
    assert len({deal.merges for deal in deals}) == 1
    return deals
