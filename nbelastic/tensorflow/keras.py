"""Another name of :mod:`nbelastic.keras`, as Horovod has two of its own."""

from nbelastic.keras import *  # noqa: F403
from nbelastic.keras import callbacks, elastic

__all__ = ["callbacks", "elastic"]
