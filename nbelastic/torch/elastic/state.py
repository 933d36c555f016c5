"""States under the name of Horovod's module."""

from nbelastic.elastic.state import ObjectState, State
from nbelastic.torch.state.handlers import (
    LRSchedulerStateHandler,
    ModelStateHandler,
    OptimizerStateHandler,
    SamplerStateHandler,
    StateHandler,
    get_handler_registry,
    set_handler_registry,
)
from nbelastic.torch.state.torch_state import TorchState

__all__ = [
    "LRSchedulerStateHandler",
    "ModelStateHandler",
    "ObjectState",
    "OptimizerStateHandler",
    "SamplerStateHandler",
    "State",
    "StateHandler",
    "TorchState",
    "get_handler_registry",
    "set_handler_registry",
]
