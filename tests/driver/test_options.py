"""Bad options are refused, by name, before anything is sent."""

from __future__ import annotations

import pytest

import nbelastic
from nbelastic.driver.options import Options
from nbelastic.errors import ClusterLost, NotPicklable, OptionError


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"np": 0}, "np=0"),
        ({"np": 2.5}, r"np=2\.5"),
        ({"np": True}, "np=True"),
        ({"min_np": 3, "max_np": 2}, "min_np=3 is above max_np=2"),
        ({"np": 1, "min_np": 2}, "np=1 is below min_np=2"),
        ({"np": 5, "max_np": 4}, "np=5 is above max_np=4"),
        ({"reset_limit": -1}, "reset_limit=-1"),
        ({"elastic_timeout": 0}, "elastic_timeout=0"),
        ({"stall_timeout": float("nan")}, "stall_timeout=nan"),
        ({"heartbeat_timeout": "soon"}, "heartbeat_timeout='soon'"),
        ({"blacklist_cooldown": (20, 10)}, "blacklist_cooldown"),
        ({"blacklist_cooldown": (0, 10)}, "blacklist_cooldown"),
        ({"resources": {"GPU": 0}}, "resources"),
        ({"slots_per_host": 0}, "slots_per_host=0"),
        ({"backend": "mpi"}, "backend='mpi': must be one of auto, gloo, shm"),
        ({"backend": None}, "backend=None"),
        ({"backend": "pygloo"}, "heartbeat_timeout=10: with backend='pygloo' it must be above 30"),
        ({"name": "a job"}, "name='a job'"),
    ],
)
def test_a_wrong_option_is_named(options, message):
    with pytest.raises(OptionError, match=message):
        nbelastic.fit(print, **options)


def test_an_option_error_is_a_value_error():
    with pytest.raises(ValueError, match="np=0"):
        nbelastic.fit(print, np=0)


@pytest.mark.parametrize(
    ("options", "limits"),
    [
        ({}, (1, 1, None)),
        ({"np": 4}, (4, 4, 4)),
        ({"min_np": 2}, (2, 2, None)),
        ({"max_np": 8}, (1, 1, 8)),
        ({"min_np": 2, "max_np": 8}, (2, 2, 8)),
        ({"np": 4, "min_np": 2}, (4, 2, 4)),
        ({"np": 4, "max_np": 8}, (4, 4, 8)),
        ({"np": 4, "min_np": 2, "max_np": 8}, (4, 2, 8)),
    ],
)
def test_limits_default_as_in_horovod(options, limits):
    found = Options(**options).limits()
    assert (found.np, found.min_np, found.max_np) == limits


def test_who_takes_a_job_over_keeps_how_its_tensors_travel():
    assert Options.unpack(Options(backend="gloo").pack()).backend == "gloo"


def test_what_is_no_function_is_refused():
    with pytest.raises(OptionError, match="must be a function"):
        nbelastic.fit(42)


def test_what_is_no_cluster_is_refused():
    with pytest.raises(OptionError, match="cluster=42"):
        nbelastic.fit(print, cluster=42)


def test_a_function_that_cannot_travel_is_refused_with_the_name_of_the_culprit():
    import threading

    lock = threading.Lock()

    def train():
        return lock

    with pytest.raises(NotPicklable, match="'lock'"):
        nbelastic.fit(train)


def test_an_argument_that_cannot_travel_is_named():
    import threading

    with pytest.raises(NotPicklable, match="the argument 'guard'"):
        nbelastic.fit(print, kwargs={"guard": threading.Lock()})


def test_the_inside_of_a_captured_value_is_named():
    import threading

    config = {"rate": 0.1, "guard": threading.Lock()}

    def train():
        return config

    with pytest.raises(NotPicklable, match=r"'config'.*'guard'"):
        nbelastic.fit(train)


def test_an_address_where_nobody_listens_is_said_so():
    import dask

    with (
        dask.config.set({"distributed.comm.timeouts.connect": "200ms"}),
        pytest.raises(ClusterLost, match="no scheduler answers"),
    ):
        nbelastic.fit(print, cluster="tcp://127.0.0.1:1")
