"""What a rank tells people of itself."""

from __future__ import annotations

import math
import queue
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import nbelastic
from nbelastic.elastic import ObjectState
from nbelastic.elastic.ranks.context import LocalContext, activate, current
from nbelastic.elastic.ranks.telemetry import BETWEEN_LOOKS_S, Telemetry, as_numbers
from nbelastic.elastic.sampler import ShardSampler
from nbelastic.errors import NotInitialized, OptionError


@pytest.fixture
def alone():
    with activate(LocalContext()):
        yield current()


def test_reports_are_numbered_from_each_commit_on():
    telemetry = Telemetry()
    for version, generation in ((-1, 1), (0, 1), (0, 1), (1, 1), (0, 2)):
        telemetry.report(version, generation, {"loss": 1.0}, None)
    rows = telemetry.take().reports
    keys = [(row.commit, row.number, row.generation) for row in rows]
    assert keys == [(0, 0, 1), (0, 1, 1), (0, 2, 1), (1, 0, 1), (0, 0, 2)]
    assert telemetry.take().reports == ()


def test_batches_since_the_last_commit_need_a_sampler():
    telemetry = Telemetry()
    telemetry.checked()
    assert telemetry.uncommitted() == (0, 0)  # nobody says what a batch is
    telemetry.nothing_to_redo()
    for _ in range(3):
        telemetry.recorded(4)
    assert telemetry.uncommitted() == (3, 12)
    telemetry.nothing_to_redo()
    telemetry.checked()
    assert telemetry.uncommitted() == (0, 0)
    telemetry.recorded(4)
    assert telemetry.uncommitted() == (1, 4)


def test_memory_is_looked_at_once_a_second_and_cuda_is_never_initialized(monkeypatch):
    looks = []
    cuda = SimpleNamespace(
        is_initialized=lambda: len(looks) > 1,
        device_count=lambda: looks.append(1) or 2,
        memory_allocated=lambda gpu: 5 * gpu,
        get_device_properties=lambda gpu: SimpleNamespace(total_memory=80 + gpu),
    )
    monkeypatch.setattr(torch, "cuda", cuda)
    telemetry = Telemetry()
    first = telemetry.take()
    assert first.resident_bytes > 1e7 and (first.gpu_bytes, first.gpu_total, looks) == (0, 0, [])
    looks += [1, 1]
    assert telemetry.take().resident_bytes == first.resident_bytes and len(looks) == 2
    monkeypatch.setattr(telemetry, "_looked", telemetry._looked - BETWEEN_LOOKS_S)
    again = telemetry.take()
    assert (again.gpu_bytes, again.gpu_total, len(looks)) == (5, 81, 3)


def test_values_may_be_numbers_and_arrays_of_one_element():
    values = as_numbers({"a": 1, "b": torch.tensor(2.0), "c": np.float32(3), "d": math.inf})
    assert values["a"] == 1.0 and values["b"] == 2.0 and values["c"] == 3.0
    assert math.isnan(values["d"])


@pytest.mark.parametrize("value", ["much", torch.ones(2), None])
def test_anything_else_is_refused_by_name(value, alone):
    with pytest.raises(TypeError, match="loss"):
        nbelastic.report(loss=value)


def test_reporting_before_init_says_so():
    with pytest.raises(NotInitialized):
        nbelastic.report(loss=1.0)


def test_steps_are_batches_where_a_sampler_records_them_else_commits(alone):
    state = ObjectState(epoch=0)
    state.commit()
    state.commit()
    assert alone.telemetry.steps == 2
    sampler = ShardSampler(range(10), shuffle=False)
    sampler.record_batch(0, 4)
    state.commit()
    sampler.record_batch(1, 4)
    sampler.record_batch(2, 4)
    state.commit()
    assert (alone.telemetry.steps, alone.telemetry.samples) == (5, 10)


def test_progress_comes_from_the_state_and_its_declared_total(alone):
    state = ObjectState(epoch=3, batch=7)
    state.set_total(epoch=10, batch=20)
    state.commit()
    taken = alone.telemetry.take()
    assert (taken.epoch, taken.batch, taken.epochs, taken.batches) == (3, 7, 10, 20)


def test_progress_of_a_loop_that_counts_steps(alone):
    state = ObjectState(step=41)
    state.set_total(step=6000)
    state.commit()
    taken = alone.telemetry.take()
    assert (taken.epoch, taken.batch, taken.epochs, taken.batches) == (0, 41, 0, 6000)
    with pytest.raises(OptionError, match="without epoch= and batch="):
        state.set_total(step=6000, epoch=3)


def test_a_rank_without_progress_reports_its_line():
    made, asked, done = queue.SimpleQueue(), threading.Event(), threading.Event()

    def stuck():
        made.put(Telemetry())
        asked.set()
        done.wait(10)

    thread = threading.Thread(target=stuck)
    thread.start()
    telemetry = made.get(timeout=10)
    asked.wait(10)
    assert telemetry.take().line is None
    line = telemetry.take().line
    assert (line.file, line.function) == (__file__, "stuck")
    telemetry.recorded(4)
    assert telemetry.take().line is None
    done.set()
    thread.join()
    telemetry.take()
    assert telemetry.take().line is None  # the thread is gone


@pytest.mark.parametrize("bad", [-1, 1.5, True, "10"])
def test_a_total_that_is_no_count_is_refused(bad, alone):
    with pytest.raises(OptionError, match="epoch"):
        ObjectState(epoch=0).set_total(epoch=bad)


def test_the_device_is_known_once_it_has_been_asked_for(alone):
    import nbelastic.torch as hvd

    assert str(hvd.device()) == alone.telemetry.device != ""


def test_a_metric_that_is_no_longer_finite_is_named_once():
    telemetry = Telemetry()
    nan = math.nan
    assert telemetry.turned({"loss": 1.0, "val": nan}) == []
    assert telemetry.turned({"loss": nan, "val": nan}) == ["loss"]
    assert telemetry.turned({"loss": nan, "val": 2.0}) == []
    assert telemetry.turned({"loss": 3.0, "val": math.inf}) == ["val"]
    assert telemetry.turned({"loss": nan, "val": nan}) == []
