"""Places where torch and trainers keep the world, written anew in each generation."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from torch.distributed import distributed_c10d as c10d

if TYPE_CHECKING:
    from nbelastic.torch.process_group.group import ElasticProcessGroup


def write_ranks(group: ElasticProcessGroup) -> None:
    """Write the present ranks of a group to where torch maps them to positions."""
    world: Any = c10d._world
    world.pg_group_ranks[group] = {rank: place for place, rank in enumerate(group.ranks)}


def write_world(group: ElasticProcessGroup) -> None:
    """Write the present ranks to where accelerate has kept them."""
    context = group.context
    states = sys.modules.get("accelerate.state")
    for name in ("PartialState", "AcceleratorState"):  # the second has a copy of the first
        shared = getattr(getattr(states, name, None), "_shared_state", None)
        if shared and "num_processes" in shared:
            shared["num_processes"] = context.size
            shared["process_index"] = context.rank
            shared["local_process_index"] = context.local_rank
