"""Explain decisions on a job: the event, the reporting process, and the rule."""

from __future__ import annotations

import time
from collections.abc import Iterable

from nbelastic.driver.status import HistoryEvent

MOST = 20  # decisions that are shown, the newest

_RULES = {
    "lost": "a rank that has ended, or holds the others up longer than its limit, is dropped",
    "left": "a rank whose worker leaves, or that the job can spare, ends at a commit",
    "cooldown": "a worker, or a host with several failures, gets no rank for a while "
    "(blacklist_cooldown)",
    "died": "the cause of death of a rank's process is kept; what the job does on it is `lost`",
    "restarted": "a job whose state no rank and no checkpoint holds starts over",
    "joined": "a job has a rank on each worker that it may use, up to max_np and its share",
    "warning": "a likely mistake in the training is reported, and the training goes on",
    "reset": "ranks go on from the newest commit when the members of a job change",
    "refused": "a worker without nbelastic, or with other versions, hosts no rank",
    "backend": "all ranks use the fastest transport that each of them can use (backend)",
    "waiting": "a job needs min_np workers, and waits for them for elastic_timeout",
    "share": "jobs share the slots of a cluster by priority and weight (nbelastic.sharing)",
    "notice": "ranks leave a machine whose end is announced before it goes (notices)",
    "straggler": "a slow rank gets fewer micro-batches (balance)",
    "abandoned": "a job goes on without its kernel for its lease",
    "attached": "a kernel may take a job over at any time",
    "finished": "a job has finished once all ranks have returned",
    "failed": "a job ends with what it cannot recover from, or what comes again without progress",
    "stopped": "a job ends when its user says so, or with its lease",
}


class Explanation(str):
    """A text, shown unquoted in a notebook."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def explain(job: str, history: Iterable[HistoryEvent], rank: int | None = None) -> Explanation:
    """Return the newest decisions on a job or a rank, with what was seen and the rule of each."""
    found = [event for event in history if event.kind in _RULES]
    if rank is not None:
        found = [event for event in found if event.rank == rank]
    whose = f"job {job!r}" if rank is None else f"rank {rank} of job {job!r}"
    if not found:
        return Explanation(f"{whose}: nothing was decided so far")
    lines = [f"{whose}, the newest decision last:"]
    for event in found[-MOST:]:
        at = time.strftime("%H:%M:%S", time.localtime(event.time))
        place = "" if event.worker is None else f" {event.name or event.worker}"
        rank_of = "" if event.rank is None else f" rank {event.rank} on"
        lines.append(f"{at}  {event.kind}{rank_of}{place}, in generation {event.generation}")
        detail = event.detail.replace("\n", "\n              ")
        facts = {"what": detail, "seen by": event.seen, "rule": _RULES[event.kind]}
        lines += [f"    {name:<8}{text}" for name, text in facts.items() if text]
    return Explanation("\n".join(lines))
