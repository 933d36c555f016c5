"""Process group of torch.distributed over the present generation."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed as dist
from torch.distributed.constants import default_pg_timeout

from nbelastic.collectives import Communicator, SoloCommunicator
from nbelastic.elastic.ranks.groups import Group
from nbelastic.torch.process_group.calls import CollectiveCalls

if TYPE_CHECKING:
    from nbelastic.elastic.ranks.context import Context

NAME = "nbelastic"


class ElasticProcessGroup(CollectiveCalls):
    """All ranks of the job at the time of each call, or some of them.

    After a reset, a group of some consists of those that are left. An operation's limit is
    `timeout`, if that is shorter than torch's own half hour; else it is the job's.
    """

    supports_splitting = supports_coalescing = supports_time_estimate = False
    supports_tensor_alloc = supports_reconfigure = False
    group_name, group_desc = NAME, ""  # in place of the properties of torch's class
    options = None  # of the back end: none but the timeout of the job

    def __init__(self, context: Context, timeout: Any = None, its: Group | None = None) -> None:
        super().__init__(context, _short(timeout))
        self._its = its or Group(context)
        self._second: ElasticProcessGroup | None = None  # the same ranks, for other threads
        self._alone: SoloCommunicator | None = None
        self._latest: Communicator | None = None  # of the last operation

    # -- who is in it ------------------------------------------------------------------------------

    def rank(self) -> int:
        return 0 if self._alone is not None else self._its.rank

    def size(self) -> int:
        return 1 if self._alone is not None else self._its.size

    getRank, getSize = rank, size  # noqa: N815 - C++ names

    @property
    def ranks(self) -> list[int]:
        """The ranks of the job that are in the group."""
        return self._its.ranks

    @property
    def generation(self) -> int:
        """The number of the present generation; 0 before the first."""
        return self.context.generation

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Make the group one of this rank alone, which waits for no other, in a ``with`` block."""
        before = self._alone
        self._alone = before or SoloCommunicator(generation=self.context.generation)
        try:
            yield
        finally:
            self._alone = before

    def communicator(self) -> Communicator:
        self._latest = self._alone or self._its.communicator()  # abort() must not form another
        return self._latest

    def here(self) -> ElasticProcessGroup:
        """Return this group; for a second thread that uses all ranks, its own of the same ranks."""
        if self._alone or not self._its.is_global or self.context.is_ranks_thread():
            return self
        if self._second is None:  # ranks pair operations by order; two threads have none
            self._second = ElasticProcessGroup(self.context, None, self._its.apart("threads"))
            self._second.queue.timeout_s = self.queue.timeout_s
        return self._second

    def new_group(
        self,
        ranks: Sequence[int],
        timeout: Any = None,
        pg_options: Any = None,
        group_name: str = "",
        group_desc: str | None = None,
    ) -> ElasticProcessGroup | None:
        """Return a group of some ranks; None if this rank is none of them."""
        # On all ranks, because they count their groups.
        its = Group.of_ranks(self.context, [self.ranks[each] for each in ranks], group_name)
        if its.rank < 0:
            return None
        group = ElasticProcessGroup(self.context, timeout, its)
        if self.context.generation:
            its.connected_to(its.parent())  # all members are here
        group.setGroupName(group_name)
        group.setGroupDesc(group_desc or "undefined")
        return group

    # -- names -------------------------------------------------------------------------------------

    def name(self) -> str:
        return NAME

    getBackendName = _get_backend_name = name  # noqa: N815

    def getGroupName(self) -> str:  # noqa: N802
        return self.group_name

    def setGroupName(self, name: str) -> None:  # noqa: N802
        self.group_name = name

    def getGroupDesc(self) -> str:  # noqa: N802
        return self.group_desc

    def setGroupDesc(self, desc: str) -> None:  # noqa: N802
        self.group_desc = desc

    _set_group_name, _set_group_desc = setGroupName, setGroupDesc

    @property
    def _device_types(self) -> list[torch.device]:
        kinds = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
        return [torch.device(each) for each in kinds]

    def _get_backend(self, device: torch.device) -> Any:
        return self

    def __repr__(self) -> str:
        return f"<nbelastic process group {self.group_name!r}: rank {self.rank()} of {self.size()}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return _group_of_this_process, (self.group_name,)  # connections do not travel

    def __deepcopy__(self, memo: dict[int, Any]) -> ElasticProcessGroup:
        return self  # a copied DDP reduces among the same ranks

    # -- life --------------------------------------------------------------------------------------

    def set_timeout(self, timeout: timedelta) -> None:
        self.queue.timeout_s = _short(timeout)

    _set_default_timeout = set_timeout

    def _has_hooks(self) -> bool:
        return False

    def shutdown(self) -> None:
        """Forget operations, and close the communicator of a part; the generation goes on."""
        self.queue.drop()
        whole, name, _ = (self._latest and self._latest.part_of) or (lambda: None, "", [])
        if (parent := whole()) is not None:
            parent.close_subgroup(name)

    def abort(self) -> None:
        """End all operations under way on this rank, and with them the generation; any thread."""
        if self._latest is not None and self._latest.generation == self.generation:
            self._latest.abort("the process group was aborted")


def _short(timeout: Any) -> float:
    """Return a limit in seconds; 0 for torch's own and for longer ones."""
    short = isinstance(timeout, timedelta) and timeout < default_pg_timeout
    return timeout.total_seconds() if short else 0.0


def _group_of_this_process(name: str) -> Any:
    """Return the group of a name in this process, for an unpickled object."""
    if not dist.is_initialized():
        return None
    groups = dist.distributed_c10d._world.pg_names.items()
    found = (group for group, each in groups if each == name)
    return next(found, dist.group.WORLD)
