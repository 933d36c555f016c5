"""Parts that the integrations of trainers have in common; imports no trainer."""

from nbelastic.trainers.attributes import plain_attributes
from nbelastic.trainers.sampler import DealtSampler, dealt, not_dealt, obstacle_to

__all__ = ["DealtSampler", "dealt", "not_dealt", "obstacle_to", "plain_attributes"]
