"""Places where torch and trainers keep the world, written anew in each generation."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import distributed_c10d as c10d

if TYPE_CHECKING:
    from nbelastic.elastic.context import Context
    from nbelastic.torch.process_group.group import ElasticProcessGroup

__all__ = ["set_environment", "write_ranks", "write_world"]


def set_environment(context: Context) -> None:
    """Set the variables in which trainers look for the world before they ask torch."""
    os.environ.update(
        RANK=str(context.rank),
        WORLD_SIZE=str(context.size),
        LOCAL_RANK=str(context.local_rank),
        LOCAL_WORLD_SIZE=str(context.local_size),
    )
    if not torch.cuda.is_available():
        # Without it accelerate takes a rank on a host without GPU for a world of its own.
        os.environ.setdefault("ACCELERATE_USE_CPU", "true")


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
