"""Sentences for people, made from the reasons that membership gives."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from nbelastic.membership import (
    FRESH,
    LossReason,
    NoticeSource,
    Reason,
    StopReason,
    UnusedReason,
)
from nbelastic.membership import reasons as why

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from .status import DataStatus

_LOSSES = {
    LossReason.RAISED: "{detail}",
    LossReason.PROCESS_ENDED: "its process has ended",
    LossReason.PROCESS_STOPPED: "its process is stopped",
    LossReason.WORKER_GONE: "its worker left the cluster",
    LossReason.WORKER_SILENT: "its worker has sent no heartbeat for {seconds:.0f} s",
    LossReason.UNREADABLE: "its worker has sent a message that cannot be read: {detail}",
    LossReason.NOT_READY: "not ready {seconds:g} s after its start (elastic_timeout)",
    LossReason.NOT_CONNECTED: "not connected to the other ranks after {seconds:g} s",
    LossReason.NOT_LEFT: "did not leave its generation within {seconds:g} s (stall_timeout)",
    LossReason.STALLED: "held up the others for {seconds:g} s (stall_timeout)",
    LossReason.UNREACHABLE: "the other ranks cannot connect to it",
    LossReason.LEFT: "as planned",
    LossReason.ENDED: "ended without an order",
}

_UNUSED = {
    UnusedReason.CLOSING: "closing",
    UnusedReason.LEAVING: "asked to leave",
    UnusedReason.PAUSED: "paused by Dask because its memory is used up",
    UnusedReason.NOT_IN_WORKERS: "not among workers=",
    UnusedReason.LACKS_RESOURCES: "without the resources ({detail})",
    UnusedReason.TAKEN: "taken by job {detail!r}",
    UnusedReason.RESERVED: "reserved for job {detail!r}",
    UnusedReason.BEYOND_SHARE: "beyond the share of this job",
    UnusedReason.BUSY: "busy with other tasks of Dask, which its rank waits for",
    UnusedReason.OTHER_VERSIONS: "with {detail}",
    UnusedReason.BEING_PREPARED: "being prepared",
    UnusedReason.REFUSED: "refused, because {detail}",
    UnusedReason.HOST_FULL: "on a host that has slots_per_host={detail} ranks already",
    UnusedReason.TOO_LATE: "too late: the ranks are past the point where others can join",
}

_NOTICES = {
    NoticeSource.AWS: "AWS spot",
    NoticeSource.GOOGLE: "Google Cloud",
    NoticeSource.AZURE: "Azure",
    NoticeSource.SLURM: "SLURM's time limit",
    NoticeSource.PBS: "PBS's time limit",
    NoticeSource.SIGNAL: "signal",
    NoticeSource.CHAOS: "nbelastic.chaos",
}

OUTPUT_GAP = "output of ranks was left out, because this kernel did not read it for a while"

_TRANSPORTS = {
    "gloo": "Gloo",
    "shm": "shared memory",
    "hierarchical": "shared memory and Gloo",
    "cuda_ipc": "CUDA IPC",
    "cuda_ipc+gloo": "CUDA IPC and Gloo",
    "cuda_ipc+nccl": "CUDA IPC and NCCL",
    "nccl": "NCCL",
}


def over(backend: str) -> str:
    """Return the way that tensors travel, such as ``over Gloo``; empty for a single rank.

    Parameters
    ----------
    backend : str
        Kind of the members' communicator; empty while it is not known.
    """
    return "" if backend in ("", "solo") else f"over {_TRANSPORTS.get(backend, backend)}"


def in_micro_batches(count: int, why_not_exact: str) -> str:
    """Return how a step is divided, and whether the training is exact; empty without a loader.

    Parameters
    ----------
    count : int
        Micro-batches of a step.
    why_not_exact : str
        What keeps the training from being exact; empty if nothing does.
    """
    if not count:
        return ""
    exact = f"not exact: {why_not_exact}" if why_not_exact else "exact"
    return f"{count} micro-batch{'es' * (count != 1)} a step, {exact}"


def rows_in_words(data: DataStatus, *, ended: bool) -> str:
    """Return the rows of a source: of the job if it has ended, else also those of the epoch."""
    counts = f"{data.redone:,} redone, {data.lost:,} lost"
    rows = data.seen if ended else data.done
    noun = f"{rows:,} row{'s' * (rows != 1)}"
    if ended:
        return f"{noun} once, {counts}"
    left = "" if data.left is None else f", {data.left:,} left"
    return f"{data.source}: {noun} of epoch {data.epoch + 1} done{left}, {counts}"


def history_detail(reason: Reason | None, *, executing: str = "", raised: str = "") -> str:
    """Return the detail of a history entry, which names its rank and worker apart.

    Parameters
    ----------
    reason : Reason or None
        The reason of the entry.
    executing, raised : str
        The line of code that the rank was executing last, and the one at which it raised.
    """
    if not isinstance(reason, why.Lost):
        return in_words(reason)
    words = _loss(reason)
    if reason.reason == LossReason.STALLED and executing:
        return f"{words}; it was executing {executing}"
    return f"{words}; raised at {raised}" if raised else words


def reset_detail(figures: Mapping[str, float]) -> str:
    """Return the detail of a history entry about a reset, from its timings in milliseconds."""
    batches, samples = (int(figures.get(name, 0)) for name in ("batches", "samples"))
    phases = [f"{k} {v:.1f}" for k, v in figures.items() if k not in ("batches", "samples")]
    words = ", ".join(phases) + " ms"
    if not batches:
        return words
    again = f"{batches:,} {'batch' if batches == 1 else 'batches'}"
    return f"{words}; {again}{f' of {samples:,} samples' if samples else ''} redone"


def straggler_detail(figures: Mapping[str, float]) -> str:
    """Return the detail of a history entry about a rank that holds the others up."""
    after, before, of = (int(figures.get(name, 0)) for name in ("micro_batches", "before", "of"))
    return (
        f"takes {figures.get('times', 0.0):.1f} times as long for a micro-batch as the others; "
        f"computes {after} of {of} now, {before} before"
    )


def in_words(reason: Reason | None) -> str:
    """Return a reason as a sentence without its full stop; empty for None."""
    return "" if reason is None else _words(reason)


@functools.singledispatch
def _words(reason: Reason) -> str:
    return str(reason)


def _listed(reasons: Iterable[Reason]) -> str:
    return "; ".join(dict.fromkeys(map(in_words, reasons)))


def _causes(reasons: tuple[Reason, ...]) -> str:
    return _listed(reasons) or "a planned change"


def _loss(lost: why.Lost) -> str:
    if lost.reason == LossReason.PROCESS_ENDED and lost.detail:
        return lost.detail
    return _LOSSES[lost.reason].format(detail=lost.detail, seconds=lost.seconds)


# -- ranks and generations -------------------------------------------------------------------------


@_words.register
def _(reason: why.Lost) -> str:
    return f"{reason.rank}: {_loss(reason)}"


@_words.register
def _(reason: why.DidNotEnd) -> str:
    return (
        f"{reason.rank} did not end within {reason.seconds:g} s of the order to: its worker is "
        "restarted, or closed if it has no nanny"
    )


@_words.register
def _(reason: why.Exclusion) -> str:
    length = "for good" if reason.seconds is None else f"for {reason.seconds:.1f} s"
    return f"{reason.kind} {reason.name} is excluded {length}"


@_words.register
def _(reason: why.CannotJoin) -> str:
    return (
        f"{reason.rank} could not join: its function builds another state than the others have\n"
        f"{reason.error}\n"
        "The others go on without it, and its worker is tried again later. Whatever training adds "
        "to the model or the optimizer must be there, on each rank, before the state is made."
    )


@_words.register
def _(reason: why.NotConnected) -> str:
    ranks = ", ".join(map(str, reason.ranks))
    return f"not connected after {reason.seconds:g} s: {ranks}"


@_words.register
def _(reason: why.Unreachable) -> str:
    return f"{reason.one} cannot reach {reason.other}"


@_words.register
def _(reason: why.AllWaited) -> str:
    words = f"all ranks waited for each other for {reason.seconds:g} s (stall_timeout)"
    if reason.after_loop:
        return f"{words} after their elastic loop"
    return words if reason.times == 1 else f"{words}, {reason.times} times in a row"


@_words.register
def _(reason: why.Reset) -> str:
    return f"{_causes(reason.causes)} → {_ranks(reason.size)}"


@_words.register
def _(reason: why.Connected) -> str:
    return f"{_ranks(reason.size)} {over(reason.backend)}".rstrip()


@_words.register
def _(reason: why.Transport) -> str:
    return f"tensors go {over(reason.backend)}: {reason.remark}"


@_words.register
def _(reason: why.StateLost) -> str:
    state = f"commit {reason.commit}, the newest known one" if reason.commit else "the state"
    return f"no rank is left that holds {state}"


def _ranks(number: int) -> str:
    return f"{number} rank{'s' * (number != 1)}"


# -- the end of a job ------------------------------------------------------------------------------


@_words.register
def _(reason: why.UserErrors) -> str:
    return "; ".join([*reason.errors, *filter(None, [in_words(reason.presence)])])


@_words.register
def _(reason: why.RepeatedError) -> str:
    how = "in one generation" if reason.one_generation else "one after another"
    return f"{reason.error} (raised on {reason.workers} workers, {how})"


@_words.register
def _(reason: why.OwnFailures) -> str:
    return (
        f"{in_words(reason.last)} ({reason.times} generations in a row ended with this at commit "
        f"{reason.commit}, without progress)"
    )


@_words.register
def _(reason: why.RepeatedLoss) -> str:
    place = f" at commit {reason.commit}"
    if reason.commit == FRESH:
        place = ", before the first generation"
    if reason.state_lost:
        newest = f" (newest known commit: {reason.commit})" if reason.commit else ""
        place = f", each time with the job's state{newest}"
    known = {lost.detail for lost in reason.losses}
    death = f"; before that, {reason.last_death}" if reason.last_death not in {"", *known} else ""
    times = f"{reason.times} times in a row{place}, without progress"
    return f"{_listed(reason.losses)} ({times}{death})"


@_words.register
def _(reason: why.NoCommit) -> str:
    return f"ranks failed {reason.times} times in a row without a commit: {_causes(reason.causes)}"


@_words.register
def _(reason: why.CannotForm) -> str:
    return f"the ranks could not connect: {_listed(reason.causes)}"


@_words.register
def _(reason: why.ResetLimit) -> str:
    return f"reset_limit={reason.limit} is reached; next reset: {_causes(reason.causes)}"


@_words.register
def _(reason: why.LoopsDiffer) -> str:
    return (
        f"{reason.done} has reached the end of its elastic loop, but {reason.waiting} waits for it "
        "in another operation, because it has more batches or commits. Give all ranks the same "
        "number of batches (hvd.elastic.ElasticSampler does), and commit on all of them; or end "
        "the loop over batches by hvd.join(), with which a rank waits for those that have more"
    )


@_words.register
def _(reason: why.OperationsDiffer) -> str:
    sides = zip(reason.ranks, reason.operations, strict=True)
    words = "; ".join(f"{rank}: {operation}" for rank, operation in sides)
    return (
        f"ranks wait for each other in different operations: {words}. All ranks must call the same "
        "operations in the same order"
    )


@_words.register
def _(reason: why.PastFirstLoop) -> str:
    what = "no rank can join any more"
    if reason.ranks is not None:
        what = f"{reason.ranks} of at least {reason.low} ranks are left, and none can join"
    return (
        f"{what}: the others are in elastic loop {reason.loop} of the function, and a rank that "
        "joins starts at its top, with the first loop. To let ranks join in all phases, put the "
        "phases into one elastic loop, with the phase among the values of the state"
    )


@_words.register
def _(_: why.PlacesDiffer) -> str:
    return (
        "ranks wait at different places of the function. All ranks must enter the same elastic "
        "loops in the same order"
    )


@_words.register
def _(reason: why.ReturnedEarly) -> str:
    ranks = ", ".join(map(str, reason.ranks))
    if reason.waiting:
        return f"ranks returned while others wait to train: {ranks}"
    return f"{ranks} returned while others train"


@_words.register
def _(reason: why.NoLoop) -> str:
    return (
        f"{in_words(reason.cause)}; the function has no elastic loop, so it cannot go back to a "
        "commit"
    )


@_words.register
def _(reason: why.RanksMissing) -> str:
    lost = f"{reason.missing} of {reason.expected} ranks ended before they returned"
    return "; ".join(filter(None, [lost, _listed(reason.causes)]))


@_words.register
def _(reason: why.SchedulerLost) -> str:
    return reason.detail


@_words.register
def _(reason: why.Stopping) -> str:
    if reason.reason == StopReason.UNATTENDED:
        return f"ended, because no kernel attached to it within {reason.seconds:g} s"
    return f"{reason.reason.value}{' at a commit' if reason.at_commit else ''}"


# -- warnings --------------------------------------------------------------------------------------


@_words.register
def _(reason: why.NeverMet) -> str:
    words = [
        f"ranks never met: {reason.ranks} separate trainings",
        "No rank used an operation between ranks or an elastic loop, so each ran the whole "
        "function alone.",
    ]
    if reason.libraries:
        words.append(
            f"Imported in the ranks: {', '.join(reason.libraries)}. These libraries do not use "
            "nbelastic's ranks."
        )
    words.append(
        "To train one model, wrap the optimizer with nbelastic.torch.DistributedOptimizer and "
        "train in a function decorated with nbelastic.torch.elastic.run."
    )
    return "\n".join(words)


@_words.register
def _(reason: why.WeightsDiffer) -> str:
    if reason.optimizers:
        cause = (
            f"{', '.join(reason.optimizers)} is not wrapped by "
            "nbelastic.torch.DistributedOptimizer, so that each rank steps with its own gradients."
        )
        advice = (
            "Wrap each optimizer before the state is made: "
            "optimizer = hvd.DistributedOptimizer(optimizer)."
        )
    else:
        cause = (
            "They were never made equal, or something changes them on each rank by itself, or "
            "changes gradients after they are averaged."
        )
        advice = (
            "Give the model and its optimizer to the state, which makes them equal: "
            "hvd.elastic.TorchState(model, optimizer). Without an elastic loop, call "
            "hvd.broadcast_parameters(model.state_dict(), root_rank=0) first."
        )
    return f"ranks train different parameters\n{cause}\n{advice}"


# -- workers, and the status -----------------------------------------------------------------------


@_words.register
def _(reason: why.UnusedGroup) -> str:
    more = reason.number - len(reason.workers)
    names = ", ".join(reason.workers) + (f", and {more} more" if more > 0 else "")
    return f"{reason.number} {_UNUSED[reason.reason].format(detail=reason.detail)} ({names})"


@_words.register
def _(reason: why.Presence) -> str:
    words = f"{reason.there} of at least {reason.needed} workers"
    if reason.excluded:
        words += f" ({reason.excluded} more are there, but excluded because they failed)"
    return f"{words} (not used: {_listed(reason.unused)})" if reason.unused else words


@_words.register
def _(reason: why.Shortage) -> str:
    words = (
        f"{in_words(reason.presence)} (min_np={reason.min_np}) after waiting "
        f"{reason.waited:.1f} s (elastic_timeout={reason.timeout:g})"
    )
    if reason.excluded:
        words += f"; excluded after failures: {', '.join(reason.excluded)}"
    if reason.last_death:
        words += f"; the last process that died: {reason.last_death}"
    return f"{words}; last error: {reason.last_error}" if reason.last_error else words


@_words.register
def _(reason: why.Waiting) -> str:
    missing = reason.presence.needed - reason.presence.there
    left = f"{reason.waited:.0f} s of {reason.timeout:g} s"
    return f"{in_words(reason.presence)}; waiting {left} for {missing} more"


@_words.register
def _(reason: why.NotUsed) -> str:
    return f"not used: {_listed(reason.groups)}"


@_words.register
def _(reason: why.Sharing) -> str:
    slots = f"{reason.share} of {reason.slots} slots"
    others = _others(reason.others, reason.number)
    if reason.suspended and not reason.share:
        return f"suspended: its state is in its checkpoint, while others go first: {others}"
    if reason.suspended:
        return f"suspended: {slots} for its state, while others go first: {others}"
    return f"{slots}: shares with {others}"


@_words.register
def _(reason: why.ShareChanged) -> str:
    before, after = ("all" if each is None else each for each in (reason.before, reason.after))
    change = f"{before} → {after}"
    if not reason.others:
        return change
    return f"{change}: shares with {_others(reason.others, reason.number)}"


def _others(names: tuple[str, ...], number: int) -> str:
    more = number - len(names)
    return ", ".join(names) + (f" and {more} more" if more > 0 else "")


@_words.register
def _(reason: why.NoticeGiven) -> str:
    minutes, seconds = divmod(max(round(reason.seconds), 0), 60)
    source = _NOTICES[reason.source]
    action = "" if reason.action in ("", "end") else f" ({reason.action})"
    if reason.soft:
        return f"worker {reason.name} leaves once another is ready: {source}{action}"
    return f"worker {reason.name} leaves in {minutes}:{seconds:02}: {source}{action}"


@_words.register
def _(reason: why.NoticeRevoked) -> str:
    return f"worker {reason.name} stays: {_NOTICES[reason.source]} has revoked its notice"


@_words.register
def _(reason: why.GoneBeforeCommit) -> str:
    return (
        f"worker {reason.name} has gone before its rank came to a commit, "
        f"{reason.seconds:.0f} s after it was asked to leave: steps since the last commit are "
        "done again. Call state.check_host_updates() after each batch, where ranks leave, too, or "
        "commit more often"
    )


@_words.register
def _(_: why.NoneStays) -> str:
    return (
        "all workers with the state will go, and the job has no checkpoint: it starts over unless "
        "another worker joins before. Pass checkpoint=, or add workers"
    )


@_words.register
def _(reason: why.Noticed) -> str:
    more = reason.number - len(reason.notices)
    return _listed(reason.notices) + (f"; and {more} more" if more > 0 else "")


@_words.register
def _(_: why.StopPending) -> str:
    return "stopping at the next commit"


@_words.register
def _(reason: why.WaitingForRanks) -> str:
    if reason.generation:
        return f"waiting for {_ranks(reason.number)} to leave generation {reason.generation}"
    held_up = f" (not used: {_listed(reason.unused)})" if reason.unused else ""
    return f"waiting for {_ranks(reason.number)} to be ready{held_up}"


@_words.register
def _(reason: why.KernelLost) -> str:
    return f"its kernel is gone; it goes on for up to {reason.seconds:g} s"


@_words.register
def _(_: why.KernelAttached) -> str:
    return "a kernel has attached to it"
