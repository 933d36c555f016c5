"""Values that Dask's connections cannot carry, in real jobs."""

import sys
import threading

import pytest

import nbelastic
import nbelastic.torch as hvd
from nbelastic import messages
from nbelastic.driver import driver_of
from nbelastic.elastic import ObjectState
from nbelastic.errors import RankFailed
from tests.support.clusters import kinds

ODD = "data-\udcff.csv"


def odd_everywhere():
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


def raises_a_text():
    raise FileNotFoundError(2, "no such file", ODD)


def raises_a_key():
    raise KeyError({ODD: 2**70})


def returns_a_lock():
    return threading.Lock()


def returns_much():
    assert messages.MOST_BYTES == 2**32 - 1
    messages.MOST_BYTES = 100_000
    return bytes(150_000_000)


@pytest.mark.parametrize(
    ("function", "error", "words"),
    [
        (raises_a_text, RankFailed, r"data-\\+udcff\.csv"),
        (raises_a_key, RankFailed, r"data-\\+udcff\.csv"),
        (returns_a_lock, TypeError, r"what the function returned .*cannot be sent"),
        (returns_much, ValueError, r"\(a bytes\) cannot be sent: it takes 0\.2 GB"),
    ],
)
def test_an_odd_error_or_result_arrives_as_an_error_and_costs_no_worker(
    crew, function, error, words
):
    before = set(crew.workers())
    with pytest.raises(error, match=words):
        crew.fit(function, np=1)
    assert set(crew.workers()) == before


def test_a_long_message_is_cut_in_the_history(crew):
    def fail():
        raise ValueError("x" * 3_000_000)

    job = crew.fit(fail, np=1, block=False)
    error = job.exception(30)
    assert len(error.__cause__.args[0]) == 3_000_000
    assert "(3,000,012 characters)" in str(error)
    assert max(len(event.detail) for event in job.history) < 30_000
