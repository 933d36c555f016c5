"""Pictures of a job, as one line of text, as HTML and as SVG. Pure functions.

Everything here goes from a frozen :class:`Picture` to a string: no clock, no IPython, no I/O, so
that the same picture always looks the same.
"""

from __future__ import annotations

from .page import PARTS, card, page
from .picture import Picture
from .text import line, text
from .theme import STYLE
from .timeline import timeline, timeline_key

__all__ = ["PARTS", "STYLE", "Picture", "card", "line", "page", "text", "timeline", "timeline_key"]
