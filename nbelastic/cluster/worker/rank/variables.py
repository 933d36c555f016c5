"""Variables in which torchrun and horovodrun tell a process its rank.

Trainers and scripts read them before they ask ``torch.distributed``, and some once more in each
epoch.
"""

from __future__ import annotations

import os
import warnings
from typing import TYPE_CHECKING

import torch

from nbelastic.elastic.ranks.runtime import own_gpu_first

if TYPE_CHECKING:
    from nbelastic.elastic.ranks.context import Context

_NO_ADDRESS = "nbelastic.invalid"


def keep_variables(context: Context) -> None:
    """Set the variables now, and again as each generation has formed.

    Before the first one they have the foreseen ranks.
    """

    def write() -> None:
        os.environ.update(
            RANK=str(context.rank),
            WORLD_SIZE=str(context.size),
            LOCAL_RANK=str(context.local_rank),
            LOCAL_WORLD_SIZE=str(context.local_size),
            HOROVOD_RANK=str(context.rank),
            HOROVOD_SIZE=str(context.size),
            HOROVOD_LOCAL_RANK=str(context.local_rank),
            HOROVOD_LOCAL_SIZE=str(context.local_size),
            HOROVOD_CROSS_RANK=str(context.cross_rank),
            HOROVOD_CROSS_SIZE=str(context.cross_size),
        )

    write()
    context.after_forming = (write, *context.after_forming)
    # accelerate refuses ranks on several hosts without an address. The process group needs none.
    # A name that never resolves makes other uses of it fail at once instead of waiting for a host.
    os.environ.setdefault("MASTER_ADDR", _NO_ADDRESS)
    os.environ.setdefault("MASTER_PORT", "29500")  # torchrun's default
    with warnings.catch_warnings():  # of a driver that does not work
        warnings.simplefilter("ignore")
        # It asks the driver's library, so that forks of the rank can still use the GPU.
        gpus = torch.cuda.device_count()
    if not gpus:
        # Without it accelerate makes a rank on a host without GPU a world of its own.
        os.environ.setdefault("ACCELERATE_USE_CPU", "true")
    elif own_gpu_first():
        # accelerate and Transformers take the GPU of LOCAL_RANK, which is another worker's.
        os.environ.setdefault("ACCELERATE_TORCH_DEVICE", "cuda:0")
