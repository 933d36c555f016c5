"""Sources of rows, and loaders that deal them to the steps of a training.

This room knows torch the library, and nothing of :mod:`nbelastic.torch`. The deal
(:mod:`nbelastic.data.dealing`) is pure.
"""

from .batch import Batch
from .loader import Loader, Step, StepParticipant
from .sources import MapSource, RowSource, WorkItem

__all__ = ["Batch", "Loader", "MapSource", "RowSource", "Step", "StepParticipant", "WorkItem"]
