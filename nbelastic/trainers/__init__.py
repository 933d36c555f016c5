"""Parts that the integrations of trainers have in common; imports no trainer."""

from nbelastic.trainers.callbacks import (
    Callbacks,
    ProgressAdapter,
    Runs,
    averages_of,
    by_itself,
)
from nbelastic.trainers.sampler import DealtSampler, dealt, not_dealt, obstacle_to

__all__ = [
    "Callbacks",
    "DealtSampler",
    "ProgressAdapter",
    "Runs",
    "averages_of",
    "by_itself",
    "dealt",
    "not_dealt",
    "obstacle_to",
]
