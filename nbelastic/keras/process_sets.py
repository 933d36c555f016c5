"""Check the process sets that Horovod's signatures for Keras have."""

from __future__ import annotations

from nbelastic.torch.ops.coordination import global_process_set


def check_process_set(process_set: object) -> None:
    """Refuse any set of ranks but all of them."""
    if process_set is not None and process_set is not global_process_set:
        raise ValueError(
            f"process_set must be None or global_process_set, not {process_set!r}: gradients of "
            "Keras and TensorFlow are averaged over all ranks"
        )
