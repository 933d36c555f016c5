"""Values that Dask's connections cannot carry, and messages that cannot be read: in real jobs."""

import pytest

from nbelastic.driver import driver_of
from nbelastic.errors import RankFailed
from tests.support.clusters import kinds, until, workers_of
from tests.support.training import step_by_step

ODD = "data-\udcff.csv"


def odd_everywhere():
    import sys

    import nbelastic
    import nbelastic.torch as hvd
    from nbelastic.elastic import ObjectState

    hvd.init()
    print("read", ODD)
    sys.stderr.write(f"warned of {ODD}\n")
    state = ObjectState(epoch=0, batch=0)
    state.set_total(epoch=2**80, batch=2**70)

    @hvd.elastic.run
    def train(state):
        for _ in range(3):
            nbelastic.report(step=2**80, **{ODD: 1.0, "huge": 2**2000})
            state.epoch = state.batch = 2**70
            state.commit()
        return hvd.rank()

    return train(state)


def test_odd_values_cost_no_worker(crew):
    before = set(crew.workers())
    job = crew.fit(odd_everywhere, np=2)
    assert job.results() == [0, 1]
    assert set(crew.workers()) == before
    assert kinds(job).count("lost") == 0
    assert "read data-\\udcff.csv\nwarned of data-\\udcff.csv\n" in job.logs()
    assert "data-\\udcff.csv" in driver_of(job).log.metrics.curves(500)
    repr(job.status), repr(job)


def raise_odd(where):
    if where == "text":
        raise FileNotFoundError(2, "no such file", ODD)
    raise KeyError({ODD: 2**70})


@pytest.mark.parametrize("where", ["text", "key"])
def test_an_error_with_odd_text_arrives(crew, where):
    before = set(crew.workers())
    with pytest.raises(RankFailed, match=r"data-\\+udcff\.csv"):
        crew.fit(raise_odd, args=[where], np=1)
    assert set(crew.workers()) == before


def send_no_event(job, dask_worker):
    from nbelastic.cluster.wire import FROM_AGENTS, PROTOCOL
    from nbelastic.messages import encode

    body = {
        "protocol": PROTOCOL,
        "body": [encode({"job": job, "message": "RankEvent", "event": None})],
    }
    fields = {"op": FROM_AGENTS, "message": body}
    dask_worker.loop.add_callback(dask_worker.batched_stream.send, fields)


def test_a_message_that_cannot_be_read_costs_its_workers_rank(crew, tmp_path):
    before, there = set(crew.workers()), tmp_path / "lost"

    def trains():
        return step_by_step(lambda state: state.step >= 40 and there.exists()).step

    job = crew.fit(trains, np=2, min_np=1, max_np=2, block=False)
    until(lambda: job.status.commits > 2 or job.done(), "it trains")
    crew.client.run(send_no_event, job.name, workers=[workers_of(job)[1]])
    until(lambda: "lost" in kinds(job) or job.done(), "the rank is lost")
    there.touch()
    assert job.result() >= 40
    lost = [event for event in job.history if event.kind == "lost"]
    assert len(lost) == 1
    assert lost[0].rank == 1
    assert "its worker has sent a message that cannot be read" in lost[0].detail
    assert set(crew.workers()) == before


def test_a_result_that_is_too_large_for_a_message_is_refused(crew):
    def limit(number):
        from nbelastic import messages

        assert messages.MOST_BYTES == 2**32 - 1
        messages.MOST_BYTES = number
        return bytes(150_000_000)

    before = set(crew.workers())
    with pytest.raises(ValueError, match=r"\(a bytes\) cannot be sent: it takes 0\.2 GB"):
        crew.fit(limit, args=[100_000], np=1)
    assert set(crew.workers()) == before


def test_a_long_message_is_cut_in_the_history(crew):
    def fail():
        raise ValueError("x" * 3_000_000)

    job = crew.fit(fail, np=1, block=False)
    error = job.exception(30)
    assert len(error.__cause__.args[0]) == 3_000_000
    assert "(3,000,012 characters)" in str(error)
    assert max(len(event.detail) for event in job.history) < 30_000
