"""The elastic loop, with errors that TensorFlow and JAX have hidden in their own."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from nbelastic.elastic import loop
from nbelastic.keras.backends import backend

if TYPE_CHECKING:
    from collections.abc import Callable

P = ParamSpec("P")
R = TypeVar("R")


def run(function: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R]:
    """Decorate a training function so that it survives changes of membership.

    As :func:`nbelastic.torch.elastic.run`. An error of an operation between ranks that TensorFlow
    or JAX has raised as one of its own is raised as what it was.

    Examples
    --------
    >>> @run  # doctest: +SKIP
    ... def train(state):
    ...     model.fit(data, initial_epoch=state.epoch, callbacks=callbacks)
    """

    @functools.wraps(function)
    def translated(state: Any, *args: Any, **kwargs: Any) -> Any:
        back = backend()
        back.raised()  # one that the function has handled by itself
        try:
            return function(state, *args, **kwargs)
        except Exception as error:
            hidden = back.raised()
            if hidden is None or hidden is error:
                raise
            # JAX has given the memory of variables to the step that failed. What they were after
            # the last commit, or as the loop was entered, must be there before ranks meet again.
            state.restore()
            raise hidden from None

    return loop.run(translated)
