"""Elastic training with Hugging Face accelerate.

A rank's ``Accelerator()`` is one of all ranks. A state keeps what it has prepared::

    accelerator = Accelerator()
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    state = nbelastic.accelerate.AccelerateState(accelerator, epoch=0)

    @hvd.elastic.run
    def train(state):
        for state.epoch in range(state.epoch, 3):
            for batch in loader:
                with accelerator.accumulate(model):
                    ...
                state.commit()
"""

from nbelastic.accelerate.state import AccelerateState

__all__ = ["AccelerateState"]
