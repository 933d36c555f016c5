"""An evaluation between two commits is done again if a rank dies in it."""

from __future__ import annotations

import nbelastic


def train(marks, kind):
    import os
    import signal

    import torch

    import nbelastic.torch as hvd

    hvd.init()
    state = getattr(hvd.elastic, kind)(step=0, evaluated=[])

    def evaluate():
        hvd.allreduce(torch.ones(1))
        if state.step == 10 and hvd.rank() == 1 and not (marks / "killed").exists():
            (marks / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        hvd.allreduce(torch.ones(1))
        state.evaluated.append(state.step)

    state.every(5, evaluate)

    @hvd.elastic.run
    def loop(state):
        while state.step < 20:
            state.step += 1
            state.commit()

    loop(state)
    return state.evaluated


def test_an_evaluation_whose_peer_dies_is_not_lost(crew, tmp_path):
    for kind in ("TorchState", "ObjectState"):
        marks = tmp_path / kind
        marks.mkdir()
        job = crew.fit(train, np=3, min_np=2, args=[marks, kind])
        assert (marks / "killed").exists()
        assert job.results() == [[5, 10, 15, 20]] * len(job.results())
        crew.wait_until_whole(4)


def test_a_script_to_which_an_evaluation_was_added_can_be_resumed(crew, tmp_path):
    def count(evaluates, steps):
        import nbelastic.torch as hvd

        hvd.init()
        state = hvd.elastic.TorchState(step=0, evaluated=[])
        if evaluates:
            state.every(2, lambda: state.evaluated.append(state.step))

        @nbelastic.elastic.run
        def loop(state):
            while state.step < steps:
                state.step += 1
                state.commit()

        loop(state)
        return state.evaluated

    runs = [(False, []), (True, [5]), (False, [5])]
    for number, (evaluates, expected) in enumerate(runs):
        job = crew.fit(
            count,
            np=1,
            args=[evaluates, 3 + 3 * number],
            checkpoint=tmp_path,
            resume=True,
        )
        assert job.result() == expected
