"""Clocks that are set back while a job runs."""

import contextlib
import time

from tests.support.clusters import a_crew, kinds, until
from tests.support.training import Workload


def set_back(seconds):
    """Have a process, in which Dask runs, see the wall clock go back once; as NTP may do it."""

    import distributed.batched
    import distributed.metrics
    import tornado.ioloop

    def earlier(*_):
        return time.time() - seconds

    distributed.batched.time = distributed.metrics.time = earlier
    tornado.ioloop.IOLoop.time = earlier


@contextlib.contextmanager
def own_clock_set_back(seconds):
    """Have this process see it: the kernel, and the scheduler with it."""
    import distributed.batched
    import distributed.metrics
    import tornado.ioloop

    kept = distributed.batched.time, distributed.metrics.time, tornado.ioloop.IOLoop.time
    set_back(seconds)
    try:
        yield
    finally:
        distributed.batched.time, distributed.metrics.time, tornado.ioloop.IOLoop.time = kept


def test_a_clock_that_is_set_back_costs_no_rank(tmp_path):
    work = Workload(tmp_path, epochs=500, seconds=0.05, until_told=True)
    with a_crew(n_workers=2) as crew:
        worker = next(iter(crew.workers()))
        job = crew.fit(work, np=2, block=False, heartbeat_timeout=2)

        def trains_on():
            seen = job.status.commits
            until(lambda: job.status.commits > seen + 60 or job.done(), "it trains on", 60)
            assert job.status.state == "running"

        until(lambda: job.status.commits or job.done(), "it trains")
        crew.client.run(set_back, 60, workers=[worker])
        trains_on()
        with own_clock_set_back(60):
            trains_on()
            (tmp_path / "enough").touch()
            assert len({result["weights"] for result in job.results(30)}) == 1
        assert "lost" not in kinds(job)
        assert job.status.resets == 0
