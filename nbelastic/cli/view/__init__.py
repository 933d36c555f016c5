"""Displays of a job in a terminal: a live view, a line for each event, or JSON."""

from .display import CommandDisplay, ViewOptions, write_errors

__all__ = ["CommandDisplay", "ViewOptions", "write_errors"]
