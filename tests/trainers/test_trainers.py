"""Trainers as their documentation writes them, on real workers: a kill and a join in each."""

from __future__ import annotations

from collections import Counter

import pytest

from nbelastic.errors import RankFailed
from tests.support.clusters import sizes
from tests.trainers import functions

pytest.importorskip("accelerate")
pytest.importorskip("transformers")
pytest.importorskip("lightning")

TRAINERS = {
    "accelerate": functions.with_accelerate,
    "transformers": functions.with_transformers,
    "lora": functions.with_lora,
    "lightning": functions.with_lightning,
}


@pytest.mark.parametrize("trainer", TRAINERS)
def test_a_kill_and_a_join(crew, tmp_path, trainer):
    options = {"flag": str(tmp_path / "killed"), "directory": str(tmp_path)}
    job = crew.fit(TRAINERS[trainer], kwargs=options, np=2, min_np=1, max_np=2)
    outcomes = job.results()
    assert [each.digest for each in outcomes] == [outcomes[0].digest] * len(outcomes)
    assert sizes(job)[:2] == [2, 1]
    for epoch in range(functions.EPOCHS):
        counts = Counter(
            row for number, rows in outcomes[0].seen if number == epoch for row in rows
        )
        assert set(counts) == set(range(functions.ROWS)), f"epoch {epoch}"
        assert sum(counts.values()) <= functions.ROWS + 2, f"epoch {epoch}"
    assert all(each.facts == outcomes[0].facts for each in outcomes)
    outcomes[0].check()


@pytest.mark.parametrize("trainer", ["accelerate", "transformers", "lightning"])
def test_an_error_of_the_user_is_what_it_is(crew, tmp_path, trainer):
    options = {"flag": "", "directory": str(tmp_path)}
    with pytest.raises(RankFailed) as caught:
        crew.fit(TRAINERS[trainer], kwargs=options, np=2)
    assert isinstance(caught.value, KeyError)


@pytest.mark.parametrize("trainer", ["accelerate", "transformers", "lightning"])
def test_a_job_that_ended_by_an_error_goes_on_from_its_checkpoint(crew, tmp_path, trainer):
    """It comes to the same as one that nothing has disturbed, to the last bit."""
    options = {"flag": "none", "directory": str(tmp_path), "kills": False}
    whole = crew.fit(TRAINERS[trainer], kwargs=options, np=2).results()[0]
    place = {"np": 2, "checkpoint": str(tmp_path / "checkpoints"), "checkpoint_every": 1}
    with pytest.raises(RankFailed, match="stopped here"):
        crew.fit(TRAINERS[trainer], kwargs={**options, "stop": True}, **place)
    resumed = crew.fit(TRAINERS[trainer], kwargs=options, resume=True, **place).results()[0]
    assert resumed.digest == whole.digest
    assert resumed.facts == whole.facts
    assert resumed.seen == whole.seen
