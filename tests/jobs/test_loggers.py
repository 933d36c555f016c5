"""A run of an experiment logger has each committed step once, whatever is killed."""

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


def test_each_committed_step_once_through_five_kills_and_another_kernel(crew, tmp_path):
    steps = []
    job = crew.fit(train, args=(tmp_path,), np=2, log_to=lambda s, _: steps.append(s), block=False)
    while job.status.commits < STEPS // 2:
        assert not job.wait(0.05)
    other = nbelastic.attach(job.name, cluster=crew.client)
    other.log_to(lambda step, _: steps.append(step))
    other.result(120)
    assert len(list(tmp_path.iterdir())) == 5
    assert steps == [*range(STEPS)]
