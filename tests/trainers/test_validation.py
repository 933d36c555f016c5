"""Lightning: validations that fail, files, averages, a test as the first call, a step's file."""

from __future__ import annotations

import csv

import pytest

from nbelastic.errors import RankFailed
from tests.support.clusters import sizes
from tests.trainers import validation
from tests.trainers.validation import EPOCHS, ROWS

pytest.importorskip("lightning")


@pytest.mark.parametrize("averaging", [False, True])
def test_a_validation_that_failed_leaves_no_trace(crew, tmp_path, averaging):
    job = crew.fit(validation.train, args=(str(tmp_path), averaging), np=2, min_np=1, max_np=2)
    assert sizes(job) == [2, 1, 2, 1, 2]
    first, second = job.results()
    assert first == second
    # The ranks that are killed take the rows along that they have counted, and no other loses any.
    values = [each["value"] for each in first["found"][1:]]
    assert values == [(ROWS - 1) / 2] * (EPOCHS - 1)
    assert [each["trained"] for each in first["found"][1:]] == [16.0, 24.0, 16.0]
    assert first["epochs"] == EPOCHS
    files = sorted(each.name for each in (tmp_path / "models").iterdir())
    assert len(files) == 3
    assert "last.ckpt" in files
    import torch

    last = torch.load(tmp_path / "models" / "last.ckpt", weights_only=False)
    assert last["global_step"] == first["step"]
    with (tmp_path / "log" / "one" / "metrics.csv").open() as file:
        logged = [row["step"] for row in csv.DictReader(file) if row["value"]]
    assert len(logged) == len(set(logged)) == EPOCHS


def test_a_test_as_the_first_call_has_the_weights_of_rank_0(crew, tmp_path):
    first, second = crew.fit(validation.evaluate, args=(str(tmp_path),), np=2).results()
    assert first == second
    assert first[0] == pytest.approx(first[1])


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_file_of_a_step_goes_on_with_the_rows_that_are_left(crew, tmp_path, ranks):
    job = crew.fit(validation.train_on, args=(str(tmp_path), 3, False), np=2)
    assert not [each for each in job.status.warnings if "different" in each]
    before = [row for rows in job.results() for row in rows[:8]]
    job = crew.fit(validation.train_on, args=(str(tmp_path), 2 + 2 // ranks, True), np=ranks)
    after = [row for rows in job.results() for row in rows]
    assert sorted(before + after) == list(range(ROWS))


@pytest.mark.parametrize("saves", ["OnExceptionCheckpoint", "ModelCheckpoint"])
def test_a_file_that_is_saved_on_an_exception_does_not_hide_it(crew, tmp_path, saves):
    options = {"min_np": 2, "max_np": 2, "elastic_timeout": 20}
    with pytest.raises(RankFailed, match="ArithmeticError: the user's own"):
        crew.fit(validation.fail, args=(str(tmp_path), saves), **options)
    assert [each for each in tmp_path.iterdir() if each.suffix == ".ckpt"]
