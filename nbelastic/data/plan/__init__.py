"""Plan of an epoch: rows and rank of each micro-batch; pure.

It depends on seeds, sizes and the times that ranks have told each other, so each rank computes the
same plan by itself. The linter refuses torch, clocks and threads here.
"""

from .dealing import BlockSchedule, Dealing, imbalance
from .leases import LeaseTable
from .permutation import Draws, Permutation, Rows, mix
from .quotas import Balance, Pace, is_straggler, slowness
from .ranges import UnitStreams, Window

__all__ = [
    "Balance",
    "BlockSchedule",
    "Dealing",
    "Draws",
    "LeaseTable",
    "Pace",
    "Permutation",
    "Rows",
    "UnitStreams",
    "Window",
    "imbalance",
    "is_straggler",
    "mix",
    "slowness",
]
