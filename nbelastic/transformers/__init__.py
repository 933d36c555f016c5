"""Elastic training with Hugging Face's ``Trainer``: one line.

::

    from transformers import Trainer
    import nbelastic.transformers

    Trainer = nbelastic.transformers.elastic(Trainer)
"""

from nbelastic.transformers.trainer import elastic

__all__ = ["elastic"]
