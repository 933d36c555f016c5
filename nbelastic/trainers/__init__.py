"""Parts that the integrations of trainers have in common; imports no trainer."""

from nbelastic.trainers.callbacks import (
    Callbacks,
    ProgressAdapter,
    Runs,
    averages_of,
    by_itself,
)
from nbelastic.trainers.sampler import NOT_DEALT, DealtSampler, not_dealt

__all__ = [
    "NOT_DEALT",
    "Callbacks",
    "DealtSampler",
    "ProgressAdapter",
    "Runs",
    "averages_of",
    "by_itself",
    "not_dealt",
]
