"""``join()``: a rank without more data takes part in its peers' operations.

It contributes zeros to sums and averages, which are divided by the number of all ranks. Steps of
distributed optimizers are sums as well. What has no neutral contribution raises an error on the
other ranks, as in Horovod, and they can go on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nbelastic.elastic.ranks.context import Context, before_check, current
from nbelastic.elastic.ranks.groups import Group
from nbelastic.errors import RanksDisagree
from nbelastic.torch.ops.coordination.comparison import begin
from nbelastic.torch.ops.coordination.coordination import CHECK, JOINED, announce, coordination_of
from nbelastic.torch.ops.operation.tensor_operations import Allreduce, Barrier

# What a rank that has joined does in an operation, by its kind.
SERVICES: dict[str, Callable[[Context, dict[str, Any]], object]] = {
    "allreduce": lambda context, what: begin(Group(context), Allreduce.of_zeros(what)).wait(),
    "barrier": lambda context, _: begin(Group(context), Barrier()).wait(),
    "check": lambda context, _: context.check_membership(),
}

at_end: list[Callable[[Context], None]] = []  # called when all ranks have joined


def join(device: int = -1) -> int:  # noqa: ARG001 - zeros are made where sums are formed, on the CPU
    """Tell all ranks that this rank has no more data, and wait until all have said so.

    Until then this rank takes part in what they do, with zeros: allreduce with Sum or Average,
    steps of distributed optimizers, SyncBatchNorm, barriers and commits. An average is divided by
    the number of all ranks. This rank's parameters stay what they are, so afterwards broadcast
    those of the last rank::

        for batch in batches:  # not equally many on all ranks
            ...
            optimizer.step()
        last = hvd.join()
        hvd.broadcast_parameters(model.state_dict(), root_rank=last)

    Allgather, broadcast, alltoall, reducescatter, Min, Max, Product and Adasum raise an error on
    the ranks that call them while another has joined.

    Parameters
    ----------
    device : int, default -1
        For Horovod's signature.

    Returns
    -------
    int
        The rank that joined last.

    Raises
    ------
    CollectiveError
        A peer is gone, or the generation is over.
    HostsUpdatedInterrupt
        The others have left the generation at a commit, because its members change.
    """
    context = current()
    communicator = Group(context).parent()
    coordination = coordination_of(communicator)
    if coordination is None:
        return context.rank
    coordination.join()
    while True:
        event = coordination.next_event()
        if event["do"] == "together":
            for end in at_end:
                end(context)
            return int(event["last"])
        if event["number"] == coordination.number + 1:
            _serve(context, event["what"])
        if coordination.number < event["number"]:  # peers would wait for it in vain
            communicator.abort(f"a rank that has joined could not take part in {event['what']}")
            communicator.check()


def _serve(context: Context, what: Any) -> None:
    """Take part in an operation of the other ranks."""
    service = SERVICES.get(what["kind"]) if isinstance(what, dict) else None
    if service is not None:
        service(context, what)
        return
    communicator = context.communicator()
    announce(communicator, what)  # counted here as on the other ranks
    try:
        communicator.agree(JOINED)  # no operation has this text, so the others raise RanksDisagree
    except RanksDisagree:
        communicator.check()  # the others raise it, and go on


before_check.append(lambda communicator: announce(communicator, CHECK))
