"""Use of what only Linux has."""

from __future__ import annotations

import os
import sys

LINUX = sys.platform == "linux" and os.environ.get("NBELASTIC_PORTABLE") != "1"
"""Whether to use what only Linux has: memory shared by native code, forks of a process with torch,
prctl, /proc, sockets that keep messages apart. ``NBELASTIC_PORTABLE=1`` in the environment of
workers does without, as macOS does."""
