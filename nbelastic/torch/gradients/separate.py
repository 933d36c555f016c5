"""Reduction of sparse gradients, and of those with a compression of the user's.

They are reduced after backward, as operations that ranks compare.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from nbelastic.collectives import Op
from nbelastic.torch.ops.coordination.comparison import begin
from nbelastic.torch.ops.operation.tensor_operations import Allreduce, SparseAllreduce

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from nbelastic.elastic.ranks.groups import Group
    from nbelastic.torch.gradients.options import ReduceOptions


class SeparateReduction:
    """Gradients of an optimizer that are reduced apart from the layout's."""

    def __init__(self, options: ReduceOptions) -> None:
        # With sparse gradients, as far as all ranks know of them.
        self.parameters: list[torch.Tensor] = []
        self._options = options

    def reduce(
        self, group: Group, trained: Sequence[torch.Tensor], names: Mapping[int, str]
    ) -> None:
        """Reduce the gradients of the `trained` parameters outside the layout.

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
        gradients = []
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
            gradients.append(gradient)
        total = SparseAllreduce(gradients, self._options.op)
        total.pattern = f"sum of the sparse gradients of an optimizer\n{total.text}"
        for parameter, gradient in zip(parameters, begin(group, total).wait(), strict=True):
            parameter.grad = gradient.coalesce()

    def _compress(self, group: Group, parameters: Sequence[torch.Tensor]) -> None:
        compression, op = self._options.compression, self._options.op
        assert isinstance(op, Op)
        gradients = [
            torch.zeros_like(p, requires_grad=False) if p.grad is None else p.grad.detach()
            for p in parameters
        ]
        dense = [g if g.layout is torch.strided else g.to_dense() for g in gradients]
        pairs = [compression.compress(gradient) for gradient in dense]
        sent = [compressed for compressed, _ in pairs]
        outputs = [torch.empty_like(compressed) for compressed in sent]
        factor = self._options.predivide
        begin(group, Allreduce(sent, outputs, op, 1.0 / factor, factor)).wait()
        for parameter, output, (_, ctx) in zip(parameters, outputs, pairs, strict=True):
            parameter.grad = compression.decompress(output, ctx)
