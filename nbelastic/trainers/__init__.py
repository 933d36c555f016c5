"""Parts that the integrations of trainers have in common; imports no trainer."""

from nbelastic.trainers.attributes import plain_attributes
from nbelastic.trainers.sampler import NOT_DEALT, DealtSampler, not_dealt

__all__ = ["NOT_DEALT", "DealtSampler", "not_dealt", "plain_attributes"]
