"""Agreement of a generation's ranks on the samples that all have done."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING

from nbelastic.elastic.shards import choose_root
from nbelastic.elastic.state_payload import StatePayload
from nbelastic.elastic.transfer import allgather_object, spread
from nbelastic.errors import NbelasticError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nbelastic.elastic.context import Context
    from nbelastic.elastic.sampler import ShardSampler
    from nbelastic.elastic.shards import Claim, Deal, Wire


def agree_on_progress(
    samplers: Sequence[ShardSampler], context: Context, behind: Sequence[int] = ()
) -> list[Deal]:
    """Return the samples that are left to do, the same on all ranks; change nothing.

    Parameters
    ----------
    samplers : sequence of ShardSampler
        Samplers of this rank's state, in an order that is the same on all ranks.
    context : Context
        This rank's.
    behind : sequence of int
        Ranks without the newest state, whose claims do not count; the same on all ranks.

    Returns
    -------
    list of Deal
        One for each sampler, to be installed.
    """
    if not samplers:
        return []
    rank, size = context.rank, context.size
    root, apart, claims = _claims_of_all(samplers, context, behind)
    receivers = sorted({*apart, *behind})
    deals: list[Deal] = []
    if rank not in receivers:
        columns = zip(*claims.values(), strict=True)
        pairs = zip(samplers, columns, strict=True)
        deals = [sampler.merge_claims(column, size) for sampler, column in pairs]
    if receivers and (rank == root or rank in receivers):
        wires = _hand_out(context, [root, *receivers], [deal.pack() for deal in deals])
        pairs_of_wires = zip(samplers, wires, strict=True)
        deals = [sampler.unpack(wire, size) for sampler, wire in pairs_of_wires]
    return deals


def _claims_of_all(
    samplers: Sequence[ShardSampler], context: Context, behind: Sequence[int]
) -> tuple[int, list[int], dict[int, list[Claim]]]:
    """Return the rank with the right deals, ranks with others, and the claims that count."""
    newest = [each for each in range(context.size) if each not in behind]
    mine = [sampler.claim() for sampler in samplers]
    if len(newest) <= 1:
        return context.source, [], {context.rank: mine}
    everyone = allgather_object(context.communicator(), None if context.rank in behind else mine)
    claims = {each: everyone[each] for each in newest}
    if len({len(each) for each in claims.values()}) > 1:
        raise NbelasticError("the states of the ranks do not have the same samplers")
    return (*choose_root(claims, context.source), claims)


def _hand_out(context: Context, members: Sequence[int], wires: list[Wire]) -> list[Wire]:
    payload = StatePayload(pickle.dumps(wires)) if context.rank == members[0] else None
    received: list[Wire] = pickle.loads(spread(context.communicator(), members, payload).head)
    return received
