"""Hook into torch to detect a rank that trains without nbelastic.

Ranks often run code that was written for ``torch.distributed``, which ``init_process_group`` shows.
Steps of optimizers show what is trained, which should be the same on all ranks.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

from nbelastic.elastic.ranks.context import current_or_none
from nbelastic.elastic.training_checks import note_step
from nbelastic.errors import summary_of

GROUP_ADVICE = (
    'Call torch.distributed.init_process_group("nbelastic") first: in a rank it needs neither '
    "address nor rank nor size. Or use nbelastic.torch (DistributedOptimizer, allreduce), which "
    "needs no process group."
)

_NO_GROUP = "process group has not been initialized"


def hook_torch() -> None:
    """Hook torch in this process."""
    import torch.distributed
    from torch.distributed import distributed_c10d
    from torch.optim import optimizer

    _hook_groups(distributed_c10d, torch.distributed)
    optimizer.register_optimizer_step_post_hook(_stepped)


# -- torch.distributed -----------------------------------------------------------------------------


def _hook_groups(*modules: Any) -> None:
    original: Callable[..., None] = modules[0].init_process_group

    @functools.wraps(original)
    def init_process_group(*args: Any, **kwargs: Any) -> None:
        context = current_or_none()
        if context is None:
            original(*args, **kwargs)
            return
        # By name, because the room of torch is no part of the cluster's.
        groups = importlib.import_module("nbelastic.torch.process_group")
        groups.answer(original, *args, **kwargs)
        if groups.default_group() is None:
            context.in_torch_group = modules[0].get_world_size() > 1

    for module in modules:
        module.init_process_group = init_process_group


def advise(error: BaseException) -> None:
    """Add advice to an error about a missing process group or a missing Horovod."""
    if issubclass(type(error), ModuleNotFoundError) and "'horovod" in summary_of(error):
        advice = "Horovod's functions are in nbelastic: import nbelastic.torch as hvd"
    elif issubclass(type(error), (ValueError, RuntimeError)) and _NO_GROUP in summary_of(error):
        advice = GROUP_ADVICE
    else:
        return
    if hasattr(error, "add_note"):
        error.add_note(advice)
    elif len(error.args) == 1:  # Python 3.10
        error.args = (f"{error.args[0]}\n{advice}",)


# -- optimizers ------------------------------------------------------------------------------------


def _stepped(optimizer: Any, *_: object) -> None:
    context = current_or_none()
    if context is not None:
        note_step(context, optimizer)
