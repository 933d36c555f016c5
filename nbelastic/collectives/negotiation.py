"""Negotiation: the ranks of a generation choose together how tensors travel.

1. Each rank sends its capabilities to the rendezvous server (:mod:`.topology`).
2. The ranks of each host form a segment (:mod:`.shm.handshake`).
3. Each rank sends the result to the server: nothing on success, else the error.

All ranks see the same capabilities and results, and draw the same conclusion: shared memory if all
are on one host, both transports if some are, else Gloo. Where something is in the way, all fall
back to Gloo, unless the job demands shared memory.

If the job asks for it, ranks of one host then open each other's memory on GPUs, over the segment,
or ranks on any hosts form a communicator of NCCL in front of the one that was chosen. On several
hosts with GPUs of which some are shared, each host opens its memory, and the ranks with one slice
negotiate what is between the hosts: NCCL, or Gloo.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from typing import TYPE_CHECKING, Any

from nbelastic.collectives.abort_signal import AbortSignal
from nbelastic.collectives.communicator import Rendezvous
from nbelastic.collectives.gloo.communicator import GlooCommunicator
from nbelastic.collectives.hierarchical import HierarchicalCommunicator
from nbelastic.collectives.operations import AsyncCommunicator, connect_part
from nbelastic.collectives.rendezvous.client import RendezvousClient
from nbelastic.collectives.shm.handshake import FORMING_LIMIT_S, SegmentError, SegmentSocket
from nbelastic.collectives.topology import (
    RankCapabilities,
    Topology,
    nccl_obstacle,
    shared_memory_obstacle,
    sharing_host,
)
from nbelastic.errors import CollectiveError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nbelastic.collectives.communicator import Communicator
    from nbelastic.collectives.gpu.communicator import Host
    from nbelastic.collectives.gpu.device import Device
    from nbelastic.collectives.nccl.group import NcclGroup
    from nbelastic.collectives.nccl.library import NcclLibrary
    from nbelastic.collectives.shm.handshake import SharedSegment

logger = logging.getLogger(__name__)

ON_HOST = "tensors of GPUs are reduced in the memory of the host"

_MOST_SAID = 1000

_logged: set[str] = set()


class NegotiatingCommunicator(AsyncCommunicator):
    """Negotiates a communicator, and stands in for the communicator until it is connected.

    Afterwards aborting, closing and querying this one does the same to the chosen one. `host` is
    the host that the rank claims to be on, if not its own. As a part of the negotiation `whole` it
    uses the device and the library of that.
    """

    name = "auto"

    def __init__(
        self,
        rendezvous: Rendezvous,
        host: str | None = None,
        whole: NegotiatingCommunicator | None = None,
    ) -> None:
        super().__init__(rendezvous, AbortSignal())
        self._host = host
        self._whole = whole
        self._begun = False
        self._chosen: Communicator | None = None
        self._device: Device | None = None
        self._library: NcclLibrary | None = None
        self._uses_gpus = rendezvous.backend in ("cuda_ipc", "nccl")
        self._on_host = rendezvous
        if rendezvous.backend == "nccl":  # subgroups of the host's communicator do without NCCL
            self._on_host = dataclasses.replace(rendezvous, backend="auto")

    def connect(self) -> Communicator:
        self._abort_signal.check()
        if self._begun:
            raise RuntimeError("connect() is called once")
        self._begun = True
        try:
            chosen = self._choose()
        except CollectiveError as error:
            self._abort_signal.abort(f"generation {self.generation} did not form: {error}")
            self._abort_signal.check()
            raise  # never: check() raises
        self._chosen = chosen
        self._abort_signal.check()  # on an abort, closing this closes the chosen one
        return chosen

    # -- choosing --------------------------------------------------------------------------------

    def _choose(self) -> Communicator:
        obstacle = shared_memory_obstacle()
        if obstacle:
            return self._negotiate(None, obstacle)
        try:
            segment_socket = SegmentSocket(self._rendezvous)
        except OSError as error:
            return self._negotiate(None, f"no socket for the other ranks of its host: {error}")
        self._abort_signal.on_abort(lambda *_: segment_socket.abort())
        with segment_socket:
            return self._negotiate(segment_socket, "")

    def _negotiate(self, segment_socket: SegmentSocket | None, obstacle: str) -> Communicator:
        name = segment_socket.name if segment_socket else ""
        own = RankCapabilities(obstacle, self._host or sharing_host(), name, *self._own_gpu())
        values = self._exchange("capabilities", own.encode())
        capabilities = [RankCapabilities.decode(value, rank) for rank, value in enumerate(values)]
        topology = Topology.of(capabilities)
        host = self._choose_host(topology, segment_socket, capabilities)
        if not self._uses_gpus:
            return host
        try:
            return self._with_devices(host, topology, capabilities)
        except BaseException:
            host.close()
            raise

    def _choose_host(
        self,
        topology: Topology,
        segment_socket: SegmentSocket | None,
        capabilities: Sequence[RankCapabilities],
    ) -> Host:
        """Return a communicator that reduces on the hosts."""
        if not topology.any_host_shared:
            return self._over_gloo()
        if topology.obstacle:
            # Known beforehand, and the same in every generation.
            return self._fall_back(topology.obstacle, logging.INFO)
        with contextlib.ExitStack() as stack:
            segment, failure = None, ""
            if segment_socket is not None:  # None: the rank is alone on its host
                try:
                    ranks = topology.local_ranks(self.rank)
                    segment = _share(segment_socket, ranks, self.rank, capabilities)
                except SegmentError as error:
                    failure = str(error)
                segment_socket.close()
            if segment is not None:
                stack.callback(segment.close)
            # Other hosts may take as long as they are allowed to.
            results = self._exchange("results", failure.encode(), 2 * FORMING_LIMIT_S)
            for rank, result in enumerate(results):
                if result:
                    stack.close()
                    return self._fall_back(f"rank {rank}: {result.decode()}", logging.WARNING)
            if segment is not None:
                segment.watch()
            stack.pop_all()
            return self._over_segments(topology, segment)

    def _over_segments(self, topology: Topology, segment: SharedSegment | None) -> Host:
        """Return the communicator for a topology; it owns the segment."""
        group = None if segment is None else segment.group
        if group is not None and len(topology.hosts) == 1:
            from nbelastic.collectives.shm.communicator import SharedMemoryCommunicator

            return SharedMemoryCommunicator(self._on_host, group, self._abort_signal)
        chosen = HierarchicalCommunicator(self._on_host, topology, group, self._abort_signal)
        try:
            return chosen.connect()
        except BaseException:
            chosen.close()
            raise

    # -- GPUs ------------------------------------------------------------------------------------

    def _own_gpu(self) -> tuple[str, str, str, str]:
        """Return the GPU's part of this rank's capabilities, if the job asks for GPUs."""
        self._device = device = self._own_device() if self._uses_gpus else None
        if device is None:
            return "", "", "", ""
        if self._rendezvous.backend != "nccl":
            return device.kind, "", "", ""
        from nbelastic.collectives.gpu.device import DeviceError
        from nbelastic.collectives.nccl.group import obstacle
        from nbelastic.collectives.nccl.library import card_of

        try:
            self._library = library = self._own_library()
        except DeviceError as error:
            return device.kind, "", str(error), ""
        version = ".".join(map(str, library.version))
        return device.kind, version, obstacle(), card_of(device, library, self.rank)

    def _own_device(self) -> Device | None:
        """Return the GPU that this rank computes on."""
        if self._whole is not None:
            return self._whole._own_device()
        from nbelastic.collectives.gpu.device import present_device

        return present_device()

    def _own_library(self) -> NcclLibrary:
        """Return the NCCL of this process."""
        if self._whole is not None:
            return self._whole._own_library()
        from nbelastic.collectives.nccl.library import present_library

        return present_library()

    def _with_devices(
        self, host: Host, topology: Topology, capabilities: Sequence[RankCapabilities]
    ) -> Communicator:
        """Return a communicator that reduces on GPUs, if all ranks can, else the host's."""
        if self._rendezvous.backend == "nccl":
            communicator, reason = self._over_nccl(host, capabilities)
        else:
            communicator, reason = self._over_cuda_ipc(host, topology, capabilities)
        if communicator is not None:
            return communicator
        if not host.fallback_reason:
            host.fallback_reason = f"{ON_HOST}: {reason}"
        return host

    def _over_cuda_ipc(
        self, host: Host, topology: Topology, capabilities: Sequence[RankCapabilities]
    ) -> tuple[Communicator | None, str]:
        """Return a communicator over CUDA IPC, or why there is none."""
        from nbelastic.collectives.shm.communicator import SharedMemoryCommunicator

        if not topology.any_host_shared:
            return None, "no two ranks share a host"
        if host.fallback_reason:  # without shared memory there are no meetings
            return None, host.fallback_reason
        missing = [rank for rank, each in enumerate(capabilities) if not each.gpu]
        if self._device is None or missing:
            return None, f"rank {missing[0]} has used no GPU"
        if not isinstance(host, SharedMemoryCommunicator):
            return self._over_hosts(host, topology, self._device)
        from nbelastic.collectives.cuda_ipc.communicator import CudaIpcCommunicator, open_exchange

        exchange, reason = open_exchange(
            host,
            self._device,
            lambda said: self._exchange("devices", said),
            topology.local_ranks(self.rank),
        )
        host.restart_count()
        if exchange is None:
            return None, reason
        return CudaIpcCommunicator(self._rendezvous, host, exchange, self._abort_signal), ""

    def _over_hosts(
        self, host: Host, topology: Topology, device: Device
    ) -> tuple[Communicator | None, str]:
        """Return a communicator over CUDA IPC inside hosts, or why there is none."""
        from nbelastic.collectives.cuda_ipc.communicator import open_exchange
        from nbelastic.collectives.cuda_ipc.hosts import CudaIpcHostsCommunicator

        ranks = topology.local_ranks(self.rank)
        peers = topology.cross_ranks(self.rank)
        with contextlib.ExitStack() as stack:
            local = self._part(host, f"host-{topology.hosts.index(ranks)}", ranks, "auto")
            stack.callback(local.close)
            exchange, reason = open_exchange(
                local, device, lambda said: _padded_exchange(host, said), ranks
            )
            host.restart_count()
            if exchange is None:
                return None, reason
            stack.callback(exchange.close)
            across = None
            if peers:
                across = self._part(host, f"slice-{ranks.index(self.rank)}", peers, "nccl")
                stack.callback(across.close)
            said = _padded_exchange(host, b"" if across is None else across.name.encode())
            between = "gloo" if b"gloo" in said else "nccl"
            chosen = CudaIpcHostsCommunicator(
                self._rendezvous,
                host,
                exchange,
                self._abort_signal,
                topology,
                local,
                across,
                between,
            )
            stack.pop_all()
            return chosen, ""

    def _part(self, host: Host, name: str, ranks: Sequence[int], backend: str) -> Communicator:
        """Return a connected communicator of some of the ranks, which ends with the host's."""
        from nbelastic.collectives.solo import SoloCommunicator

        if len(ranks) == 1:
            return SoloCommunicator(self.generation)
        its = dataclasses.replace(
            self._rendezvous,
            job=f"{self._rendezvous.job}/{name}",
            rank=ranks.index(self.rank),
            size=len(ranks),
            backend=backend,
        )
        return connect_part(host, NegotiatingCommunicator(its, self._host, self))

    def _over_nccl(
        self, host: Host, capabilities: Sequence[RankCapabilities]
    ) -> tuple[Communicator | None, str]:
        """Return a communicator over NCCL, or why there is none."""
        reason = nccl_obstacle(capabilities)
        if reason or self._device is None or self._library is None:
            return None, reason
        from nbelastic.collectives.nccl.communicator import NcclCommunicator
        from nbelastic.collectives.nccl.group import NcclGroup

        group = NcclGroup(self._library, self._device, self._rendezvous, self._abort_signal)
        reason = self._form(group)
        if reason:
            return None, reason
        chosen = NcclCommunicator(self._rendezvous, host, self._device, group, self._abort_signal)
        chosen.fallback_reason = host.fallback_reason
        return chosen, ""

    def _form(self, group: NcclGroup) -> str:
        """Form NCCL's communicator with all other ranks; return a failure of any rank."""
        from nbelastic.collectives.gpu.device import DeviceError

        assert self._library is not None
        offer = b""
        if self.rank == 0:
            try:
                offer = b"+" + self._library.unique_id()
            except DeviceError as error:
                offer = str(error).encode()
        offer = self._exchange("nccl", offer)[0]
        if not offer.startswith(b"+"):
            return f"rank 0: {offer.decode()}"
        problem = group.form(offer[1:])
        said = self._exchange("nccl-formed", problem.encode()[:1000], 2 * group.limit_s)
        if not any(said):
            return ""
        return group.give_up_with([each.decode(errors="replace") for each in said])

    def _exchange(self, subject: str, value: bytes, limit_s: float | None = None) -> list[bytes]:
        client = RendezvousClient(self._rendezvous, subject)
        self._abort_signal.on_abort(lambda *_: client.abort())
        return client.exchange(value, limit_s)

    def _fall_back(self, reason: str, level: int) -> GlooCommunicator:
        """Use Gloo where memory cannot be shared, unless the job demands shared memory."""
        if self._rendezvous.backend == "shm":
            raise CollectiveError(f"backend='shm', but memory cannot be shared: {reason}")
        if reason not in _logged:
            _logged.add(reason)
            logger.log(level, "ranks of one host use Gloo instead of shared memory: %s", reason)
        chosen = self._over_gloo()
        chosen.fallback_reason = reason
        return chosen

    def _over_gloo(self) -> GlooCommunicator:
        return GlooCommunicator(self._on_host, self._abort_signal).connect()

    # -- standing in for the chosen communicator -------------------------------------------------

    @property
    def waiting(self) -> bool:
        return self._chosen is not None and self._chosen.waiting

    @property
    def completed(self) -> int:
        return 0 if self._chosen is None else self._chosen.completed

    def cut_connections(self) -> int:
        return 0 if self._chosen is None else self._chosen.cut_connections()

    def close(self) -> None:
        if self._chosen is None:
            self._abort_signal.abort("the communicator is closed")
        else:
            self._chosen.close()

    def _not_connected(self, *_arguments: Any, **_options: Any) -> Any:
        self._abort_signal.check()
        raise RuntimeError("connect() comes before any operation; use what it returns")

    subgroup = empty = allgather_bytes = begin_nothing = begin_barrier = _not_connected
    begin_allreduce = begin_allreduce_tree = begin_broadcast = begin_allgather = _not_connected
    begin_reduce_scatter = begin_all_to_all = begin_send = begin_receive = _not_connected


def _padded_exchange(host: Host, said: bytes) -> list[bytes]:
    """Return the texts of all ranks, over connections that tell of a rank's death."""
    return [each.rstrip(b"\0") for each in host.allgather_bytes(said.ljust(_MOST_SAID, b"\0"))]


def _share(
    segment_socket: SegmentSocket,
    ranks: Sequence[int],
    rank: int,
    capabilities: Sequence[RankCapabilities],
) -> SharedSegment | None:
    """Form a segment with the other ranks of this host, if there are any."""
    local_rank, size = ranks.index(rank), len(ranks)
    if size == 1:
        return None
    if local_rank == 0:
        return segment_socket.create(size)
    return segment_socket.join(capabilities[ranks[0]].socket_name, local_rank, size)
