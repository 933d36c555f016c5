"""Elastic training with TensorFlow 2: Horovod's ``hvd.elastic``."""

from nbelastic.elastic.state import ObjectState, State
from nbelastic.keras.dataset import ElasticDataset
from nbelastic.keras.state import KerasState
from nbelastic.keras.translate import run
from nbelastic.tensorflow.state import TensorFlowKerasState, TensorFlowState
from nbelastic.torch.elastic import ElasticSampler

__all__ = [
    "ElasticDataset",
    "ElasticSampler",
    "KerasState",
    "ObjectState",
    "State",
    "TensorFlowKerasState",
    "TensorFlowState",
    "run",
]
