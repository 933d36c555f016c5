"""``init()`` and Horovod's environment variables, heeded or named as ignored."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

from nbelastic.elastic.ranks.context import current, initialize
from nbelastic.elastic.ranks.session import Session, warn
from nbelastic.torch.ops.coordination.process_sets import add_first_sets

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nbelastic.torch.ops.coordination.process_sets import ProcessSet

logger = logging.getLogger("nbelastic")

_HEEDED = {"HOROVOD_FUSION_THRESHOLD", "HOROVOD_LOG_LEVEL", "HOROVOD_TIMELINE_MARK_CYCLES"}
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
    "HOROVOD_TIMELINE": "set it where fit is called, or use fit(timeline=...)",
    "HOROVOD_STALL_CHECK_TIME_SECONDS": "a rank that stalls is replaced after stall_timeout",
    "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "set it where fit is called",
    "HOROVOD_STALL_CHECK_DISABLE": "set it where fit is called",
    "HOROVOD_ELASTIC_TIMEOUT": "set it where fit is called",
    "HOROVOD_CYCLE_TIME": "operations begin at once",
    "HOROVOD_CACHE_CAPACITY": "there is no cache of responses",
    "HOROVOD_GLOO_IFACE": "ranks use the interface of their Dask worker",
}

_heeded: list[bool] = []


def init(
    comm: Sequence[int] | None = None,
    process_sets: Sequence[ProcessSet | Sequence[int]] | str | None = None,
) -> None:
    """Make the calling thread a rank: of its job, or outside one of a world of its own.

    Idempotent. It never waits for other ranks.

    Parameters
    ----------
    comm : None
        For Horovod's signature: the cluster decides on the ranks.
    process_sets : list of ProcessSet, or "dynamic", optional
        Sets of the ranks with which the job begins, the same on all ranks. Others can be added
        later in any case, so ``"dynamic"`` has no effect.

    Raises
    ------
    ValueError
        A subset of ranks is asked for, or `process_sets` is something else.
    """
    if comm:
        raise ValueError(f"comm must be None, not {comm!r}: the cluster decides on the ranks")
    if isinstance(process_sets, str) and process_sets.lower() != "dynamic":
        raise ValueError(f'process_sets must be a list of sets or "dynamic", not {process_sets!r}')
    initialize()
    heed_environment()
    if process_sets and not isinstance(process_sets, str):
        add_first_sets(process_sets)


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
    if not os.environ.get("HOROVOD_FUSION_THRESHOLD", "0").isdecimal():
        given.add("HOROVOD_FUSION_THRESHOLD (must be a number of bytes)")
    context = current()
    by_the_job = context.spec.heeded if isinstance(context, Session) else ()
    ignored = sorted(given - _HEEDED - _SILENT - {*by_the_job})
    if ignored:
        words = [f"{name} ({_INSTEAD[name]})" if name in _INSTEAD else name for name in ignored]
        text = f"these environment variables of Horovod's have no effect: {', '.join(words)}"
        logger.warning("%s", text)
        warn(context, text)
