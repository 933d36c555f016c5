"""What a distributed optimizer checks before it changes anything."""

from __future__ import annotations

import collections
import warnings
from typing import TYPE_CHECKING

import torch

from nbelastic.collectives import Op
from nbelastic.torch.adasum import Adasum, GradientOp
from nbelastic.torch.compression import Compressor

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["check_compression", "check_groups", "check_op", "check_passes", "names_of"]


def names_of(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, torch.Tensor]] | None
) -> dict[int, str]:
    """Return the names of an optimizer's parameters by their ids; made up where none are given."""
    if named_parameters is None:
        return {
            id(parameter): f"{group}.{index}"
            for group, options in enumerate(optimizer.param_groups)
            for index, parameter in enumerate(options["params"])
        }
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
    missing = [
        f"{group}.{index}"
        for group, options in enumerate(optimizer.param_groups)
        for index, parameter in enumerate(options["params"])
        if id(parameter) not in by_id
    ]
    if missing:
        raise ValueError(
            "named_parameters lacks parameters of the optimizer (group.index): "
            f"{', '.join(missing)}"
        )
    return by_id


def check_op(op: Op | GradientOp, predivide: float) -> Op | GradientOp:
    """Refuse operations that are none for gradients, and factors that do not fit them."""
    if op not in (Op.AVERAGE, Op.SUM, Adasum):
        raise ValueError(f"op must be Average, Sum or Adasum, not {op!r}")
    if predivide != 1.0 and op is not Op.AVERAGE:
        raise ValueError("gradient_predivide_factor needs op=Average")
    if not predivide > 0:
        raise ValueError(f"gradient_predivide_factor must be positive, not {predivide}")
    return op


def check_compression(compression: type[Compressor]) -> type[Compressor]:
    """Refuse what is no compression."""
    if not (isinstance(compression, type) and issubclass(compression, Compressor)):
        raise ValueError(
            "compression must be Compression.none, Compression.fp16 or Compression.bf16, "
            f"not {compression!r}"
        )
    return compression


def check_passes(passes: int) -> int:
    """Refuse fewer than one backward pass per step."""
    if passes < 1:
        raise ValueError(f"backward_passes_per_step must be at least 1, not {passes}")
    return passes


def check_groups(
    optimizer: torch.optim.Optimizer,
    groups: int | Sequence[Sequence[torch.Tensor]] | None,
    num_groups: int,
) -> int | tuple[tuple[torch.Tensor, ...], ...]:
    """Return how many groups there are to be, 0 for any, or the groups."""
    if num_groups:
        warnings.warn("num_groups is now called groups", DeprecationWarning, stacklevel=3)
        groups = num_groups if groups is None else groups
    if groups is None:
        return 0
    if isinstance(groups, int):
        if groups < 0:
            raise ValueError(f"groups must be at least 0, not {groups}")
        return groups
    known = {id(p) for options in optimizer.param_groups for p in options["params"]}
    members = [parameter for group in groups for parameter in group]
    if len({id(parameter) for parameter in members}) < len(members):
        raise ValueError("groups must not have a parameter twice")
    if not all(id(parameter) in known for parameter in members):
        raise ValueError("groups must only have parameters of the optimizer")
    return tuple(tuple(group) for group in groups)
