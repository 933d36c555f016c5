"""What a rank tells people of itself."""

import gc
import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import nbelastic
import nbelastic.torch as hvd
from nbelastic.elastic import ObjectState
from nbelastic.elastic.ranks.context import Context, activate, current
from nbelastic.elastic.ranks.telemetry import ResetTimings, Telemetry, user_line
from nbelastic.elastic.sampler import ShardSampler
from nbelastic.errors import NotInitialized, OptionError


@pytest.fixture
def alone():
    with activate(Context()):
        yield current()


def test_reports_are_numbered_from_each_commit_on():
    telemetry = Telemetry()
    for version, generation in ((-1, 1), (0, 1), (1, 1), (0, 2)):
        telemetry.report(version, generation, {"loss": 1.0}, None)
    keys = [(row.commit, row.number, row.generation) for row in telemetry.take().reports]
    assert keys == [(0, 0, 1), (0, 1, 1), (1, 0, 1), (0, 0, 2)]
    assert telemetry.take().reports == ()


def test_batches_since_the_last_commit_are_checks_without_a_sampler():
    telemetry = Telemetry()
    for _ in range(2):
        telemetry.checked()
    assert telemetry.uncommitted() == (2, 0)
    telemetry.nothing_to_redo(made=True)
    telemetry.checked()  # the commit's own
    assert telemetry.uncommitted() == (0, 0)
    for _ in range(3):
        telemetry.recorded(4)
    assert telemetry.uncommitted() == (3, 12)
    telemetry.nothing_to_redo(made=True)
    telemetry.checked()
    assert telemetry.uncommitted() == (0, 0)
    telemetry.recorded(4)
    assert telemetry.uncommitted() == (1, 4)


def test_a_reset_has_the_last_moment_of_each_phase_in_order(monkeypatch):
    clock = itertools.count()
    fake = SimpleNamespace(monotonic=lambda: next(clock))
    monkeypatch.setattr("nbelastic.elastic.ranks.telemetry.time", fake)
    timings = ResetTimings()
    timings.mark("ready")
    assert not timings.in_progress
    for phase in ("ready", "planned", "ready"):
        timings.begin()  # the first one counts
        timings.mark(phase)
    phases = {"noticed": 0.0, "planned": 2000.0, "ready": 3000.0, "stepped": 4000.0}
    assert [*timings.end().items()] == [*phases.items()]
    assert not timings.in_progress


def test_memory_is_looked_at_and_cuda_is_never_initialized(monkeypatch):
    initialized = [False]
    cuda = SimpleNamespace(
        is_initialized=initialized.pop,
        device_count=lambda: 2,
        memory_allocated=lambda gpu: 5 * gpu,
        get_device_properties=lambda gpu: SimpleNamespace(total_memory=80 + gpu),
    )
    monkeypatch.setattr(torch, "cuda", cuda)
    telemetry = Telemetry()
    first = telemetry.take()
    assert first.resident_bytes > 1e7 and (first.gpu_bytes, first.gpu_total) == (0, 0)
    initialized.append(True)
    again = telemetry.take()
    assert (again.gpu_bytes, again.gpu_total) == (5, 81)


def test_values_may_be_numbers_and_arrays_of_one_element():
    telemetry = Telemetry()
    found = {"a": 1, "b": torch.tensor(2.0), "c": np.float32(3), "d": math.inf}
    telemetry.report(0, 1, found)
    values = telemetry.take().reports[0].values
    assert values["a"] == 1.0 and values["b"] == 2.0 and values["c"] == 3.0
    assert math.isnan(values["d"])


def test_anything_else_is_refused_by_name_and_a_report_before_init():
    with pytest.raises(NotInitialized):
        nbelastic.report(loss=1.0)
    for value in ("much", torch.ones(2), None):
        with pytest.raises(TypeError, match="loss"), activate(Context()):
            nbelastic.report(loss=value)


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
    assert str(hvd.device()) == alone.telemetry.device != ""


@pytest.mark.parametrize(
    ("values", "total", "progress"),
    [
        ({"epoch": 3, "batch": 7}, {"epoch": 10, "batch": 20}, (3, 7, 10, 20)),
        ({"step": 41}, {"step": 6000}, (0, 41, 0, 6000)),
    ],
)
def test_progress_comes_from_the_state_and_its_declared_total(values, total, progress, alone):
    state = ObjectState(**values)
    state.set_total(**total)
    state.commit()
    taken = alone.telemetry.take()
    assert (taken.epoch, taken.batch, taken.epochs, taken.batches) == progress


def test_a_rank_without_progress_reports_its_line():
    telemetry = Telemetry()
    assert telemetry.take().line is None
    line = telemetry.take().line
    assert (line.file, line.function) == (__file__, "test_a_rank_without_progress_reports_its_line")
    telemetry.recorded(4)
    assert telemetry.take().line is None
    telemetry.take()
    telemetry._thread = -1  # it is gone
    assert telemetry.take().line is None


@pytest.mark.parametrize("searches", [True, False])
def test_no_garbage_is_searched_for_while_frames_are_looked_up(searches, monkeypatch):
    seen = []
    frames = SimpleNamespace(_current_frames=lambda: seen.append(gc.isenabled()) or {}[1])
    monkeypatch.setattr("nbelastic.elastic.ranks.telemetry.sys", frames)
    (gc.enable if searches else gc.disable)()
    try:
        with pytest.raises(KeyError):
            user_line(1)
        assert (seen, gc.isenabled()) == ([False], searches)
    finally:
        gc.enable()


@pytest.mark.parametrize("bad", [{"epoch": -1}, {"epoch": 1.5}, {"epoch": True}, {"step": 6000}])
def test_a_total_that_is_no_count_is_refused(bad, alone):
    with pytest.raises(OptionError, match="epoch"):
        ObjectState(epoch=0).set_total(**{"epoch": 3, **bad})
