"""Shares of the jobs of a cluster: pure functions of wants, slots and time.

Nothing here reads a clock, starts a thread or opens a connection. :func:`shares` says how many
slots each job should have, :class:`SharePolicy` when that takes effect, and :func:`assign` which
job each slot is for.
"""

from .fair_share import (
    Assignment,
    SharedSlot,
    SharePolicy,
    SharingRules,
    SlotGroup,
    Want,
    assign,
    shares,
)

__all__ = [
    "Assignment",
    "SharePolicy",
    "SharedSlot",
    "SharingRules",
    "SlotGroup",
    "Want",
    "assign",
    "shares",
]
