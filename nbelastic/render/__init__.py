"""Rendering of a job for notebooks and terminals: text, HTML and SVG.

All functions map a frozen :class:`JobSnapshot` to a string, without clock, IPython or I/O. So the
same snapshot always looks the same. :mod:`~nbelastic.render.output` makes lines of ranks' output.
"""

from __future__ import annotations

from .changes import sentence
from .figures import FIGURES, rank_line
from .formatting import abbreviate, count, duration, number, pace, printable
from .job_snapshot import JobSnapshot
from .output import Mode, RankLines, Streamer
from .page import OUTPUT_TITLE, PARTS, page
from .text import line, text
from .theme import STYLE
from .timeline import timeline, timeline_key

__all__ = [
    "FIGURES",
    "OUTPUT_TITLE",
    "PARTS",
    "STYLE",
    "JobSnapshot",
    "Mode",
    "RankLines",
    "Streamer",
    "abbreviate",
    "count",
    "duration",
    "line",
    "number",
    "pace",
    "page",
    "printable",
    "rank_line",
    "sentence",
    "text",
    "timeline",
    "timeline_key",
]
