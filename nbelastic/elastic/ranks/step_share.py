"""Share of a rank in a step that consists of micro-batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from nbelastic.collectives.reduction_tree import Blocks


@dataclass
class StepShare:
    """The rank's micro-batches of a step.

    The loader (:mod:`nbelastic.data`) makes one for each step and says which micro-batch is under
    way. The reduction of gradients reads it, and so do buffers of models.
    """

    micro_batches: int  # of a step on all ranks: V
    block: range  # numbers of this rank's micro-batches
    expected: tuple[int, ...]  # those of them that have rows
    row_weights: list[float]  # rows of each of the V, relative to a full one
    exact: bool  # sums are formed along the tree over the V, not in the order of ranks
    number: int | None = None  # the micro-batch under way; None before the first
    weights: dict[int, float] = field(default_factory=dict)  # of those that have begun, by number
    # Part of the micro-batch under way, and number of its parts; each has a backward pass of its
    # own, and its weight.
    part: tuple[int, int] = (0, 1)
    part_weight: float = 0.0
    at_end: tuple[Callable[[], None], ...] = ()  # called when the micro-batch under way has ended
    finish: Callable[[], None] = lambda: None  # ends the last micro-batch; idempotent
    # Epoch and number of the step, and a digest of the order of rows; the same on all ranks.
    place: tuple[int, int, int] = (0, 0, 0)
    outer: StepShare | None = None  # of the step in which a loop over another loader has begun
    in_state: bool = True  # a state has the loader, so that a commit says which steps are done
    over: bool = False  # the loop has left the step
    deviates: bool = False  # this rank is known to compute other bits than others
    others_deviate: bool = False  # another rank is
    taken: int = 0  # rows of the micro-batches that have begun on this rank
    seen: int | None = None  # rows of all ranks; None until gradients were reduced
    blocks: Blocks | None = None  # of all ranks, the same on all of them; None for even blocks
    seconds: float = 0.0  # for a micro-batch on this rank; 0 while that is not known
    times: tuple[float, ...] = ()  # those of all ranks, once gradients are reduced

    def blocks_of(self, ranks: int) -> Blocks:
        """Return the blocks of all ranks."""
        return self.blocks or Blocks.even(self.micro_batches, ranks)

    @property
    def is_whole(self) -> bool:
        """Whether the micro-batch under way is complete with the part under way."""
        return self.part[0] + 1 == self.part[1]

    @property
    def is_last(self) -> bool:
        """Whether the part under way is this rank's last."""
        return self.is_whole and bool(self.expected) and self.number == self.expected[-1]

    @property
    def enclosing(self) -> StepShare | None:
        """The innermost surrounding step under way."""
        share = self.outer
        while share is not None and share.over:
            share = share.outer
        return share

    @property
    def missing(self) -> int:
        """Number of this rank's micro-batches that have not begun."""
        return len(self.expected) - len(self.weights)
