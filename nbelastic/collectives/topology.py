"""RankCapabilities of the ranks, and the resulting topology.

Each rank announces its capabilities. All ranks see those of all, and derive the same topology:
which ranks claim to be on one host, and whether they can share memory. That they are on one host is
proved later (:mod:`nbelastic.collectives.shm.segment`).
"""

from __future__ import annotations

import hashlib
import itertools
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from nbelastic.system import LINUX

HOST_VARIABLE = "NBELASTIC_HOST"
"""Environment variable that splits one machine into several hosts, for tests of placement."""


def host_identity() -> str:
    """Return a name that two processes have in common if they can share memory.

    That is: the same boot of the same kernel, and the same network namespace, in which one can
    reach the other's sockets. No host name enters, because containers on one machine often have
    the same one.
    """
    named = os.environ.get(HOST_VARIABLE)
    if named:
        return named
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        name = f"{boot}|{os.readlink('/proc/self/ns/net')}"
    except OSError:
        name = socket.gethostname()  # only Linux shares memory, so any name does
    return hashlib.blake2s(name.encode(), digest_size=6).hexdigest()


def sharing_host() -> str:
    """Return this rank's claimed host: only a user's processes that see each other share memory."""
    host = host_identity()
    if LINUX:
        sees = [os.readlink(f"/proc/self/ns/{name}") for name in ("pid", "user")]
        host = "/".join((host, str(os.getuid()), *sees))
    return host


class RankCapabilities(msgspec.Struct, frozen=True, array_like=True):
    """Capabilities of one rank."""

    obstacle: str  # why it cannot share memory; empty if it can
    host: str  # that it claims to be on
    segment: str = ""  # that it offers to the ranks of its host
    gpu: str = ""  # kind of the accelerator that it computes on; empty if it has used none
    nccl: str = ""  # version; empty if the job does not ask for NCCL, or the rank has none
    nccl_obstacle: str = ""  # why it cannot use NCCL; empty if it can
    card: str = ""  # its GPU, as NCCL tells GPUs apart


def nccl_obstacle(capabilities: Sequence[RankCapabilities]) -> str:
    """Return why ranks with these capabilities cannot use NCCL; empty if they can."""
    first_of: dict[str, int] = {}
    for rank, each in enumerate(capabilities):
        if not each.gpu:
            return f"rank {rank} has used no GPU"
        if each.nccl_obstacle:
            return f"rank {rank}: {each.nccl_obstacle}"
        if each.nccl != capabilities[0].nccl:
            return f"rank {rank} has NCCL {each.nccl}, rank 0 {capabilities[0].nccl}"
        if each.card in first_of:
            return f"ranks {first_of[each.card]} and {rank} share a GPU; NCCL needs one for each"
        first_of[each.card] = rank
    return ""


@dataclass(frozen=True)
class Topology:
    """The ranks of each host, by the ranks' own claims."""

    hosts: tuple[tuple[int, ...], ...]  # in order; hosts in the order of their first rank
    obstacle: str  # why ranks of one host cannot share memory; empty if all that share one can

    @classmethod
    def of(cls, capabilities: Sequence[RankCapabilities]) -> Topology:
        """Return the topology of ranks with these capabilities."""
        by_host: dict[str, list[int]] = {}
        for rank, each in enumerate(capabilities):
            by_host.setdefault(each.host, []).append(rank)
        hosts = tuple(tuple(ranks) for ranks in by_host.values())
        # A rank alone on its host shares no memory, so its obstacle does not count.
        sharing = sorted(rank for ranks in hosts if len(ranks) > 1 for rank in ranks)
        unable = [rank for rank in sharing if capabilities[rank].obstacle]
        return cls(hosts, f"rank {unable[0]}: {capabilities[unable[0]].obstacle}" if unable else "")

    @property
    def any_host_shared(self) -> bool:
        """Whether any host has more than one rank."""
        return any(len(ranks) > 1 for ranks in self.hosts)

    @property
    def in_order(self) -> bool:
        """Whether the ranks of each host, and the hosts, follow each other."""
        return [*itertools.chain(*self.hosts)] == [*range(sum(map(len, self.hosts)))]

    def local_ranks(self, rank: int) -> tuple[int, ...]:
        """Return the ranks on the host of `rank`, itself included."""
        return next(ranks for ranks in self.hosts if rank in ranks)

    def cross_ranks(self, rank: int) -> tuple[int, ...]:
        """Return the ranks with the local rank of `rank` on all hosts; none if a host has none."""
        position = self.local_ranks(rank).index(rank)
        return tuple(ranks[position] for ranks in self.hosts) if position < self.slices else ()

    @property
    def slices(self) -> int:
        """Number of ranks on the smallest host."""
        return min(len(ranks) for ranks in self.hosts)
