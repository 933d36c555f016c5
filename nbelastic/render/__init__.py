"""Rendering of a job for notebooks and terminals: text, HTML and SVG.

All functions map a frozen :class:`JobSnapshot` to a string, without clock, IPython or I/O. So the
same snapshot always looks the same.
"""

from __future__ import annotations

from .changes import sentence
from .figures import FIGURES, rank_line
from .formatting import abbreviate, count, duration, limits, number, printable, rate
from .job_snapshot import JobSnapshot
from .page import PARTS, page
from .text import line, text
from .theme import STYLE
from .timeline import timeline, timeline_key

__all__ = [
    "FIGURES",
    "PARTS",
    "STYLE",
    "JobSnapshot",
    "abbreviate",
    "count",
    "duration",
    "limits",
    "line",
    "number",
    "page",
    "printable",
    "rank_line",
    "rate",
    "sentence",
    "text",
    "timeline",
    "timeline_key",
]
