"""Displays of a job in a terminal: a live view, a line for each event, or JSON."""

from .display import CommandDisplay, ViewOptions

__all__ = ["CommandDisplay", "ViewOptions"]
