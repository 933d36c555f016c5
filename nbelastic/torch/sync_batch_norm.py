"""Batch normalisation with the statistics of all ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from nbelastic.elastic.ranks.context import current_or_none
from nbelastic.elastic.ranks.groups import Group
from nbelastic.errors import CollectiveError
from nbelastic.torch.ops.autograd import apply
from nbelastic.torch.ops.coordination.coordination import announce
from nbelastic.torch.ops.coordination.joined_rank import SERVICES
from nbelastic.torch.ops.coordination.process_sets import group_of


class SyncBatchNorm(_BatchNorm):
    """Batch normalisation of any number of dimensions, with mean and variance over all ranks.

    Ranks may have different numbers of samples, and none: each sample counts once. In evaluation,
    and on one rank, it does what :class:`torch.nn.BatchNorm2d` does. All ranks call the layer
    equally often in training. Gradients of `weight` and `bias` are those of this rank's samples,
    for a distributed optimizer to reduce.

    Parameters
    ----------
    num_features : int
        Number of channels, the second dimension of the input.
    eps : float, default 1e-5
        Added to the variance.
    momentum : float or None, default 0.1
        Weight of a batch in the running statistics; None for the mean over all batches.
    affine : bool, default True
        Whether there are `weight` and `bias`.
    track_running_stats : bool, default True
        Whether there are running statistics; without them evaluation uses those of the batch.
    process_set : ProcessSet, optional
        The ranks that share statistics; by default all.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_set: object = None,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats)
        self.process_set = process_set

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"SyncBatchNorm needs at least 2 dimensions, not {input.dim()}")
        if input.shape[1] != self.num_features:
            raise ValueError(
                f"SyncBatchNorm has {self.num_features} features, the input {input.shape[1]}"
            )

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalise `input`, of shape (samples, channels, …)."""
        group = None
        if current_or_none() is not None and (self.training or not self.track_running_stats):
            group = group_of(self.process_set)
        if group is None or group.size == 1:
            alone: torch.Tensor = super().forward(input)
            return alone
        self._check_input_dim(input)
        output: torch.Tensor
        output, mean, variance, count = apply(
            _Normalise, group, self.eps, input, self.weight, self.bias
        )
        if self.training and self.track_running_stats:
            assert self.num_batches_tracked is not None
            assert self.running_mean is not None
            assert self.running_var is not None
            self.num_batches_tracked.add_(1)
            weight = self.momentum
            if weight is None:  # a mean over all batches
                weight = 1.0 / float(self.num_batches_tracked)
            unbiased = variance * (count / (count - 1).clamp(min=1))  # as torch's layers keep it
            self.running_mean.lerp_(mean.to(self.running_mean.dtype), weight)
            self.running_var.lerp_(unbiased.to(self.running_var.dtype), weight)
        return output

    @classmethod
    def convert_sync_batchnorm(
        cls, module: torch.nn.Module, process_set: object = None
    ) -> torch.nn.Module:
        """Replace each batch normalisation in a module by this layer.

        Parameters, running statistics and mode stay the same objects, so an optimizer of them stays
        right.

        Parameters
        ----------
        module : torch.nn.Module
            Changed in place, unless it is a batch normalisation itself. Layers of torch's own
            ``torch.nn.SyncBatchNorm`` are replaced as well.
        process_set : ProcessSet, optional
            The ranks that share statistics.

        Returns
        -------
        torch.nn.Module
            `module`, or its replacement.
        """
        if isinstance(module, _BatchNorm) and not isinstance(module, cls):
            made = cls.__new__(cls)
            vars(made).update(vars(module), process_set=process_set)
            return made
        for name, child in module.named_children():
            setattr(module, name, cls.convert_sync_batchnorm(child, process_set))
        return module


convert_sync_batchnorm = SyncBatchNorm.convert_sync_batchnorm


def _gather(group: Group, generation: int, mine: torch.Tensor) -> torch.Tensor:
    """Return the vectors of all ranks of a group in a generation, a row each."""
    parent = group.parent()
    if group.context.generation != generation:
        raise CollectiveError("SyncBatchNorm: the generation of its forward pass is over")
    if group.is_global:  # before ranks connect, as one that has joined must, too
        dtype = str(mine.dtype).removeprefix("torch.")
        announce(parent, {"kind": "statistics", "count": mine.numel(), "dtype": dtype})
    # Apart, so that layers and gradients may be exchanged in any order.
    communicator = group.apart("sync-batch-norm").communicator()
    everyone = [torch.empty_like(mine) for _ in range(communicator.size)]
    communicator.allgather(everyone, mine)
    return torch.stack(everyone)


class _Normalise(torch.autograd.Function):
    """Normalisation with the mean and variance of all ranks' samples."""

    @staticmethod
    def forward(
        ctx: Any,
        group: Group,
        eps: float,
        values: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the output, mean, variance, and number of samples."""
        generation = group.context.generation
        channels = values.shape[1]
        kind = torch.float64 if values.dtype is torch.float64 else torch.float32
        dims = [0, *range(2, values.dim())]
        wide = values.detach().to(kind)
        count = values.numel() // channels
        if count:  # a mean over nothing is NaN
            own_mean = wide.mean(dims)
            own_squares = (wide - _along(own_mean, values)).square().sum(dims)
        else:
            own_mean = own_squares = wide.new_zeros(channels)
        mine = torch.cat([own_mean, own_squares, wide.new_tensor([float(count)])])
        everyone = _gather(group, generation, mine)
        # Deviations from each rank's own mean, and of those from the common one: nothing cancels.
        means, squares = everyone[:, :channels], everyone[:, channels:-1]
        counts = everyone[:, -1:]
        total = counts.sum()
        mean = (means * counts).sum(0) / total.clamp(min=1)
        deviations = squares.sum(0) + ((means - mean).square() * counts).sum(0)
        variance = deviations / total.clamp(min=1)
        scale = (variance + eps).rsqrt()
        output = (wide - _along(mean, values)) * _along(scale, values)
        if weight is not None and bias is not None:
            output = output * _along(weight.to(kind), values) + _along(bias.to(kind), values)
        ctx.save_for_backward(values, weight, mean, scale, total)
        ctx.group, ctx.generation, ctx.kind, ctx.dims = group, generation, kind, dims
        ctx.mark_non_differentiable(mean, variance, total)  # only running statistics use them
        return output.to(values.dtype), mean, variance, total

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        """Return the gradients; that of the input depends on sums over all ranks."""
        values, weight, mean, scale, total = ctx.saved_tensors
        grad = grads[0].to(ctx.kind)
        centred = values.detach().to(ctx.kind) - _along(mean, values)
        sums = torch.cat([grad.sum(ctx.dims), (grad * centred).sum(ctx.dims)])
        channels = values.shape[1]
        grad_values = None
        # All ranks, whichever gradients they need.
        everyone = _gather(ctx.group, ctx.generation, sums).sum(0)
        if ctx.needs_input_grad[2]:
            total_sum, total_product = everyone[:channels] / total, everyone[channels:] / total
            inner = grad - _along(total_sum, values)
            inner = inner - centred * _along(scale.square() * total_product, values)
            factor = scale if weight is None else scale * weight.to(ctx.kind)
            grad_values = (inner * _along(factor, values)).to(values.dtype)
        if weight is None:
            return None, None, grad_values, None, None
        grad_weight = (sums[channels:] * scale).to(weight.dtype)  # an optimizer reduces it later
        return None, None, grad_values, grad_weight, sums[:channels].to(weight.dtype)


def _along(vector: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return a vector of channels in a shape that goes with `values`."""
    return vector.view(1, -1, *(1 for _ in range(values.dim() - 2)))


# A rank that has joined gives the others statistics of no sample.
SERVICES["statistics"] = lambda context, what: _gather(
    Group(context),
    context.generation,
    torch.zeros(what["count"], dtype=getattr(torch, what["dtype"])),
)
