"""Process sets, names and joined ranks: members and order of operations."""

from nbelastic.torch.ops.coordination.joined_rank import join
from nbelastic.torch.ops.coordination.process_sets import (
    ProcessSet,
    add_process_set,
    global_process_set,
    group_of,
    remove_process_set,
    set_of_id,
)

__all__ = [
    "ProcessSet",
    "add_process_set",
    "global_process_set",
    "group_of",
    "join",
    "remove_process_set",
    "set_of_id",
]
