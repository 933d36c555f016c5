"""Interface of a state to the elastic loop and to checkpoints.

Users choose the names of a state's attributes. So these functions are kept apart from them;
:func:`~nbelastic.elastic.state.hooks_of` and :func:`~nbelastic.elastic.state.store_of` return them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from nbelastic.elastic.sampler import SamplerProgress, ShardSampler
    from nbelastic.elastic.state.state_payload import StatePayload

Sample = tuple[float, ...]


@dataclass(frozen=True)
class StateHooks:
    """Functions of any state, for the loop that trains it."""

    on_commit: list[Callable[[], None]]  # the loop's; each commit calls them
    run_due: Callable[[], None]  # calls the functions that are due at the last commit
    # Values of trained parameters, and kinds of optimizers that do not average gradients.
    sample: Callable[[], tuple[Sample, tuple[str, ...]]]
    moving_values: Callable[[], dict[str, object]]  # tokens of values in models, in no state
    step_bytes: Callable[[], int]  # memory of the host that a first step takes


@dataclass(frozen=True)
class CommitStore:
    """The last commit of an ``ObjectState``, to be written, and a written one, to go on from."""

    pack: Callable[[], StatePayload]  # all values but samplers
    progress: Callable[[], list[SamplerProgress]]  # of the samplers
    complete: Callable[[], None]  # adds what other ranks know; all ranks call it
    unwritable: Callable[[], list[str]]  # names of values that a checkpoint cannot have
    # Makes a dict of a payload and the state dicts of samplers. It is pickled into the file.
    as_dict: Callable[[StatePayload, Sequence[dict[str, Any]]], dict[str, Any]]

    unpack: Callable[[StatePayload], None]  # raises StateMismatch; then nothing has changed
    samplers: Callable[[], list[ShardSampler]]  # in the order of `progress`
    adopt_settings: Callable[[], list[str]]  # takes over settings; returns texts of other ones
