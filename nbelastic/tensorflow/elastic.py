"""Elastic training with TensorFlow 2: Horovod's ``hvd.elastic``, with its states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nbelastic.errors import OptionError
from nbelastic.keras import elastic
from nbelastic.keras.backends.tensorflow import ADAPTER
from nbelastic.keras.elastic import *  # noqa: F403
from nbelastic.keras.state import KerasState as TensorFlowKerasState
from nbelastic.keras.state import Variables
from nbelastic.torch.state.torch_state import TorchState

__all__ = ["TensorFlowKerasState", "TensorFlowState"]
__all__ += elastic.__all__


class TensorFlowState(TorchState):
    """State of training with variables of TensorFlow: what is trained, and the optimizer's.

    Further `values` are attributes. `session` is ignored; it is for Horovod's signature. An
    OptionError says that there are no variables.
    """

    def __init__(
        self, variables: Sequence[Any] | None = None, session: Any = None, **values: Any
    ) -> None:
        if not variables:
            raise OptionError(
                "TensorFlowState(variables=…): TensorFlow 2 keeps no list of all variables; pass "
                "them, as in TensorFlowState([*model.variables, *optimizer.variables], epoch=0)"
            )
        self.variables = list(variables)
        # TorchState's first value, under the name that checkpoints have for it.
        super().__init__(Variables(self.variables, ADAPTER), **values)
