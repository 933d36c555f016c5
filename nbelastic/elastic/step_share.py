"""Share of a rank in a step that consists of micro-batches."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from nbelastic.collectives.reduction_tree import Blocks

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass
class StepShare:
    """Micro-batches of a step that one rank computes.

    The loader (:mod:`nbelastic.data`) makes one for each step and says which micro-batch is under
    way. The reduction of gradients reads it, and so do buffers of models.

    Attributes
    ----------
    micro_batches : int
        Number of micro-batches of a step on all ranks: V.
    block : range
        Numbers of this rank's micro-batches.
    expected : tuple of int
        Those of them that have rows.
    row_weights : list of float
        For each of the V its rows, relative to a full one.
    exact : bool
        Whether sums are formed along the tree over the V, and not in the order of ranks.
    number : int or None
        The micro-batch under way; None before the first.
    weights : dict of int to float
        Weights of the micro-batches that have begun, by number.
    at_end : tuple of callables
        To be called when the micro-batch under way has ended.
    finish : callable
        Ends the last micro-batch, where the loop over them has not; idempotent.
    place : tuple of int
        Epoch and number of the step, and a digest of what the order of rows depends on; the same
        on all ranks.
    outer : StepShare or None
        Share of the step in which a loop over another loader has begun.
    in_state : bool
        Whether a state has the loader, so that a commit says which steps are done.
    over : bool
        Whether the loop has left the step.
    deviates, others_deviate : bool
        Whether this rank is known to compute other bits than others, or another rank is.
    taken : int
        Rows of the micro-batches that have begun on this rank.
    seen : int or None
        Rows that all ranks together have taken; None until gradients were reduced.
    blocks : Blocks or None
        Numbers of micro-batches of all ranks, the same on all of them; None for even blocks.
    seconds : float
        Time that this rank takes for a micro-batch; 0 while that is not known.
    times : tuple of float
        That of all ranks, once the gradients of the step are reduced.
    """

    micro_batches: int
    block: range
    expected: tuple[int, ...]
    row_weights: list[float]
    exact: bool
    number: int | None = None
    weights: dict[int, float] = field(default_factory=dict)
    at_end: tuple[Callable[[], None], ...] = ()
    finish: Callable[[], None] = lambda: None
    place: tuple[int, int, int] = (0, 0, 0)
    outer: StepShare | None = None
    in_state: bool = True
    over: bool = False
    deviates: bool = False
    others_deviate: bool = False
    taken: int = 0
    seen: int | None = None
    blocks: Blocks | None = None
    seconds: float = 0.0
    times: tuple[float, ...] = ()

    def blocks_of(self, ranks: int) -> Blocks:
        """Return the blocks of all ranks."""
        return self.blocks or Blocks.even(self.micro_batches, ranks)

    @property
    def is_last(self) -> bool:
        """Whether the micro-batch under way is this rank's last."""
        return self.number == self.expected[-1] if self.expected else False

    @property
    def enclosing(self) -> StepShare | None:
        """The innermost step around this one that is still under way."""
        share = self.outer
        while share is not None and share.over:
            share = share.outer
        return share

    @property
    def missing(self) -> int:
        """Number of this rank's micro-batches that have not begun."""
        return len(self.expected) - len(self.weights)
