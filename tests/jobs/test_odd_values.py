"""Values that Dask's connections cannot carry, and messages that cannot be read: in real jobs."""

import importlib.util

import pytest

from nbelastic.driver import driver_of
from nbelastic.errors import RankFailed
from tests.support.clusters import kinds, until, workers_of

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


def test_a_source_file_and_a_checkpoint_may_have_odd_names(crew, tmp_path):
    file = tmp_path / "source-\udcff.py"
    file.write_text(
        "import nbelastic.torch as hvd\n"
        "from nbelastic.elastic import ObjectState\n\n"
        "def train():\n"
        "    hvd.init()\n"
        "    @hvd.elastic.run\n"
        "    def loop(state):\n"
        "        while state.n < 3:\n"
        "            state.n += 1\n"
        "            state.commit()\n"
        "        return state.n\n"
        "    return loop(ObjectState(n=0))\n\n"
        "def fail():\n"
        "    raise ValueError('here')\n"
    )
    spec = importlib.util.spec_from_file_location("__main__", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    place = tmp_path / "checkpoints-\udcff"
    job = crew.fit(module.train, np=1, checkpoint=place, checkpoint_every=1, name="odd-place")
    assert job.result() == 3
    assert len(list(place.iterdir())) >= 1
    with pytest.raises(ValueError, match=r"source-\\udcff\.py.*line 15"):
        crew.fit(module.fail, np=1)


def trains(there):
    import os

    import nbelastic.torch as hvd
    from nbelastic.elastic import ObjectState

    hvd.init()

    @hvd.elastic.run
    def train(state):
        while state.n < 40 or not os.path.exists(there):
            state.n += 1
            hvd.barrier()
            state.commit()
        return hvd.size()

    return train(ObjectState(n=0))


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
    job = crew.fit(trains, args=[str(there)], np=2, min_np=1, max_np=2, block=False)
    until(lambda: job.status.commits > 2 or job.done(), "it trains")
    crew.client.run(send_no_event, job.name, workers=[workers_of(job)[1]])
    until(lambda: "lost" in kinds(job) or job.done(), "the rank is lost")
    there.touch()
    assert job.result() in (1, 2)
    lost = [event for event in job.history if event.kind == "lost"]
    assert len(lost) == 1
    assert lost[0].rank == 1
    assert "its worker has sent a message that cannot be read" in lost[0].detail
    assert set(crew.workers()) == before


def test_a_result_that_is_too_large_for_a_message_is_refused(crew):
    def limit(number):
        from nbelastic.cluster.worker.rank import program

        assert program.MOST_BYTES == 2**32 - 1
        program.MOST_BYTES = number
        return bytes(150_000_000)

    before = set(crew.workers())
    with pytest.raises(ValueError, match=r"\(a bytes\) cannot be sent: it takes 0\.2 GB"):
        crew.fit(limit, args=[100_000], np=1)
    assert set(crew.workers()) == before


class HidesError(Exception):
    def __getattribute__(self, name):
        raise KeyboardInterrupt(name)


def fail(kind, value):
    import nbelastic.torch as hvd
    from nbelastic.elastic import ObjectState

    hvd.init()

    @hvd.elastic.run
    def train(state):
        raise kind(value)

    train(ObjectState(n=0))


def test_a_class_that_refuses_to_be_looked_into_costs_no_worker(crew):
    workers = crew.workers()
    with pytest.raises(RankFailed) as caught:
        crew.fit(fail, args=[HidesError, "x"], np=1)
    assert type(caught.value) is RankFailed
    assert "HidesError" in str(caught.value)
    assert "raise kind(value)" in str(caught.value)
    assert crew.workers() == workers


def test_a_long_message_is_cut_in_the_history(crew):
    job = crew.fit(fail, args=[ValueError, "x" * 3_000_000], np=1, block=False)
    error = job.exception(30)
    assert len(error.__cause__.args[0]) == 3_000_000
    assert "(3,000,012 characters)" in str(error)
    assert max(len(event.detail) for event in job.history) < 30_000
