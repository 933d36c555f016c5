"""Options of a distributed optimizer, checked when it is made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nbelastic.collectives import Op
from nbelastic.torch.gradients.options import ReduceOptions

if TYPE_CHECKING:
    from nbelastic.torch.ops.adasum import GradientOp
    from nbelastic.torch.ops.compression import Compressor


@dataclass(frozen=True, kw_only=True)
class KerasOptions:
    """How the gradients of a Keras optimizer are reduced.

    Attributes
    ----------
    op : Op or GradientOp
        ``AVERAGE``, ``SUM`` or ``ADASUM``.
    compression : type of Compressor
        What gradients are on the wire.
    predivide : float
        With ``AVERAGE``: the divisor before the sum is formed; the rest is divided by after.
    passes : int
        Batches whose gradients add up on a rank before they are reduced.
    average_passes : bool
        Whether their sum is divided by their number.
    groups : int or sequence of sequences of variables
        How many groups to form, 0 for any; or the groups.
    sparse_as_dense : bool
        Whether to make sparse gradients dense, or refuse them.
    local : tuple
        Layers whose gradients stay on their rank.
    scale_local : bool
        Whether these gradients are divided by the number of ranks.

    Raises
    ------
    ValueError
        An option has a value that it cannot have.
    """

    op: Op | GradientOp
    compression: type[Compressor]
    predivide: float = 1.0
    passes: int = 1
    average_passes: bool = False
    groups: int | tuple[tuple[Any, ...], ...] = 0
    sparse_as_dense: bool = False
    local: tuple[Any, ...] = field(default=())
    scale_local: bool = True

    def __post_init__(self) -> None:
        ReduceOptions(
            op=self.op,
            compression=self.compression,
            predivide=self.predivide,
            passes=self.passes,
            groups=0,
            sparse_as_dense=self.sparse_as_dense,
        )
        if not isinstance(self.groups, int) and not all(
            isinstance(each, Sequence) for each in self.groups
        ):
            raise ValueError("groups must be a number, or lists of variables")
        if isinstance(self.groups, int) and self.groups < 0:
            raise ValueError(f"groups must be at least 0, not {self.groups}")

    def is_local(self) -> set[int]:
        """Return the identities of variables whose gradients stay on their rank."""
        return {id(each) for layer in self.local for each in layer.trainable_variables}
