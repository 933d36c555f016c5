"""Features that this package is built with, with Horovod's names.

Scripts use them to decide how to scale the learning rate, or whether to use several threads. They
work in any process, before ``init()`` as well.
"""

from __future__ import annotations

import collections

import torch

from nbelastic.collectives import nccl_version
from nbelastic.elastic.ranks.context import current
from nbelastic.elastic.ranks.session import Session


def mpi_threads_supported() -> bool:
    """Return False: nbelastic has no MPI, so none that allows several threads."""
    return False


def mpi_enabled() -> bool:
    """Return False: ranks are started by Dask."""
    return False


def mpi_built() -> bool:
    """Return False: operations between ranks do not use MPI."""
    return False


def gloo_enabled() -> bool:
    """Return True: operations between hosts use Gloo."""
    return True


def gloo_built() -> bool:
    """Return True: operations between hosts use Gloo."""
    return True


def nccl_built() -> int:
    """Return the version of NCCL that a job here would use, or 0 if it would use none."""
    return nccl_version()


def ddl_built() -> bool:
    """Return False: operations between ranks do not use IBM's DDL."""
    return False


def ccl_built() -> bool:
    """Return False: operations between ranks do not use Intel's oneCCL."""
    return False


def cuda_built() -> bool:
    """Return whether ranks can train on NVIDIA's GPUs with this torch."""
    return torch.version.cuda is not None


def rocm_built() -> bool:
    """Return whether ranks can train on AMD's GPUs with this torch."""
    return torch.version.hip is not None


def is_homogeneous() -> bool:
    """Return whether all hosts of the job have equally many ranks."""
    context = current()
    plan = context.plan if isinstance(context, Session) else None
    if plan is None:
        return context.local_size * context.cross_size == context.size
    counts = collections.Counter(member.slot.host for member in plan.members)
    return len(set(counts.values())) == 1
