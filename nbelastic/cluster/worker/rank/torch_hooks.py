"""Hook into torch to detect a rank that trains without nbelastic.

Ranks often run code that was written for ``torch.distributed``. Two functions show that:
``init_process_group`` and ``SyncBatchNorm``. Steps of optimizers show what is trained, which should
be the same on all ranks.
"""

from __future__ import annotations

import functools
import importlib
import sys
import weakref
from collections.abc import Callable
from typing import Any

from nbelastic.elastic.ranks.context import Context, current_or_none
from nbelastic.elastic.ranks.session import warn
from nbelastic.elastic.training_checks import note_step
from nbelastic.errors import summary_of

GROUP_ADVICE = (
    'Call torch.distributed.init_process_group("nbelastic") first: in a rank it needs neither '
    "address nor rank nor size. Or use nbelastic.torch (DistributedOptimizer, allreduce), which "
    "needs no process group."
)

_NO_GROUP = "process group has not been initialized"

SYNC_WARNING = (
    "torch.nn.SyncBatchNorm uses each rank's own statistics\n"
    "It needs a process group of torch.distributed. Without one it acts as BatchNorm, and its "
    "running statistics differ between ranks.\n"
    "Use hvd.SyncBatchNorm; hvd.convert_sync_batchnorm(model) puts it in the place of this layer."
)


def hook_torch() -> None:
    """Hook torch in this process."""
    import torch.distributed
    from torch.distributed import distributed_c10d
    from torch.nn.modules import batchnorm
    from torch.optim import optimizer

    _hook_groups(distributed_c10d, torch.distributed)
    _hook_batch_norm(batchnorm.SyncBatchNorm)
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


# -- SyncBatchNorm ---------------------------------------------------------------------------------


def _hook_batch_norm(kind: Any) -> None:
    def hook(original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def made(self: object, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            context = current_or_none()
            if context is not None and context.size > 1:
                known = [each for each in context.before_exchange if isinstance(each, _GroupCheck)]
                (known[0] if known else _GroupCheck(context)).modules.add(self)

        return made

    kind.__init__, kind.__setstate__ = hook(kind.__init__), hook(kind.__setstate__)


class _GroupCheck:
    """Warns before an exchange if `modules` have trained without a group of torch's."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self.modules: weakref.WeakSet[Any] = weakref.WeakSet()
        context.before_exchange += (self,)

    def __call__(self) -> None:
        context = self._context
        # One has counted a batch, which the counter's version shows without a look at a device.
        counters = [getattr(m, "num_batches_tracked", None) for m in self.modules if m.training]
        if not any(each is None or each._version > 0 for each in counters):
            return
        context.before_exchange = tuple(each for each in context.before_exchange if each != self)
        grouped = sys.modules["torch.distributed"].is_initialized()
        if context.size > 1 and (context.in_torch_group is False or not grouped):
            warn(context, SYNC_WARNING)


# -- optimizers ------------------------------------------------------------------------------------


def _stepped(optimizer: Any, *_: object) -> None:
    context = current_or_none()
    if context is not None:
        note_step(context, optimizer)
