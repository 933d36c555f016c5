"""Rendering of a job as text, HTML and SVG: pure functions of a snapshot."""

from __future__ import annotations

from .figures import FIGURES, status_lines
from .formatting import abbreviate, count, duration, number, pace, printable
from .output import Mode, RankLines, Streamer
from .page import OUTPUT_TITLE, PARTS, STYLE, page
from .text import JobSnapshot, line, sentence, text

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
    "sentence",
    "status_lines",
    "text",
]
