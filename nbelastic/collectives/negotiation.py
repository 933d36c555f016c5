"""Negotiation: the ranks of a generation choose together how tensors travel.

1. Each rank sends its capabilities to the rendezvous server (:mod:`.topology`).
   Among them is a segment that the ranks of its host may share (:mod:`.shm.segment`).
2. The ranks of each host open that of the lowest, and each sends what has failed.

All ranks see the same capabilities and results, and draw the same conclusion: shared memory if all
are on one host, both transports if some are, else Gloo. Where something is in the way, all fall
back to Gloo, unless the job demands shared memory.

If all ranks have used a GPU, they then try the transports of GPUs, the fastest first, and take the
first that a trial proves on all ranks; else they reduce on the hosts:

- NCCL, for ranks with a card each, on any hosts: its communicator forms, and adds up ones;
- CUDA IPC, for ranks of one host: they open each other's memory, and read a mark there.

A job may ask for one of these by name, or for none.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from nbelastic.collectives.abort_signal import AbortSignal
from nbelastic.collectives.communicator import Communicator
from nbelastic.collectives.gloo.communicator import GlooCommunicator
from nbelastic.collectives.gpu.device import Device, DeviceError, Unusable, present_device
from nbelastic.collectives.hierarchical import HierarchicalCommunicator
from nbelastic.collectives.nccl.library import NcclLibrary, card_of, present_library
from nbelastic.collectives.operations import AsyncCommunicator
from nbelastic.collectives.rendezvous.client import Rendezvous, RendezvousClient
from nbelastic.collectives.topology import (
    RankCapabilities,
    Topology,
    nccl_obstacle,
    sharing_host,
)
from nbelastic.errors import CollectiveError

if TYPE_CHECKING:
    from nbelastic.collectives.gpu.communicator import Host
    from nbelastic.collectives.nccl.group import NcclGroup
    from nbelastic.native._core import Group

ON_HOST = "tensors of GPUs are reduced in the memory of the host"
ON_GPUS = {"auto": ("nccl", "cuda_ipc"), "nccl": ("nccl",), "cuda_ipc": ("cuda_ipc",)}
"""Transports of GPUs to try, in order, by the backend that the job asks for."""


class NegotiatingCommunicator(AsyncCommunicator):
    """Negotiates a communicator, and stands in for the communicator until it is connected.

    The chosen one has the same abort signal.
    """

    name = "auto"
    host: Callable[[], str] = staticmethod(sharing_host)  # that the rank claims to be on
    device: Callable[[], Device | None] = staticmethod(present_device)
    library: Callable[[], NcclLibrary] = staticmethod(present_library)

    def __init__(self, rendezvous: Rendezvous) -> None:
        super().__init__(rendezvous, AbortSignal())
        self._device: Device | None = None
        self._library: NcclLibrary | None = None
        self._tries = ON_GPUS.get(rendezvous.backend, ())
        self._on_host = rendezvous
        if "nccl" in self._tries:  # subgroups of the host's communicator do without NCCL
            self._on_host = dataclasses.replace(rendezvous, backend="host")

    def connect(self) -> Communicator:
        self._abort_signal.check()
        try:
            chosen = self._choose()
        except CollectiveError as error:
            self._abort_signal.abort(f"generation {self.generation} did not form: {error}")
            self._abort_signal.check()
            raise  # never: check() raises
        if self._abort_signal.reason is not None:  # aborted since the last exchange
            chosen.close()
        self._abort_signal.check()
        return chosen

    # -- choosing --------------------------------------------------------------------------------

    def _choose(self) -> Communicator:
        with contextlib.ExitStack() as until_shared:
            obstacle, segment = self._own_segment(until_shared)
            own = RankCapabilities(obstacle, self.host(), segment, *self._own_gpu())
            values = self._exchange("capabilities", msgspec.json.encode(own))
            its = [msgspec.json.decode(value, type=RankCapabilities) for value in values]
            chosen = self._choose_host(its)
        if not self._tries:
            return chosen
        if self._rendezvous.backend == "auto" and not any(each.gpu for each in its):
            return chosen  # nothing is missing on ranks without GPUs
        return self._with_devices(chosen, its)

    def _own_segment(self, until_shared: contextlib.ExitStack) -> tuple[str, str]:
        """Return why this rank cannot share memory, and else the segment that it offers."""
        from nbelastic.native import missing

        if missing:
            return f"nbelastic was installed without its C++ part ({missing})", ""
        from nbelastic.collectives.shm.segment import offered_segment

        try:
            return "", until_shared.enter_context(offered_segment(self.size))
        except OSError as error:  # a container may forbid it, or limit the size of files
            return f"the system refuses to share memory: {error}", ""

    def _choose_host(self, capabilities: Sequence[RankCapabilities]) -> Host:
        """Return a communicator that reduces on the hosts."""
        topology = Topology.of(capabilities)
        if not topology.any_host_shared:
            return self._over_gloo()
        if topology.obstacle:
            return self._fall_back(topology.obstacle)
        from nbelastic.collectives.shm.segment import join_segment

        group, failure, ranks = None, "", topology.local_ranks(self.rank)
        if len(ranks) > 1:
            offer, place = capabilities[ranks[0]].segment, ranks.index(self.rank)
            try:
                group = join_segment(offer, place, len(ranks), self._rendezvous.timeout_s)
            except (OSError, ValueError) as error:
                failure = f"it cannot open the memory of rank {ranks[0]}: {error}"
        # A rank that dies before it has a group is missing here; later, its group breaks.
        results = [each.decode() for each in self._exchange("results", failure.encode())]
        if not any(results):
            return self._over_segments(topology, group)
        rank, reason = next((rank, each) for rank, each in enumerate(results) if each)
        return self._fall_back(f"rank {rank}: {reason}")  # no rank uses one if one cannot

    def _over_segments(self, topology: Topology, group: Group | None) -> Host:
        """Return the communicator for a topology; it owns the `group`, a segment."""
        if group is not None and len(topology.hosts) == 1:
            from nbelastic.collectives.shm.communicator import SharedMemoryCommunicator

            return SharedMemoryCommunicator(self._on_host, group, self._abort_signal)
        chosen = HierarchicalCommunicator(self._on_host, topology, group, self._abort_signal)
        return chosen.connect()

    # -- GPUs ------------------------------------------------------------------------------------

    def _own_gpu(self) -> tuple[str, str, str, str]:
        """Return the GPU's part of this rank's capabilities, unless the job does without GPUs."""
        self._device = device = self.device() if self._tries else None
        if device is None:
            return "", "", "", ""
        if "nccl" not in self._tries:
            return device.kind, "", "", ""
        from nbelastic.collectives.nccl.group import obstacle

        try:
            self._library = library = self.library()
        except DeviceError as error:
            return device.kind, "", str(error), ""
        version = ".".join(map(str, library.version))
        return device.kind, version, obstacle(), card_of(device, library, self.rank)

    def _with_devices(self, host: Host, capabilities: Sequence[RankCapabilities]) -> Communicator:
        """Return the fastest communicator that reduces on GPUs and works, else the host's."""
        reasons: list[str] = []
        for transport in self._tries:
            over = self._over_nccl if transport == "nccl" else self._over_cuda_ipc
            try:
                communicator = over(host, capabilities)
            except Unusable as error:
                reasons.append(str(error))
                continue
            if reasons and not communicator.fallback_reason:
                communicator.fallback_reason = f"GPUs do without NCCL: {reasons[0]}"
            return communicator
        if not host.fallback_reason:
            host.fallback_reason = f"{ON_HOST}: {'; '.join(dict.fromkeys(reasons))}"
        return host

    def _over_cuda_ipc(self, host: Host, capabilities: Sequence[RankCapabilities]) -> Communicator:
        if host.name != "shm":  # in which ranks meet
            raise Unusable(host.fallback_reason or "CUDA IPC takes ranks of one host")
        missing = [rank for rank, each in enumerate(capabilities) if not each.gpu]
        if self._device is None or missing:
            raise Unusable(f"rank {missing[0]} has used no GPU")
        from nbelastic.collectives.cuda_ipc.communicator import CudaIpcCommunicator, open_exchange

        try:
            exchange = open_exchange(self._device, self._rendezvous, host.allgather_bytes)
        finally:
            host.restart_count()
        return CudaIpcCommunicator(host, exchange, self._abort_signal)

    def _over_nccl(self, host: Host, capabilities: Sequence[RankCapabilities]) -> Communicator:
        reason = nccl_obstacle(capabilities)
        if reason or self._device is None or self._library is None:
            raise Unusable(reason)
        from nbelastic.collectives.nccl.communicator import NcclCommunicator
        from nbelastic.collectives.nccl.group import NcclGroup

        group = NcclGroup(self._library, self._device, self._rendezvous, self._abort_signal)
        self._form(group)
        chosen = NcclCommunicator(host, self._device, group, self._abort_signal)
        chosen.fallback_reason = host.fallback_reason
        return chosen

    def _form(self, group: NcclGroup) -> None:
        """Form NCCL's communicator with all other ranks."""
        assert self._library is not None
        offer = b""
        if self.rank == 0:
            try:
                offer = b"+" + self._library.unique_id()
            except DeviceError as error:
                offer = str(error).encode()
        offer = self._exchange("nccl", offer)[0]  # an error of rank 0 reaches all, too
        if not offer.startswith(b"+"):
            raise Unusable(f"rank 0: {offer.decode()}")
        problem = group.form(offer[1:])
        # A rank that has failed at once waits here for those that use up their limit.
        said = self._exchange("nccl-formed", problem.encode(), 2 * group.limit_s)
        if any(said):
            raise Unusable(group.give_up_with([each.decode() for each in said]))

    def _exchange(self, subject: str, value: bytes, limit_s: float | None = None) -> list[bytes]:
        client = RendezvousClient(self._rendezvous, subject)
        self._abort_signal.on_abort(lambda *_: client.abort())
        return client.exchange(value, limit_s)

    def _fall_back(self, reason: str) -> GlooCommunicator:
        """Use Gloo where memory cannot be shared, unless the job demands shared memory."""
        if self._rendezvous.backend == "shm":
            raise CollectiveError(f"backend='shm', but memory cannot be shared: {reason}")
        chosen = self._over_gloo()
        chosen.fallback_reason = reason
        return chosen

    def _over_gloo(self) -> GlooCommunicator:
        return GlooCommunicator(self._on_host, self._abort_signal).connect()

    # -- standing in for the chosen communicator -------------------------------------------------

    def close(self) -> None:
        self._abort_signal.abort("the communicator is closed")

    def _not_connected(self, *_arguments: Any, **_options: Any) -> Any:
        self._abort_signal.check()
        raise RuntimeError("connect() comes before any operation; use what it returns")

    subgroup = empty = allgather_bytes = begin_nothing = begin_barrier = _not_connected
    begin_allreduce = begin_allreduce_tree = begin_broadcast = begin_allgather = _not_connected
    begin_reduce_scatter = begin_all_to_all = begin_send = begin_receive = _not_connected
