"""Reduction of sparse gradients, and of those with a compression of the user's.

They are reduced after backward, as operations that ranks compare.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from nbelastic.collectives import Op
from nbelastic.torch.ops.coordination import begin
from nbelastic.torch.ops.operation import Allgather
from nbelastic.torch.ops.reductions import grouped_allreduce
from nbelastic.torch.ops.sparse import parts_of, sum_of_parts

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from nbelastic.torch.gradients.options import ReduceOptions
    from nbelastic.torch.ops.coordination import Group


class SeparateReduction:
    """Gradients of an optimizer that are reduced apart from all others."""

    def __init__(self, options: ReduceOptions) -> None:
        # With sparse gradients, as far as all ranks know of them.
        self.parameters: list[torch.Tensor] = []
        self._options = options

    def reduce(
        self, group: Group, trained: Sequence[torch.Tensor], names: Mapping[int, str]
    ) -> None:
        """Reduce the gradients of those of the `trained` parameters that are to go apart.

        A missing gradient counts as zeros, and becomes the sum.
        """
        keys = {id(parameter) for parameter in self.parameters}
        sparse = [parameter for parameter in trained if id(parameter) in keys]
        if sparse:
            self._gather(group, sparse, names)
        if not self._options.changes_types_only:
            self._compress(group, [each for each in trained if id(each) not in keys])

    def _gather(
        self, group: Group, parameters: Sequence[torch.Tensor], names: Mapping[int, str]
    ) -> None:
        if not isinstance(self._options.op, Op):
            name = names.get(id(parameters[0]), "(unnamed)")
            raise ValueError(
                f"the gradient of parameter {name!r} is sparse, and op=Adasum needs dense ones; "
                "pass sparse_as_dense=True"
            )
        parts = []
        for parameter in parameters:
            gradient = parameter.grad
            if gradient is None:
                gradient = torch.sparse_coo_tensor(
                    torch.empty(1, 0, dtype=torch.int64),
                    parameter.detach().new_empty(0, *parameter.shape[1:]),
                    parameter.shape,
                    check_invariants=False,
                )
            elif gradient.layout is torch.strided:
                gradient = gradient.to_sparse(1)
            parts += parts_of(gradient)
        gather = Allgather(parts)
        gather.text = f"sum of the sparse gradients of an optimizer\n{gather.text}"
        gathered = begin(group, gather).wait()
        divisor = group.size if self._options.op is Op.AVERAGE else 1
        pairs = zip(gathered[::2], gathered[1::2], strict=True)
        for parameter, pair in zip(parameters, pairs, strict=True):
            parameter.grad = sum_of_parts(pair, parameter.shape, divisor).coalesce()

    def _compress(self, group: Group, parameters: Sequence[torch.Tensor]) -> None:
        compression, op = self._options.compression, self._options.op
        assert isinstance(op, Op)
        gradients = [
            torch.zeros_like(p, requires_grad=False) if p.grad is None else p.grad.detach()
            for p in parameters
        ]
        dense = [g if g.layout is torch.strided else g.to_dense() for g in gradients]
        factor = self._options.predivide
        reduced = grouped_allreduce(
            dense,
            compression=compression,
            op=op,
            prescale_factor=1.0 / factor,
            postscale_factor=factor,
            process_set=group.process_set,
        )
        for parameter, gradient in zip(parameters, reduced, strict=True):
            parameter.grad = gradient
