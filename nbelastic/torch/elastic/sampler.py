"""Sampler of the samples that are left in an epoch."""

from __future__ import annotations

from torch.utils.data import Sampler

from nbelastic.elastic.sampler import ShardSampler


class ElasticSampler(ShardSampler, Sampler[int]):
    """Deal a dataset to the ranks, and its rest again when ranks join or leave.

    Make it part of a :class:`TorchState`, and record each batch that is done::

        sampler = ElasticSampler(dataset)
        loader = DataLoader(dataset, batch_size, sampler=sampler)
        state = TorchState(model, optimizer, sampler=sampler, epoch=0)

        @run
        def train(state):
            for state.epoch in range(state.epoch, epochs):
                for batch_idx, batch in enumerate(loader):
                    ...
                    state.sampler.record_batch(batch_idx, batch_size)
                    state.commit()
                state.sampler.set_epoch(state.epoch + 1)

    Then each sample is used once per epoch, although ranks join, leave or die. Exceptions are the
    repetitions that make the shares equally long, and batches that were not committed.

    Parameters
    ----------
    dataset : sized
        The samples to deal.
    shuffle : bool, default True
        Whether to shuffle, differently in each epoch.
    seed : int, default 0
        Of the shuffling; the same on all ranks.
    """
