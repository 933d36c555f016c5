"""Trainers as their documentation writes them, on real workers: kill, leave, join, error, stop."""

from __future__ import annotations

from collections import Counter

import pytest

import nbelastic
from nbelastic.errors import OptionError, RankFailed
from tests.support.clusters import sizes, until
from tests.trainers import functions

pytest.importorskip("accelerate")
pytest.importorskip("transformers")
pytest.importorskip("lightning")

TRAINERS = {
    "torch.distributed": functions.with_torch_distributed,
    "ddp": functions.with_ddp,
    "accelerate": functions.with_accelerate,
    "transformers": functions.with_transformers,
    "lightning": functions.with_lightning,
}

IN_FLIGHT = {"torch.distributed": 1, "ddp": 1, "fabric": 1}
"""Batches of a rank from one commit to the next; the others accumulate the gradients of two."""


def test_a_trainer_that_is_made_already_is_refused_with_what_to_write():
    with pytest.raises(
        OptionError, match=r"write Frame = nbelastic\.transformers\.elastic\(Frame\)"
    ):
        nbelastic.transformers.elastic(type("Frame", (), {})())


def check(outcomes, most_redone):
    """Check that each row was trained once an epoch, and that all ranks have come to the same."""
    assert [each.digest for each in outcomes] == [outcomes[0].digest] * 2
    for epoch in range(functions.EPOCHS):
        counts = Counter(
            row for number, rows in outcomes[0].seen if number == epoch for row in rows
        )
        assert set(counts) == set(range(functions.ROWS)), f"epoch {epoch}"
        assert sum(counts.values()) <= functions.ROWS + 2, f"epoch {epoch}"  # padding of shares
    assert all(each.facts == outcomes[0].facts for each in outcomes)
    assert 0 <= outcomes[0].redone <= most_redone
    assert outcomes[1].redone < 0, "it has joined later"
    outcomes[0].check()


@pytest.mark.parametrize("trainer", [*TRAINERS, "lora", "fabric"])
def test_a_kill_repeats_the_batch_in_flight_and_another_joins(crew, tmp_path, trainer):
    options = {"how": "kill", "flag": str(tmp_path / "killed"), "directory": str(tmp_path)}
    function = TRAINERS.get(trainer) or getattr(functions, f"with_{trainer}")
    job = crew.fit(function, kwargs=options, np=2, min_np=1, max_np=2)
    assert sizes(job) == [2, 1, 2]
    check(job.results(), most_redone=IN_FLIGHT.get(trainer, 2))


@pytest.mark.parametrize("trainer", TRAINERS)
def test_a_planned_leave_and_a_join_repeat_nothing(crew, tmp_path, trainer):
    options = {"how": "leave", "flag": "", "directory": str(tmp_path)}
    job = crew.fit(TRAINERS[trainer], kwargs=options, np=2, min_np=1, max_np=2, block=False)
    until(lambda: job.status.commits > 3 or job.done(), "commits")
    job.scale(max_np=1)
    until(lambda: sizes(job) == [2, 1] or job.done(), "a rank has left")
    job.scale(max_np=2)
    outcomes = job.results()
    assert sizes(job) == [2, 1, 2]
    check(outcomes, most_redone=0)


@pytest.mark.parametrize("trainer", TRAINERS)
def test_an_error_of_the_user_is_what_it_is(crew, tmp_path, trainer):
    options = {"how": "error", "flag": "", "directory": str(tmp_path)}
    with pytest.raises(RankFailed) as caught:
        crew.fit(TRAINERS[trainer], kwargs=options, np=2)
    assert isinstance(caught.value, KeyError)


@pytest.mark.parametrize("trainer", TRAINERS)
def test_a_job_that_ended_by_an_error_goes_on_from_its_checkpoint(crew, tmp_path, trainer):
    """It comes to the same as one that nothing has disturbed, to the last bit."""
    options = {"how": "", "flag": "", "directory": str(tmp_path)}
    whole = crew.fit(TRAINERS[trainer], kwargs=options, np=2).results()[0]
    place = {"np": 2, "checkpoint": str(tmp_path / "checkpoints"), "checkpoint_every": 1}
    with pytest.raises(RankFailed, match="stopped here"):
        crew.fit(TRAINERS[trainer], kwargs={**options, "how": "stop"}, **place)
    resumed = crew.fit(TRAINERS[trainer], kwargs=options, resume=True, **place).results()[0]
    assert resumed.digest == whole.digest
    assert resumed.facts == whole.facts
    assert resumed.seen == whole.seen


@pytest.mark.parametrize(
    ("first", "stop", "then"),
    [(2, 3, (1, 3)), (2, 6, (1, 3)), (2, 9, (2,)), (3, 3, (2,)), ("a rank is lost", 4, (2,))],
)
def test_a_checkpoint_of_a_trainer_goes_on_with_any_number_of_ranks(
    crew, tmp_path, first, stop, then
):
    """It stops within an epoch of six steps of two ranks, at its end, and in the next."""
    options = {"directory": str(tmp_path), "stop": stop}
    ranks = {"np": first}
    if first == "a rank is lost":
        options["flag"] = str(tmp_path / "lost")
        ranks = {"np": 2, "min_np": 1, "max_np": 2}
    before, rates = crew.fit(functions.train_and_resume, kwargs=options, **ranks).results()[0]
    assert len(before) == stop
    assert ("flag" in options) == (tmp_path / "lost").exists()
    options = {**options, "stop": 0, "resume": str(tmp_path / f"checkpoint-{stop}")}
    for size in then:
        job = crew.fit(functions.train_and_resume, kwargs=options, np=size)
        after, more = job.results()[0]
        counts = Counter(row for _, rows in [*before, *after] for row in rows)
        assert set(counts) == set(range(functions.ROWS))
        assert 2 * functions.ROWS <= sum(counts.values()) <= 2 * functions.ROWS + size
        assert min(counts.values()) == 2
        assert [*rates, *more] == sorted([*rates, *more], reverse=True)
        assert more[-1] == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("right", [False, True])
def test_a_state_of_torch_with_what_accelerate_has_prepared_is_warned_of(crew, right):
    job = crew.fit(functions.with_a_state_of_torch, args=(right,), np=2)
    found = [each for each in job.status.warnings if each.startswith("what accelerate has prep")]
    assert len(found) == (not right)
