"""Horovod's environment variables: heeded where they mean something, else named once."""

import logging
import os
from types import SimpleNamespace

import pytest
import torch

import nbelastic.torch as hvd
from nbelastic.elastic.ranks.context import current
from nbelastic.elastic.ranks.session import Session
from nbelastic.torch import environment
from nbelastic.torch.gradients import layout
from tests.support.world import run_ranks
from tests.torch.training import distributed, loss_of


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    for name in [name for name in os.environ if name.startswith("HOROVOD_")]:
        monkeypatch.delenv(name)
    environment.heed_environment.cache_clear()
    logger = logging.getLogger("nbelastic")
    level = logger.level
    yield
    logger.setLevel(level)


def named(caplog):
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


def test_variables_without_a_meaning_here_are_named_once(monkeypatch, caplog):
    monkeypatch.setenv("HOROVOD_CYCLE_TIME", "5")
    monkeypatch.setenv("HOROVOD_AUTOTUNE", "1")
    monkeypatch.setenv("HOROVOD_STALL_CHECK_TIME_SECONDS", "30")
    monkeypatch.setenv("HOROVOD_TIMELINE", "DYNAMIC")
    monkeypatch.setenv("HOROVOD_RANK", "0")
    monkeypatch.setenv("HOROVOD_FUSION_THRESHOLD", "64MB")
    run_ranks(1, lambda context: [hvd.init(), hvd.init()])
    assert named(caplog) == [
        "these environment variables of Horovod's have no effect: HOROVOD_AUTOTUNE, "
        "HOROVOD_CYCLE_TIME (operations begin at once), HOROVOD_FUSION_THRESHOLD (must be a number "
        "of bytes), HOROVOD_STALL_CHECK_TIME_SECONDS (a rank that stalls is replaced after "
        "stall_timeout)"
    ]
    assert layout.fusion_threshold() == layout.BUCKET_BYTES


def test_what_is_heeded_is_not_named(monkeypatch, caplog):
    monkeypatch.setenv("HOROVOD_FUSION_THRESHOLD", "1048576")
    monkeypatch.setenv("HOROVOD_TIMELINE_MARK_CYCLES", "1")
    monkeypatch.setenv("HOROVOD_LOG_LEVEL", "ERROR")
    run_ranks(1, lambda context: hvd.init())
    assert named(caplog) == []
    assert logging.getLogger("nbelastic").level == logging.ERROR
    assert layout.fusion_threshold() == 1 << 20


@pytest.mark.parametrize("heeded", [(), ("HOROVOD_TIMELINE",)])
def test_a_variable_of_the_kernel_is_named_unless_the_job_has_it(monkeypatch, caplog, heeded):
    monkeypatch.setenv("HOROVOD_TIMELINE", "t.json")
    context = Session.__new__(Session)
    context.spec = SimpleNamespace(heeded=heeded)
    context.port = SimpleNamespace(report=lambda event: None)
    context.spec.start = 0
    monkeypatch.setattr(environment, "current", lambda: context)
    environment.heed_environment()
    assert len(named(caplog)) == (0 if heeded else 1)


def test_the_threshold_of_rank_0_counts(monkeypatch):
    """Where ranks have different environments, their buckets would not match."""
    monkeypatch.setattr(layout, "fusion_threshold", lambda: 8 if current().rank == 0 else 1 << 20)

    def rank_main(context):
        model, optimizer = distributed()
        loss_of(model, 0).backward()
        optimizer.step()
        return optimizer._reducer.agreement.layout.manifest.bucket_bytes

    assert run_ranks(2, rank_main) == [8, 8]


# -- buckets ---------------------------------------------------------------------------------------

MEGA = 1 << 20
ORDER = [6, 5, 4, 3, 2, 1, 0]


def tensors(*megabytes, dtype=torch.float32):
    return [torch.empty(int(size * MEGA) // dtype.itemsize, dtype=dtype) for size in megabytes]


MIXED = [*tensors(1, 1), *tensors(1, 1, dtype=torch.float64)]
LATE = [*tensors(0.1, dtype=torch.float64), *tensors(20, 20)]


@pytest.mark.parametrize(
    ("parameters", "order", "groups", "compression", "expected"),
    [
        # Of several, the first is small.
        (tensors(10, 10, 10, 10, *[0.5] * 3), ORDER, [], "none", [[6, 5], [4, 3, 2, 1], [0]]),
        # A bucket has one type on the wire.
        (MIXED, [0, 2, 1, 3], [], "fp16", [[0, 2, 1, 3]]),
        # Buckets are in the order in which they are full.
        (LATE, [0, 1, 2], [], "none", [[0], [1], [2]]),
        (tensors(0.1, 20, 20), [0, 1, 2], [[0, 2]], "none", [[1], [0, 2]]),
        # The trailer of no parameter needs one, too.
        ([], [], [], "none", [[]]),
    ],
)
def test_parameters_in_buckets(parameters, order, groups, compression, expected):
    assert (layout.FIRST_BUCKET_BYTES, layout.BUCKET_BYTES) == (MEGA, 25 * MEGA)
    manifest = layout.Manifest(order, after_backward=False)
    wire_dtype = getattr(hvd.Compression, compression).wire_dtype
    assert layout.plan_buckets(parameters, manifest, wire_dtype, groups) == expected
