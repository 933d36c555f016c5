"""Options of a distributed optimizer, checked when it is made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nbelastic.collectives import Op
from nbelastic.torch.gradients.options import ReduceOptions
from nbelastic.torch.ops.coordination import ProcessSet, global_process_set

if TYPE_CHECKING:
    from nbelastic.torch.ops.compression import Compressor
    from nbelastic.torch.ops.operation import GradientOp


@dataclass(frozen=True, kw_only=True)
class KerasOptions:
    """How the gradients of a Keras optimizer are reduced."""

    op: Op | GradientOp  # ``AVERAGE``, ``SUM`` or ``ADASUM``
    compression: type[Compressor]  # what gradients are on the wire
    predivide: float = 1.0  # with ``AVERAGE``: the divisor before the sum; the rest comes after
    passes: int = 1  # batches whose gradients add up on a rank before they are reduced
    average_passes: bool = False  # their sum is divided by their number
    groups: int | tuple[tuple[Any, ...], ...] = 0  # how many, 0 for any; or variables of each
    sparse_as_dense: bool = False  # sparse gradients are made dense, not refused
    local: tuple[Any, ...] = ()  # layers whose gradients stay on their rank
    scale_local: bool = True  # these are divided by the number of ranks
    process_set: Any = None  # ranks that reduce among them; others keep their gradients

    def __post_init__(self) -> None:
        ReduceOptions(
            op=self.op,
            compression=self.compression,
            predivide=self.predivide,
            passes=self.passes,
            groups=0,
            sparse_as_dense=self.sparse_as_dense,
        )
        if not isinstance(self.process_set, ProcessSet | None):
            raise ValueError(f"process_set must be a ProcessSet, not {self.process_set!r}")
        if not isinstance(self.groups, int) and not all(
            isinstance(each, Sequence) for each in self.groups
        ):
            raise ValueError("groups must be a number, or lists of variables")
        if isinstance(self.groups, int) and self.groups < 0:
            raise ValueError(f"groups must be at least 0, not {self.groups}")

    def is_local(self) -> set[int]:
        """Return the identities of variables whose gradients stay on their rank."""
        return {id(each) for layer in self.local for each in layer.trainable_variables}

    @property
    def is_global(self) -> bool:
        """Whether all ranks reduce together."""
        return self.process_set in (None, global_process_set)
