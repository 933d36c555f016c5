"""Statistics of batches in models, averaged over the micro-batches of a step.

Batch norm keeps running means of what it sees, so after a step its buffers would depend on which
micro-batches a rank has computed, and in which order. Here each micro-batch begins with the buffers
of the step's start, and the new values are averaged along the tree of the gradients. A running mean
is linear in the statistics of its batch, so that is the running mean over the whole step, the same
on all ranks and for every number of ranks.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy

from nbelastic.collectives import Op
from nbelastic.elastic.context import current
from nbelastic.torch.gradients.tree_sums import MicroBatchSum, sum_over_ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from nbelastic.elastic.step_share import StepShare

__all__ = ["BufferMeans"]


class BufferMeans:
    """Participant in the steps of a loader that averages buffers of models.

    Parameters
    ----------
    models : callable
        Returns the models.
    forgo_exactness : callable
        Called with a reason when a buffer changes that is no running mean.
    """

    def __init__(
        self,
        models: Callable[[], Sequence[torch.nn.Module]],
        forgo_exactness: Callable[[str], None],
    ) -> None:
        self._models = models
        self._forgo = forgo_exactness
        self._share: StepShare | None = None
        self._found = False
        self._means: list[torch.Tensor] = []
        self._counts: list[torch.Tensor] = []
        self._others: dict[str, torch.Tensor] = {}
        self._versions: dict[str, int] = {}
        self._mean_starts: list[torch.Tensor] = []
        self._count_starts: list[torch.Tensor] = []
        self._largest: list[torch.Tensor] = []
        self._sums: list[MicroBatchSum] = []

    def begin(self, share: StepShare) -> None:
        """Begin a step. Buffers are looked for later, because the model's mode may still change."""
        self._share, self._found = share, False

    def before(self, number: int) -> None:
        """Set all means and counts to what they were when the step began."""
        del number
        self._find()
        _copy(self._means, self._mean_starts)
        _copy(self._counts, self._count_starts)

    @torch.no_grad()
    def after(self, number: int) -> None:
        """Take the new values of a micro-batch."""
        share = self._share
        assert share is not None
        weight = share.row_weights[number]
        for buffer, total in zip(self._means, self._sums, strict=True):
            total.add(number, buffer * weight)
        if self._counts:
            torch._foreach_maximum_(self._largest, self._counts)
        if share.exact:
            for name, buffer in self._others.items():
                if buffer._version != self._versions[name]:
                    self._versions[name] = buffer._version
                    self._forgo(
                        f"the buffer {name} of a model changes in training and is no running mean, "
                        "so each rank has its own"
                    )

    @torch.no_grad()
    def end(self) -> None:
        """Average over all micro-batches. All ranks call this at the same point."""
        self._find()
        share = self._share
        assert share is not None
        if not self._means:
            return
        context = current()
        communicator = context.communicator()
        totals = sum_over_ranks(communicator, share, self._sums, self._means)
        torch._foreach_div_(totals, math.fsum(share.row_weights))
        _copy(self._means, totals)
        largest = self._largest
        if largest and _has_idle_ranks(share, context.size):
            flat = torch.stack([count.to("cpu", torch.int64) for count in largest])
            communicator.allreduce(flat, Op.MAX)
            largest = list(flat.unbind())
        _copy(self._counts, largest)
        self._sums = []

    def _find(self) -> None:
        """Look for the buffers, once in a step."""
        if self._found:
            return
        self._found = True
        share = self._share
        assert share is not None
        means: dict[int, torch.Tensor] = {}
        counts: dict[int, torch.Tensor] = {}
        others: dict[str, torch.Tensor] = {}
        for model in self._models():
            for path, module in model.named_modules():
                for name, buffer in module._buffers.items():
                    if buffer is None:
                        continue
                    if is_lazy(buffer):
                        raise RuntimeError(
                            f"the buffer {path}.{name} of a model is not initialised; call the "
                            "model on a batch before the first step of a loader"
                        )
                    if not isinstance(module, _NormBase):
                        others[f"{path}.{name}".lstrip(".")] = buffer
                    elif not module.training:
                        continue
                    elif buffer.is_floating_point():
                        means[id(buffer)] = buffer
                    else:
                        counts[id(buffer)] = buffer
        self._means, self._counts = list(means.values()), list(counts.values())
        self._others = others
        self._versions = {name: buffer._version for name, buffer in others.items()}
        self._mean_starts = [buffer.detach().clone() for buffer in self._means]
        self._count_starts = [buffer.detach().clone() for buffer in self._counts]
        self._largest = [buffer.detach().clone() for buffer in self._counts]
        self._sums = [MicroBatchSum(share) for _ in self._means]


def _has_idle_ranks(share: StepShare, size: int) -> bool:
    """Return whether a rank has no micro-batch in this step, so that it has counted nothing."""
    blocks = map(share.blocks_of(size).block, range(size))
    return any(not any(share.row_weights[number] for number in block) for block in blocks)


@torch.no_grad()
def _copy(into: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    for buffer, value in zip(into, values, strict=True):
        buffer.copy_(value)
