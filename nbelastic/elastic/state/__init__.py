"""State of training without a framework, and its transfer between ranks."""

from nbelastic.elastic.state.state import ObjectState, State, check_names, naming, public

__all__ = ["ObjectState", "State", "check_names", "naming", "public"]
