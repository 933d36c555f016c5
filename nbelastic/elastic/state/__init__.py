"""State of training without a framework, and its transfer between ranks."""

from nbelastic.elastic.state.state import (
    SENT,
    ObjectState,
    State,
    check_names,
    public,
    refuse_by_name,
)

__all__ = [
    "SENT",
    "ObjectState",
    "State",
    "check_names",
    "public",
    "refuse_by_name",
]
