"""Process sets, names and joined ranks: who takes part, and in which order."""

from nbelastic.torch.ops.coordination.comparison import agree, begin
from nbelastic.torch.ops.coordination.coordination import (
    announce,
    coordination_of,
    coordination_over,
    is_joined,
)
from nbelastic.torch.ops.coordination.joined_rank import SERVICES, at_end, join
from nbelastic.torch.ops.coordination.process_sets import (
    ProcessSet,
    add_first_sets,
    add_process_set,
    added_set,
    global_process_set,
    group_in,
    group_of,
    remove_process_set,
    set_of_id,
)

__all__ = [
    "SERVICES",
    "ProcessSet",
    "add_first_sets",
    "add_process_set",
    "added_set",
    "agree",
    "announce",
    "at_end",
    "begin",
    "coordination_of",
    "coordination_over",
    "global_process_set",
    "group_in",
    "group_of",
    "is_joined",
    "join",
    "remove_process_set",
    "set_of_id",
]
