"""Sampler in the loader of a trainer; the integration begins its epochs."""

from __future__ import annotations

from nbelastic.elastic.ranks.context import current
from nbelastic.elastic.ranks.session import warn
from nbelastic.torch.elastic import ElasticSampler

NOT_DEALT = (
    "a loader begins its epoch again after each change of membership\n"
    "{why}, so nbelastic cannot deal its samples: those of the epoch under way are trained twice.\n"
    "Use a dataset with a length and an index, shuffle=True and a batch_size of each rank."
)


class DealtSampler(ElasticSampler):
    """A sampler that begins an epoch in :meth:`begin_epoch` only.

    Trainers and loaders call ``set_epoch`` several times for one epoch.
    """

    def set_epoch(self, epoch: int) -> None:
        """Do nothing."""

    def begin_epoch(self, epoch: int) -> None:
        """Begin an epoch, or go on with it after a change of membership."""
        super().set_epoch(epoch)

    def go_on(self, epoch: int, done: int) -> None:
        """Continue an epoch after so many samples."""
        self.load_state_dict({"epoch": epoch, "processed_num": done})
        self._resumed = True

    def left_in(self, epoch: int) -> int:
        """Return how many samples of an epoch are left, if it is begun now."""
        return self._deal.left if self._resumed and epoch == self.epoch else len(self.dataset)

    def batches_left(
        self, epoch: int | None, batch_size: int, drop_last: bool
    ) -> tuple[int, float]:
        """Return how many batches each rank has of the rest of an epoch, and the share done before.

        The `epoch` is None for a whole one; the `batch_size` is that of a rank.
        """
        total = len(self.dataset)
        left = total if epoch is None else self.left_in(epoch)
        rows = -(-left // current().size)
        batches = rows // batch_size if drop_last else -(-rows // batch_size)
        return batches, 1.0 - left / max(total, 1)


def not_dealt(why: str) -> None:
    """Warn that the samples of a loader cannot be dealt."""
    warn(current(), NOT_DEALT.format(why=why[0].upper() + why[1:]))
