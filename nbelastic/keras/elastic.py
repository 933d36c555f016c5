"""Elastic training with Keras: Horovod's ``hvd.elastic``, and :func:`fit`."""

from nbelastic.data import Arrow, Batch, Dask, Loader, Parquet, Shards, Stateful
from nbelastic.elastic.state import ObjectState, State
from nbelastic.keras.callbacks.callback_list import OnRankZero
from nbelastic.keras.callbacks.elastic_callbacks import (
    CommitStateCallback,
    UpdateBatchStateCallback,
    UpdateEpochStateCallback,
)
from nbelastic.keras.feeds import ElasticDataset
from nbelastic.keras.fit import fit
from nbelastic.keras.state import KerasState, run
from nbelastic.torch.elastic import ElasticSampler

__all__ = [
    "Arrow",
    "Batch",
    "CommitStateCallback",
    "Dask",
    "ElasticDataset",
    "ElasticSampler",
    "KerasState",
    "Loader",
    "ObjectState",
    "OnRankZero",
    "Parquet",
    "Shards",
    "State",
    "Stateful",
    "UpdateBatchStateCallback",
    "UpdateEpochStateCallback",
    "fit",
    "run",
]
