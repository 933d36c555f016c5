"""Fixtures of the commands' tests."""

from .stage import stage

__all__ = ["stage"]
