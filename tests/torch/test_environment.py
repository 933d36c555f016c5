"""Horovod's environment variables: heeded where they mean something, else named once."""

import logging
import os
from types import SimpleNamespace

import pytest

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
        return optimizer._reducer._agreement.layout.manifest.bucket_bytes

    assert run_ranks(2, rank_main) == [8, 8]
