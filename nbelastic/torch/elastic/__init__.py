"""Elastic training with PyTorch: Horovod's ``hvd.elastic``."""

from __future__ import annotations

from nbelastic.data import Batch, Dask, Loader, Parquet, Shards, Stateful
from nbelastic.elastic.loop import run
from nbelastic.elastic.state import ObjectState, State
from nbelastic.torch.elastic.sampler import ElasticSampler
from nbelastic.torch.rates import LRScaler
from nbelastic.torch.state.torch_state import TorchState

__all__ = [
    "Batch",
    "Dask",
    "ElasticSampler",
    "LRScaler",
    "Loader",
    "ObjectState",
    "Parquet",
    "Shards",
    "State",
    "Stateful",
    "TorchState",
    "run",
]
