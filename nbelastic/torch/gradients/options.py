"""Options of a distributed optimizer, checked before anything is changed."""

from __future__ import annotations

import collections
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from nbelastic.collectives import Op
from nbelastic.torch.compression import AnyCompressor, Compressor
from nbelastic.torch.ops.coordination.process_sets import ProcessSet, global_process_set
from nbelastic.torch.ops.operation.reduction import Adasum, GradientOp


@dataclass(frozen=True, kw_only=True)
class ReduceOptions:
    """How gradients are reduced."""

    op: Op | GradientOp  # AVERAGE, SUM or ADASUM
    compression: AnyCompressor
    predivide: float  # of AVERAGE: the divisor before the sum; the rest is divided by after it
    passes: int  # of backward, in a step
    # How many groups to form, 0 for none; or the groups. One operation reduces a group.
    groups: int | tuple[tuple[torch.Tensor, ...], ...]
    sparse_as_dense: bool  # else sparse gradients are reduced apart
    process_set: ProcessSet  # the ranks that reduce; others step by themselves

    def __post_init__(self) -> None:
        if self.op not in (Op.AVERAGE, Op.SUM, Adasum):
            raise ValueError(f"op must be Average, Sum or Adasum, not {self.op!r}")
        if self.predivide != 1.0 and self.op is not Op.AVERAGE:
            raise ValueError("gradient_predivide_factor needs op=Average")
        if not self.predivide > 0:
            raise ValueError(f"gradient_predivide_factor must be positive, not {self.predivide}")
        methods = [getattr(self.compression, name, None) for name in ("compress", "decompress")]
        if not all(map(callable, methods)):
            raise ValueError(
                "compression must be Compression.none, Compression.fp16, Compression.bf16, or have "
                "the methods compress(tensor) and decompress(tensor, ctx), not "
                f"{self.compression!r}"
            )
        if not self.changes_types_only and self.op is Adasum:
            raise ValueError("op=Adasum needs a compression that only changes types")
        if isinstance(self.groups, int) and self.groups < 0:
            raise ValueError(f"groups must be at least 0, not {self.groups}")
        if self.passes < 1:
            raise ValueError(f"backward_passes_per_step must be at least 1, not {self.passes}")

    @property
    def changes_types_only(self) -> bool:
        """Whether compressed gradients add up as they are on the wire."""
        return isinstance(self.compression, type) and issubclass(self.compression, Compressor)

    @property
    def of_all(self) -> bool:
        """Whether all ranks reduce."""
        return self.process_set is global_process_set

    @property
    def apart(self) -> bool:
        """Whether gradients are reduced after backward, and not in buckets."""
        return self.op is Adasum or not self.changes_types_only

    def wire_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the type that gradients of a type have on the wire."""
        return self.compression.wire_dtype(dtype) if self.changes_types_only else dtype  # type: ignore[attr-defined]


def check_groups(
    optimizer: torch.optim.Optimizer,
    groups: int | Sequence[Sequence[torch.Tensor]] | None,
    num_groups: int,
) -> int | tuple[tuple[torch.Tensor, ...], ...]:
    """Return the number of groups that the user asks for, 0 for any, or the groups."""
    if num_groups:
        warnings.warn("num_groups is now called groups", DeprecationWarning, stacklevel=3)
        groups = num_groups if groups is None else groups
    if groups is None:
        return 0
    if isinstance(groups, int):
        return groups
    known = {id(p) for options in optimizer.param_groups for p in options["params"]}
    members = [parameter for group in groups for parameter in group]
    if len({id(parameter) for parameter in members}) < len(members):
        raise ValueError("groups must not have a parameter twice")
    if not all(id(parameter) in known for parameter in members):
        raise ValueError("groups must only have parameters of the optimizer")
    return tuple(tuple(group) for group in groups)


def names_of(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, torch.Tensor]] | None
) -> dict[int, str]:
    """Return the names of an optimizer's parameters by their ids; made up where none are given."""
    numbered = {
        id(parameter): f"{group}.{index}"
        for group, options in enumerate(optimizer.param_groups)
        for index, parameter in enumerate(options["params"])
    }
    if named_parameters is None:
        return numbered
    pairs = list(named_parameters)
    if not all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
        raise ValueError(
            "named_parameters must be pairs of a name and a parameter, as from "
            "model.named_parameters()"
        )
    counts = collections.Counter(name for name, _ in pairs)
    repeated = sorted(name for name, count in counts.items() if count > 1)
    if repeated:
        raise ValueError(f"names in named_parameters must be unique; repeated: {repeated}")
    by_id = {id(parameter): name for name, parameter in pairs}
    missing = [place for key, place in numbered.items() if key not in by_id]
    if missing:
        raise ValueError(
            "named_parameters lacks parameters of the optimizer (group.index): "
            f"{', '.join(missing)}"
        )
    return by_id
