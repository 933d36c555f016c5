"""Horovod's environment variables: heeded, or named once as ignored."""

from __future__ import annotations

import logging
import os

from nbelastic.elastic.context import current
from nbelastic.elastic.session import warn

__all__ = ["heed_environment"]

logger = logging.getLogger("nbelastic")

_HEEDED = {"HOROVOD_LOG_LEVEL"}
# Set by Horovod's launcher, or true here in any case.
_SILENT = {
    "HOROVOD_DYNAMIC_PROCESS_SETS",
    "HOROVOD_ELASTIC",
    "HOROVOD_CONTROLLER",
    "HOROVOD_CPU_OPERATIONS",
    "HOROVOD_HOSTNAME",
    *(f"HOROVOD_{scope}{what}" for scope in ("", "LOCAL_", "CROSS_") for what in ("RANK", "SIZE")),
}
_INSTEAD = {
    "HOROVOD_TIMELINE": "hvd.start_timeline()",
    "HOROVOD_TIMELINE_MARK_CYCLES": "hvd.start_timeline(mark_cycles=True)",
    "HOROVOD_STALL_CHECK_TIME_SECONDS": "fit(stall_timeout=...)",
    "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "fit(stall_timeout=...)",
    "HOROVOD_STALL_CHECK_DISABLE": "fit(stall_timeout=...)",
    "HOROVOD_FUSION_THRESHOLD": "DistributedOptimizer(groups=...)",
    "HOROVOD_ELASTIC_TIMEOUT": "fit(elastic_timeout=...)",
}

_heeded: list[bool] = []


def heed_environment() -> None:
    """Set what Horovod's variables ask for, once in a process."""
    if _heeded:
        return
    _heeded.append(True)
    level = os.environ.get("HOROVOD_LOG_LEVEL", "").upper()
    if level in ("TRACE", "DEBUG", "INFO", "WARNING", "ERROR", "FATAL"):
        logger.setLevel({"TRACE": "DEBUG", "FATAL": "CRITICAL"}.get(level, level))
    given = {name for name in os.environ if name.startswith("HOROVOD_")}
    if os.environ.get("HOROVOD_TIMELINE") == "DYNAMIC":
        given.remove("HOROVOD_TIMELINE")
    ignored = sorted(given - _HEEDED - _SILENT)
    if ignored:
        words = [f"{name} (use {_INSTEAD[name]})" if name in _INSTEAD else name for name in ignored]
        text = f"these environment variables of Horovod's have no effect: {', '.join(words)}"
        logger.warning("%s", text)
        warn(current(), text)
