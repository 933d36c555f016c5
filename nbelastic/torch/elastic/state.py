"""States under the name of Horovod's module, for scripts that import from it."""

from nbelastic.elastic.state import ObjectState, State
from nbelastic.torch.state.torch_state import TorchState

__all__ = ["ObjectState", "State", "TorchState"]
