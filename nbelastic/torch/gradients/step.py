"""Contract between an optimizer's `Reducer` and the reduction of one step."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import torch

    from nbelastic.collectives import Communicator
    from nbelastic.elastic.ranks.context import Context
    from nbelastic.elastic.ranks.step_share import StepShare

_JOINED = -1000.0  # less than all other ranks can make up for


def change_of(context: Context, *, joined: bool = False) -> float:
    """Return the number that a rank, joined or not, adds to the gradients of a step.

    It is summed or averaged over the ranks, and passed to :func:`agree`. Other carriers of it:
    :mod:`nbelastic.keras.backends.reduction`, :mod:`nbelastic.keras.fit`, and ``one_of_all`` where
    nothing else carries it.
    """
    return _JOINED if joined else float(context.change_flag())


def agree(context: Context, change: float) -> None:
    """Act upon the sum of all ranks: whether the membership is about to change."""
    # A rank that has joined does not commit, so what it reads here it cannot act upon. The others
    # ask it at their next commit.
    if change >= 0:
        context.agree(bool(change))


class GradientStep:
    """Reduction of an optimizer's gradients in one step, from the first arrival to the delivery.

    The `Reducer` makes one when a step begins, and calls it with its lock held. After an error it
    drops the step and all gradients. If the step concerns peers by then, the generation has failed
    on this rank.
    """

    share: StepShare | None = None  # this rank's micro-batches, if the step consists of them
    found_sparse: Sequence[torch.Tensor] = ()  # parameters to be reduced apart from now on

    def __init__(
        self, context: Context, communicator: Communicator, parameters: list[torch.Tensor]
    ) -> None:
        self.context = context
        self.communicator = communicator
        self.generation = context.generation
        self.parameters = parameters

    @property
    def has_gradients(self) -> bool:
        """Whether a gradient has arrived."""
        raise NotImplementedError

    @property
    def incomplete(self) -> bool:
        """Whether a gradient has had some of its ``backward_passes_per_step``, and not all."""
        return False

    @property
    def is_lost(self) -> bool:
        """Whether gradients would be lost if another step began now."""
        return False

    @property
    def concerns_peers(self) -> bool:
        """Whether other ranks may be waiting for this rank's part of the step."""
        raise NotImplementedError

    def arrive(self, parameters: Iterable[torch.Tensor]) -> None:
        """Take the gradients that backward has accumulated into these parameters."""
        raise NotImplementedError

    def check(self, trained: list[torch.Tensor]) -> None:
        """Refuse gradients, or `trained` parameters, that the user has changed since backward."""
        raise NotImplementedError

    def prepare(self) -> None:
        """Agree with the other ranks before the sums, unless already done."""

    def launch_all(self) -> bool:
        """Begin all sums with the present gradients and return True, unless a rank would wait."""
        return False

    def finish(self) -> None:
        """Begin the sums that have not begun, wait, and write the reduced gradients."""
        raise NotImplementedError
