"""Trainers as their documentation writes them, on real workers: kill, leave, join, error, stop."""

import csv
import os
import runpy
from collections import Counter
from pathlib import Path

import cloudpickle
import pytest
import torch

import nbelastic
from nbelastic.errors import OptionError, RankFailed
from tests.support.clusters import sizes, until
from tests.trainers import functions, validation
from tests.trainers.validation import EPOCHS, ROWS

accelerate = pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")
pytest.importorskip("lightning")

EXAMPLES = Path(__file__).parents[2] / "examples" / "trainers"

TRAINERS = ["ddp", "accelerate", "transformers", "lightning"]

IN_FLIGHT = {"ddp": 1}
"""Batches of a rank from one commit to the next; the others accumulate the gradients of two."""


def test_a_trainer_that_is_made_already_is_refused_with_what_to_write():
    with pytest.raises(
        OptionError, match=r"write Frame = nbelastic\.transformers\.elastic\(Frame\)"
    ):
        nbelastic.transformers.elastic(type("Frame", (), {})())


def train(crew, trainer, directory, how="", **options):
    given = {"how": how, "flag": str(directory / "killed"), "directory": str(directory)}
    return crew.fit(getattr(functions, f"with_{trainer}"), kwargs=given, **options)


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


def check_logs(directory, last):
    """Check that each main rank has logged, and no other, and all of them each step."""
    written = [each.read_text().split() for each in directory.glob("run.*")]
    assert len(written) == 2
    assert {int(step) for each in written for step in each} >= {*range(1, last + 1)}


@pytest.mark.parametrize("trainer", [*TRAINERS, "lora"])
def test_a_kill_repeats_the_batch_in_flight_and_another_joins(crew, tmp_path, trainer):
    """The main rank is killed; callbacks begin on the next."""
    job = train(crew, trainer, tmp_path, "kill", np=2, min_np=1, max_np=2)
    assert sizes(job) == [2, 1, 2]
    outcomes = job.results()
    check(outcomes, most_redone=IN_FLIGHT.get(trainer, 2))
    if trainer not in IN_FLIGHT:
        check_logs(tmp_path, outcomes[0].callback[3])


@pytest.mark.parametrize("trainer", TRAINERS)
def test_a_planned_leave_and_a_join_repeat_nothing(crew, tmp_path, trainer):
    job = train(crew, trainer, tmp_path, "leave", np=2, min_np=1, max_np=2, block=False)
    until(lambda: job.status.commits > 3 or job.done(), "commits")
    job.scale(max_np=1)
    until(lambda: sizes(job) == [2, 1] or job.done(), "a rank has left")
    job.scale(max_np=2)
    outcomes = job.results()
    assert sizes(job) == [2, 1, 2]
    check(outcomes, most_redone=0)


def test_the_loops_of_lightning_check_profile_and_draw_as_by_themselves(crew):
    plain, checked = (
        crew.fit(functions.with_combined_loaders, args=(checks,), np=1).results()[0]
        for checks in (0, 1)
    )
    assert plain == checked
    assert len(plain[0]) == 1 and plain[1]


@pytest.mark.parametrize("trainer", TRAINERS)
def test_a_job_that_ended_by_an_error_goes_on_from_its_checkpoint(crew, tmp_path, trainer):
    """It comes to the same as one that nothing has disturbed, to the last bit."""
    whole = train(crew, trainer, tmp_path, np=2).results()[0]
    place = {"np": 2, "checkpoint": str(tmp_path / "checkpoints"), "checkpoint_every": 1}
    with pytest.raises(RankFailed, match="stopped here"):
        train(crew, trainer, tmp_path, "stop", **place)
    resumed = train(crew, trainer, tmp_path, resume=True, **place).results()[0]
    assert resumed.digest == whole.digest
    assert resumed.facts == whole.facts
    assert resumed.seen == whole.seen


@pytest.mark.parametrize(
    ("first", "stop", "then"),
    [(2, 3, (1, 3)), (2, 6, (3,)), (2, 9, (2,)), ("a rank is lost", 4, (2,))],
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


def test_a_state_of_torch_with_what_accelerate_has_prepared_is_warned_of(crew):
    job = crew.fit(functions.with_a_state_of_torch, np=2)
    assert [each[:28] for each in job.status.warnings].count("what accelerate has prepared") == 1


@pytest.mark.parametrize("name", sorted(path.name for path in EXAMPLES.glob("*.py")))
def test_an_example_trains(crew, tmp_path, name):
    def run(path, directory):
        os.chdir(directory)
        runpy.run_path(path, run_name="__main__")

    job = crew.fit(run, args=(str(EXAMPLES / name), str(tmp_path)), np=2)
    assert job.status.commits > 4
    assert job.status.warnings == ()


# -- objects of an earlier cell: made in the kernel, and pickled to the ranks ----------------------


def pickled(value):
    return cloudpickle.loads(cloudpickle.dumps(value))


def arguments():
    return transformers.TrainingArguments(output_dir="unused", use_cpu=True, report_to=[])


def test_training_arguments_have_the_ranks_of_this_process():
    from nbelastic.transformers.trainer import renew

    made = arguments()
    made.distributed_state.num_processes = 7  # as if the kernel were one of seven
    sent = pickled(made)
    made.distributed_state.num_processes = 1
    assert sent.world_size == 7
    renew(sent)
    assert sent.world_size == 1
    assert vars(sent.distributed_state) is accelerate.PartialState._shared_state
    state = sent.distributed_state
    renew(sent)
    assert sent.distributed_state is state


def test_an_accelerator_and_a_trainer_of_another_process_are_refused():
    from nbelastic.accelerate import AccelerateState
    from nbelastic.transformers import elastic

    accelerator = accelerate.Accelerator(cpu=True)
    accelerator.prepare(torch.nn.Linear(1, 1))
    with pytest.raises(OptionError, match="Accelerator of this AccelerateState was made in anoth"):
        AccelerateState(pickled(accelerator))
    kind = elastic(transformers.Trainer)
    trainer = kind(model=torch.nn.Linear(1, 1), args=arguments(), train_dataset=[{"x": 1}])
    trainer.accelerator = pickled(trainer.accelerator)
    with pytest.raises(OptionError, match="this Trainer was made in another process"):
        trainer._train_elastically()


# -- Lightning: validations that fail, files, averages, a test as the first call, a step's file ----


@pytest.mark.parametrize("averaging", [False, True])
def test_a_validation_that_failed_leaves_no_trace(crew, tmp_path, averaging):
    job = crew.fit(validation.train, args=(str(tmp_path), averaging), np=2, min_np=1, max_np=2)
    assert sizes(job) == [2, 1, 2, 1, 2]
    first, second = job.results()
    assert first == second
    # The ranks that are killed take the rows along that they have counted, and no other loses any.
    values = [each["value"] for each in first["found"][1:]]
    assert values == [(ROWS - 1) / 2] * (EPOCHS - 1)
    for name in ("trained", "counted"):
        assert [each[name] for each in first["found"][1:]] == [16.0, 24.0, 16.0]
    assert first["epochs"] == EPOCHS
    assert {Path(each).name for each in first["best"]} <= {*os.listdir(tmp_path / "models")}
    last = torch.load(tmp_path / "models" / "last.ckpt", weights_only=False)
    assert last["global_step"] == first["step"]
    with (tmp_path / "log" / "one" / "metrics.csv").open() as file:
        logged = {row["epoch"] for row in csv.DictReader(file) if row["value"]}
    assert len(logged) == EPOCHS


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


def test_a_file_that_is_saved_on_an_exception_does_not_hide_it(crew, tmp_path):
    with pytest.raises(RankFailed, match="ArithmeticError: the user's own"):
        crew.fit(validation.fail, args=(str(tmp_path),), np=2, elastic_timeout=20)
    assert [each for each in tmp_path.iterdir() if each.suffix == ".ckpt"]
