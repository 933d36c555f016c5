"""Bad options are refused, by name, before anything is sent."""

import datetime
import functools
import math
import os
import pickle
import runpy
import time
import traceback
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

import dask
import numpy
import pytest
from distributed import LocalCluster

import nbelastic
from nbelastic import messages as ev
from nbelastic.cluster.wire import pack, unpack
from nbelastic.driver import Job, ask, look
from nbelastic.driver.fit import terms_of
from nbelastic.driver.options import DEFAULTS, MOST_SECONDS, TABLE, Options
from nbelastic.driver.parser import call_arguments
from nbelastic.driver.thread import Driver
from nbelastic.errors import ClusterLost, OptionError

ROOT = Path(__file__).parents[2]
NONE_GIVEN = {row.name: None for row in TABLE}
LATER = SimpleNamespace(asynchronous=True)  # a cluster in the caller's event loop


def takes_rate(rate, *, steps=1):
    model = rate, steps
    return model


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"np": 0}, "np=0"),
        ({"np": True}, "np=True"),
        ({"workers": []}, r"workers=\[\]: must be a list .* None for all"),
        ({"kwargs": [0.1]}, r"kwargs=\[0\.1\]: must be a dict"),
        ({"min_np": 3, "max_np": 2}, "min_np=3 is above max_np=2"),
        ({"env": "NCCL_DEBUG=INFO"}, "^env: must be a dict of text, as in .*'NCCL_DEBUG': 'INFO'"),
        ({"env": {"NCCL_DEBUG": 1}}, r"env\['NCCL_DEBUG'\]: must be text, not int"),
        ({"env": {"A\0": "1"}}, "env: 'A.*' must be the name of a variable"),
        ({"env": {"RANK": "1"}}, r"env\['RANK'\]: nbelastic sets this variable itself"),
        ({"weight": 0}, "weight=0: must be a number above 0"),
        ({"pull": "not a name"}, "pull='not a name': must be names of variables"),
        ({"preemptible": 1}, "preemptible=1: must be True or False"),
        ({"backend": "mpi"}, "backend='mpi': must be one of auto, gloo, shm"),
        ({"backend": "pygloo"}, "heartbeat_timeout=10: with backend='pygloo' it must be above 30"),
        ({"np": "4"}, "np='4': must be a whole number"),
        ({"workers": 4}, "workers=4: must be a list .* how many may train: np"),
        ({"workers": ["alice", ""]}, r"workers=\['alice', ''\]: must be a list"),
        ({"block": "no"}, "block='no': must be True or False"),
        ({"name": "x" * 5000}, r"^name='x{80,300}…: must be text of at most 64"),
        ({"resources": {"GPU": True}}, r"resources\['GPU'\]=True"),
        ({"blacklist_cooldown": 10}, r"blacklist_cooldown=10: must be \(lo, hi\)"),
        ({"args": numpy.zeros(2)}, r"args=array\(.*\): must be a tuple or list"),
        ({"cluster": LocalCluster}, r"cluster=<class .*LocalCluster'>: must be a Dask Client"),
        ({"cluster": LATER}, "cluster: this cluster is asynchronous; pass a synchronous one"),
        ({"notices": numpy.array(["auto", "off"])}, "notices=array.*: must be one of auto, off"),
        ({"weight": 10**400}, "weight=1000"),
        ({"resume": True}, "needs checkpoint="),
        ({"checkpoint": "ftpx://host/place"}, "no protocol 'ftpx'"),
        ({"checkpoint": 7}, "must be a path or a URL"),
        ({"timeline": "/no/such/directory/t.json"}, "must be a path in a directory that exists"),
        # a function that cannot be called so
        ({"fn": takes_rate}, "takes_rate: missing a required argument: 'rate'; .* args= and"),
        ({"fn": takes_rate, "kwargs": {"rate": 1, "lr": 2}}, "unexpected keyword argument 'lr'"),
        ({"fn": Path.cwd().exists, "args": (1,)}, "exists: too many positional arguments"),
        ({"fn": 42}, "must be a function"),
        ({"fn": takes_rate, "args": (1,), "pull": "model"}, r"takes_rate\(\) has no variable of"),
        # an option that does not exist
        ({"elastic_timout": 4}, r"did you mean elastic_timeout or .*stall_timeout\?"),
        ({"colour": 4}, "there is no option colour; there are fn, cluster, args"),
    ],
)
def test_a_wrong_option_or_function_is_named_and_what_was_meant(options, message):
    fn, unknown = options.pop("fn", print), "option" in message
    with pytest.raises(TypeError if unknown else ValueError, match=message) as caught:
        nbelastic.fit(fn, **options)
    assert isinstance(caught.value, OptionError)
    files = [frame.filename for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert [os.path.basename(file) for file in files] == ["test_options.py", "parser.py"]


def test_arguments_that_a_decorator_adds_are_not_asked_for():
    @functools.wraps(takes_rate)
    def wrapper():
        return takes_rate(1)

    assert call_arguments(wrapper, (), None) == ((), {})
    assert call_arguments(functools.partial(takes_rate, 1), (), {"steps": 2}) == ((), {"steps": 2})
    assert call_arguments(print, (1,), None) == ((1,), {})


def test_a_hint_names_the_way_of_the_functions_own_arguments_and_help_all_options():
    with pytest.raises(OptionError, match=r"no option rate; .* go into kwargs=\{'rate': \.\.\.\}"):
        nbelastic.fit(takes_rate, rate=0.1)
    words = " ".join(nbelastic.fit.__doc__.split())
    assert all(f" {row.name} : " in words and row.more in words for row in TABLE)


@pytest.mark.parametrize("name", [5, None, "", "a b", "a\udce9", "x" * 5000, b"x"])
def test_a_name_that_no_job_has_is_refused_before_a_cluster_is_asked(name):
    asked = {"cluster": "tcp://127.0.0.1:1"}
    for call in (nbelastic.attach, look, functools.partial(ask, event=ev.StopRequested())):
        with pytest.raises(OptionError, match=r"^name=.{1,220}: must be (text|the name of a job)"):
            call(name, **asked)


def test_a_protocol_that_is_not_installed_is_no_traceback_of_dasks():
    with pytest.raises(ClusterLost, match=r"cluster='ucx://127\.0\.0\.1:1': no scheduler answers"):
        nbelastic.jobs("ucx://127.0.0.1:1")


def test_durations_without_end_are_sent_as_long_ones_and_numbers_as_plain_ones_of_64_bits():
    names = ("elastic_timeout", "stall_timeout", "heartbeat_timeout", "lease")
    options = Options(**dict.fromkeys(names, math.inf), resources={"GPU": Fraction(1, 2)})
    terms = terms_of(ev.JobPayload(b"", b"", b""), options)
    request = ev.OpenRequest("job", "uid", "client", "topic", terms)
    assert unpack(pack(request)) == request
    spec = options.rank_spec("job", "run", 1, ev.Place(0, 1, 0, 1, 0, 1), None)
    assert time.gmtime(time.time() + spec.operation_timeout_s)
    options = Options(np=numpy.int64(2), weight=numpy.float32(5))
    assert (type(options.np), type(options.weight)) == (int, float)
    no_notices = terms_of(ev.JobPayload(b"", b"", b""), Options(notices="off")).notices
    assert (terms.notices, no_notices) == (True, False)


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        (90, 90.0),
        ("90 s", 90.0),
        ("2 minutes", 120.0),
        (datetime.timedelta(minutes=1), 60.0),
        (numpy.float32(2.0), 2.0),
        (math.inf, MOST_SECONDS),
        (datetime.timedelta.max, MOST_SECONDS),
    ],
)
def test_a_duration_may_be_what_dask_takes(given, seconds):
    options = Options(stall_timeout=given, blacklist_cooldown=(1, "2 s"))
    assert options.stall_timeout == seconds
    assert options.blacklist_cooldown == (1.0, 2.0)
    assert options.limits().cooldown == (1.0, 2.0)
    for wrong in ("soon", "5 parsecs", "-1 s", True, None, [1], b"1 s"):
        with pytest.raises(OptionError, match=r"stall_timeout=.* such as '90 s'"):
            Options(stall_timeout=wrong)


def test_what_is_not_given_comes_from_dasks_configuration():
    packed = pickle.dumps(Options(stall_timeout=5, backend="gloo"))
    with dask.config.set({"nbelastic.stall_timeout": "2 minutes", "nbelastic.min-np": 3}):
        options = Options.given({**NONE_GIVEN, "lease": "5 s"})
        # Who takes a job over ignores this kernel's.
        assert pickle.loads(packed) == Options(stall_timeout=5, backend="gloo")
    assert (options.stall_timeout, options.min_np, options.lease) == (120.0, 3, 5.0)
    with (
        dask.config.set({"nbelastic.stall_timeout": "long"}),
        pytest.raises(OptionError, match="stall_timeout='long'"),
    ):
        nbelastic.fit(print)
    assert Options.given(NONE_GIVEN) == Options()
    assert set(DEFAULTS) == {row.name for row in TABLE}  # of the package's file
    assert all(dask.config.get(f"nbelastic.{name}") == each for name, each in DEFAULTS.items())


def test_the_documents_have_the_table_as_it_is():
    tables = runpy.run_path(str(ROOT / "docs" / "make_tables.py"))
    for name in ("options.md", "notebooks.md"):
        text = (ROOT / "docs" / name).read_text()
        assert tables["written"](text) == text, "run docs/make_tables.py"
    text = (ROOT / "docs" / "terminal.md").read_text()
    assert tables["terminal"](text) == text, "run docs/make_tables.py"


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        ("scale", {"max_np": "4"}, "must be a whole number"),
        ("scale", {"maxnp": 4}, r"Job.scale: .* did you mean max_np"),
        ("logs", {"rank": 7}, "rank=7: so far this job has had ranks 0 to 1"),
        ("logs", {"rank": -1}, "rank=-1"),
    ],
)
def test_a_job_names_a_wrong_scale_and_a_rank_that_never_was(method, options, message):
    driver = Driver("printed", Options(np=2), lambda: None)
    job = Job(driver)
    assert job.logs(7) == ""  # nothing has started: it may yet
    for start in range(2):
        slot = ev.Slot(f"s{start}", f"tcp://w{start}:1", f"w{start}", "h")
        place = ev.Place(start, 2, start, 2, 0, 1)
        driver.log.note_effect(ev.StartRank(start=start, slot=slot, place=place), 2, ev.Tick())
    driver.log.note_output(1, "one\n")
    assert (job.logs(0), job.logs(1)) == ("", "one\n")
    with pytest.raises(OptionError, match=message):
        getattr(job, method)(**options)


@pytest.mark.parametrize(
    ("options", "limits"),
    [
        ({}, (1, 1, None)),
        ({"np": 4}, (4, 4, 4)),
        ({"min_np": 2, "max_np": 8}, (2, 2, 8)),
        ({"np": 4, "min_np": 2, "max_np": 8}, (4, 2, 8)),
    ],
)
def test_limits_default_as_in_horovod(options, limits):
    found = Options(**options, priority=-2, weight=2, preemptible=True).limits()
    assert (found.priority, found.weight, found.preemptible) == (-2, 2.0, True)
    assert (found.np, found.min_np, found.max_np) == limits


@pytest.mark.parametrize(
    ("variable", "text", "option", "value"),
    [
        ("HOROVOD_TIMELINE", "t.json", "timeline", os.path.abspath("t.json")),
        ("HOROVOD_TIMELINE", "DYNAMIC", "timeline", None),
        ("HOROVOD_ELASTIC_TIMEOUT", "90", "elastic_timeout", 90.0),
        ("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "30", "stall_timeout", 30.0),
        ("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "0", "stall_timeout", 60.0),
        ("HOROVOD_STALL_CHECK_DISABLE", "1", "stall_timeout", MOST_SECONDS),
        ("HOROVOD_STALL_CHECK_DISABLE", "0", "stall_timeout", 60.0),
    ],
)
def test_variables_of_horovods_are_defaults(monkeypatch, variable, text, option, value):
    monkeypatch.setenv(variable, text)
    options = Options.given(NONE_GIVEN)
    assert getattr(options, option) == value
    if option != "timeline":  # what is given or configured counts more
        assert getattr(Options.given({**NONE_GIVEN, option: 5}), option) == 5
        with dask.config.set({f"nbelastic.{option}": "7 s"}):
            assert getattr(Options.given(NONE_GIVEN), option) == 7
