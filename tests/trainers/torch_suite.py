"""Torch's own tests of back ends, run in ranks that are there already.

``torch.testing._internal.distributed.distributed_test`` starts processes and makes a group for each
test. Here the ranks call the tests one after the other, with a new group for each. Its guards ask
for back ends by their names; it is told "gloo", which a job answers with its own group.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import traceback
import unittest

MODULE = "torch.testing._internal.distributed.distributed_test"


def prepare(directory: str, rank: int, size: int) -> type:
    """Import the suite and return its class of tests."""
    os.environ.update(
        BACKEND="gloo",
        TEMP_DIR=directory,
        WORLD_SIZE=str(size),
        INIT_METHOD="env://",
        RANK=str(rank),
    )
    import torch

    torch.manual_seed(0)  # models of the module, which ranks compare with what DDP makes of them
    from torch.testing._internal.distributed import distributed_test as suite

    class Tests(suite.TestDistBackend, suite.DistributedTest._DistTestBase):
        pass

    os.makedirs(os.path.join(directory, "barrier"), exist_ok=True)
    os.makedirs(os.path.join(directory, "test_dir"), exist_ok=True)
    return Tests


def names(tests: type) -> list[str]:
    """Return the names of all tests."""
    return sorted(unittest.TestLoader().getTestCaseNames(tests))


def run_one(tests: type, name: str, rank: int, number: int) -> str:
    """Run a test on this rank; return "ok", "skip: …" or "failed: …"."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.distributed_test import Barrier

    # Barriers are numbers in files; each test begins at one that is the same on all ranks.
    Barrier.barrier_id = 1000 * (number + 1)
    case = tests(name)
    case.rank = rank
    case.file_name = tempfile.mktemp()
    dist.init_process_group("nbelastic")
    try:
        getattr(case, name)()
        dist.barrier()
        return "ok"
    except unittest.SkipTest as skip:
        return f"skip: {skip}"
    except SystemExit as end:
        return f"skip: exit {end.code}"
    except BaseException:
        return f"failed: {traceback.format_exc()}"
    finally:
        with contextlib.suppress(Exception):
            dist.destroy_process_group()
        case.doCleanups()


def run_all(directory: str, rank: int, size: int, chosen: list[str] | None = None) -> dict:
    """Run tests on this rank and return their outcomes by name."""
    tests = prepare(directory, rank, size)
    outcomes = {}
    for number, name in enumerate(chosen or names(tests)):
        print(f"rank {rank} {name}", file=sys.stderr, flush=True)
        outcomes[name] = run_one(tests, name, rank, number)
        if outcomes[name].startswith("failed"):
            print(outcomes[name][-3000:], file=sys.stderr, flush=True)
    return outcomes
