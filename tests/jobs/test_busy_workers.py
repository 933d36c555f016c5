"""Other people's tasks are left alone, and a job starts without their workers."""

from __future__ import annotations

import os
import threading

from distributed import Event, get_client

from nbelastic.cluster.scheduler import job_service


def train(steps=3):
    import torch

    import nbelastic.torch as hvd

    hvd.init()
    state = hvd.elastic.ObjectState(step=0)
    sizes = []

    @hvd.elastic.run
    def loop(state):
        while state.step < steps:
            hvd.allreduce(torch.ones(1))
            sizes.append(hvd.size())
            state.step += 1
            state.commit()

    loop(state)
    return sizes


def wait_for(name):
    Event(name).wait(60)
    return os.getpid()


def pids(crew, workers):
    return crew.client.run(os.getpid, workers=workers)


def test_a_job_starts_and_ends_without_a_worker_that_is_busy_and_leaves_it_alone(crew, monkeypatch):
    monkeypatch.setattr(job_service, "CLOSE_GRACE", 1e9)  # its end waits for nothing there
    first, second = sorted(crew.workers())[:2]
    before = pids(crew, [second])
    task = crew.client.submit(wait_for, "until-the-job-is-over", workers=[second], pure=False)
    try:
        sizes = crew.fit(
            train, min_np=1, max_np=2, np=2, workers=[first, second], elastic_timeout=2
        ).results()
    finally:
        Event("until-the-job-is-over", client=crew.client).set()
    assert sizes == [[1, 1, 1]]
    assert task.result() == before[second]


def calls_fit():
    import nbelastic

    with get_client() as client:
        job = nbelastic.fit(train, cluster=client, min_np=1, max_np=4, np=4, elastic_timeout=3)
        return os.getpid(), threading.get_ident() and job.results()


def test_a_task_that_calls_fit_on_its_own_cluster_is_not_restarted(crew):
    pid, sizes = crew.client.submit(calls_fit, pure=False).result(60)
    assert pid in pids(crew, None).values()
    assert len(sizes) == 3
