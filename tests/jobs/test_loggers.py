"""A run of an experiment logger has each committed step once, whatever is killed."""

from __future__ import annotations

import os

import pytest

import nbelastic

STEPS = 30


def train(folder):
    import contextlib
    import os
    import signal

    import nbelastic.torch as hvd

    hvd.init()
    state = hvd.elastic.ObjectState(step=0)

    @hvd.elastic.run
    def loop(state):
        while state.step < STEPS:
            nbelastic.report(step=state.step, loss=1.0 / (1 + state.step), size=hvd.size())
            if state.step % 6 == 5 and hvd.rank() == 0:  # five times, each time whoever is first
                with contextlib.suppress(FileExistsError):
                    os.close(os.open(folder / str(state.step), os.O_CREAT | os.O_EXCL))
                    os.kill(os.getpid(), signal.SIGKILL)
            state.step += 1
            state.commit()

    loop(state)


def of_function(_):
    found = []
    return (lambda step, values: found.append(step)), lambda: found


def of_wandb(tmp_path):
    wandb = pytest.importorskip("wandb")
    run = wandb.init(project="p", mode="offline", dir=str(tmp_path), settings={"silent": True})
    found = []

    class Recorded:
        id = run.id

        def log(self, values, step):
            run.log(values, step=step)  # warns, and drops the values, if steps go back
            found.append(step)

    def steps():
        run.finish()
        assert run.summary["loss"] == 1.0 / STEPS
        return found

    return Recorded(), steps


def of_mlflow(tmp_path):
    os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
    mlflow = pytest.importorskip("mlflow")
    mlflow.set_tracking_uri((tmp_path / "mlruns").as_uri())
    run = mlflow.start_run()

    def steps():
        mlflow.end_run()
        history = mlflow.tracking.MlflowClient().get_metric_history(run.info.run_id, "loss")
        return [each.step for each in history]

    return run, steps


def of_tensorboard(tmp_path):
    pytest.importorskip("tensorboard")
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(tmp_path))

    def steps():
        writer.close()
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(str(tmp_path))
        events.Reload()
        return [each.step for each in events.Scalars("loss")]

    return writer, steps


@pytest.mark.parametrize("of", [of_function, of_wandb, of_mlflow, of_tensorboard])
def test_each_committed_step_once_through_five_kills_and_another_kernel(crew, tmp_path, of):
    target, steps = of(tmp_path)
    marks = tmp_path / "marks"
    marks.mkdir()
    job = crew.fit(train, args=(marks,), np=2, log_to=target, block=False)
    while job.status.commits < STEPS // 2:
        assert not job.wait(0.05)
    other = nbelastic.attach(job.name, cluster=crew.client)
    other.log_to(target)
    other.result(120)
    assert len(list(marks.iterdir())) == 5
    assert steps() == [*range(STEPS)]
