"""Handlers of values of a state, in the way of the user: Horovod's registry."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch

from nbelastic.elastic.sampler import ShardSampler
from nbelastic.torch.functions import allgather_object, broadcast_object


class StateHandler:
    """Way to keep a value of a state; derive from it for a type of your own.

    A :class:`~nbelastic.torch.elastic.TorchState` calls :meth:`save` on all ranks at each commit,
    :meth:`restore` after a failure, and :meth:`sync` on all ranks when some need the newest state.

    Parameters
    ----------
    value : object
        The value.
    """

    def __init__(self, value: Any) -> None:
        self.value = value

    def save(self) -> None:
        """Keep the present value as the last commit."""
        raise NotImplementedError

    def restore(self) -> None:
        """Go back to the last commit."""
        raise NotImplementedError

    def sync(self) -> None:
        """Set the value to rank 0's, which stands for the rank with the newest state."""
        raise NotImplementedError

    def set_value(self, value: Any) -> None:
        """Replace the value, and save it."""
        self.value = value
        self.save()


class _StateDictHandler(StateHandler):
    """Handler of an object with ``state_dict`` and ``load_state_dict``."""

    def __init__(self, value: Any) -> None:
        super().__init__(value)
        self._saved = copy.deepcopy(value.state_dict())

    def save(self) -> None:
        self._saved = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        self.value.load_state_dict(copy.deepcopy(self._saved))  # else it may share the commit's

    def sync(self) -> None:
        self.value.load_state_dict(broadcast_object(self.value.state_dict()))


class ModelStateHandler(_StateDictHandler):
    """Handler of a model by its state dict."""


class OptimizerStateHandler(_StateDictHandler):
    """Handler of an optimizer by its state dict."""


class LRSchedulerStateHandler(_StateDictHandler):
    """Handler of a learning rate scheduler by its state dict."""


class SamplerStateHandler(_StateDictHandler):
    """Handler of an ``ElasticSampler``: the samples that all ranks have done."""

    def save(self) -> None:
        super().save()
        self._saved["processed_num"] = min(allgather_object(self.value.processed_num))


_BUILT_IN: list[tuple[type, Callable[[Any], StateHandler]]] = [
    (torch.nn.Module, ModelStateHandler),
    (torch.optim.Optimizer, OptimizerStateHandler),
    (torch.optim.lr_scheduler.LRScheduler, LRSchedulerStateHandler),
    (ShardSampler, SamplerStateHandler),
]
_registry = list(_BUILT_IN)


def get_handler_registry() -> list[tuple[type, Callable[[Any], StateHandler]]]:
    """Return the pairs of types and handlers; the first that fits a value is used."""
    return _registry


def set_handler_registry(registry: list[tuple[type, Callable[[Any], StateHandler]]]) -> None:
    """Replace the pairs of types and handlers, for states that are made from here on.

    Parameters
    ----------
    registry : list of tuple of (type, callable)
        What makes a handler of a value of the type: usually a class of handlers. Where it is one of
        nbelastic's own, or no type fits, a ``TorchState`` keeps the value in its own way.

    Examples
    --------
    >>> from nbelastic.torch.elastic import state
    >>> mine = [(Ledger, LedgerHandler)]  # doctest: +SKIP
    >>> state.set_handler_registry(mine + state.get_handler_registry())  # doctest: +SKIP
    """
    _registry[:] = registry


def own_handler(value: Any) -> StateHandler | None:
    """Return a new handler of a value, if the user has registered one."""
    fits = next((handler for kind, handler in _registry if isinstance(value, kind)), None)
    return None if fits is None or fits in dict(_BUILT_IN).values() else fits(value)
