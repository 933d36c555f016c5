"""Options of a job: one table, with kinds for values from Python and on a line.

It is the source of parsers, help and tables in docs/. Defaults are in ``nbelastic.yaml``, a part of
Dask's configuration.
"""

from __future__ import annotations

import datetime
import itertools
import logging
import math
import numbers
import os
import re
import textwrap
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import dask.config
import yaml
from dask.utils import parse_timedelta

from nbelastic.collectives import BACKENDS, backend_names
from nbelastic.elastic.checkpoint.files import CheckpointSpec
from nbelastic.elastic.ranks.runtime import OWN_VARIABLES, RankSpec
from nbelastic.elastic.ranks.timeline import part_of
from nbelastic.elastic.redaction import without_secrets
from nbelastic.errors import OptionError
from nbelastic.messages import Limits, LimitsChanged, Place
from nbelastic.status import JobStatus

logger = logging.getLogger(__name__)

MOST_SHOWN = 200  # most characters of a wrong value that an error shows

MOST_SECONDS = 1e9  # what longer durations become: no clock, lock or socket can wait for ever
READ_PATIENCE = 60.0  # most seconds to wait for the next bytes of a checkpoint
PYGLOO_SILENCE = 30.0  # seconds for which pygloo may hold the interpreter of a rank that waits


# -- kinds -----------------------------------------------------------------------------------------

# Raised for a wrong value: also by Dask, for a duration without a number or with an odd unit.
WRONG = (ValueError, TypeError, LookupError, OverflowError)


@dataclass(frozen=True)
class Kind:
    """What values an option may have."""

    convert: Callable[[Any], Any]  # to what the job keeps; raises one of WRONG for a wrong one
    expects: str  # the end of "must be …"
    metavar: str = ""  # stands for the value in help; empty for a flag
    optional: bool = False  # whether None is a value, too
    from_words: Callable[[Any], Any] = lambda given: given  # gets one word, or the tuple of several
    words: int = 1  # of a line; -1 for one or more
    free_text: bool = False  # may have commas, and may be secret

    def check(self, name: str, value: Any) -> Any:
        """Return a value from Python as the job keeps it, or raise an OptionError."""
        if value is None and self.optional:
            return None
        try:
            return self.convert(value)
        except OptionError as error:  # says more than that the value is wrong
            raise OptionError(f"{name}{error}") from None
        except WRONG:
            raise OptionError(f"{name}={shown(value)}: must be {self.expects}") from None

    def read(self, words: tuple[str, ...]) -> Any:
        """Return what the words of a line mean, or raise an OptionError."""
        try:
            return self.convert(self.from_words(words[0] if self.words == 1 else words))
        except WRONG as error:
            if self.free_text:
                raise OptionError(str(error)) from None
            raise OptionError(f"{' '.join(words)!r} must be {self.expects}") from None


def shown(value: object) -> str:
    """Return a value as an error shows it."""
    text = repr(value)
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}…"


def _kind(expects: str, metavar: str = "", **more: Any) -> Callable[[Callable[[Any], Any]], Kind]:
    """Decorate the function that converts the values of a kind."""
    return lambda convert: Kind(convert, expects, metavar, **more)


def _require(holds: object) -> None:
    if not holds:
        raise ValueError


def whole(least: int | None = None, *, optional: bool = False) -> Kind:
    """Return the kind of whole numbers, from `least` on if given."""

    def convert(value: Any) -> int:
        _require(isinstance(value, numbers.Integral) and not isinstance(value, bool))
        _require(least is None or value >= least)
        return int(value)  # of Python's own type, as NumPy's cannot be sent

    bound = "" if least is None else f", at least {least}"
    return Kind(convert, f"a whole number{bound}", "N", optional, int)


def count(least: int = 1) -> Kind:
    """Return the kind of whole numbers from `least` on, or None."""
    return whole(least, optional=True)


def _as_float(value: Any) -> float:
    """Return a real number as a float; NaN for any other value."""
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    return float(value) if is_number else math.nan


@_kind("a number above 0", metavar="X", from_words=float)
def positive(value: Any) -> float:
    """Return a finite real number."""
    number = _as_float(value)
    _require(0 < number < math.inf)
    return number


@_kind(
    "a duration above 0: a number of seconds, or text such as '90 s' or '2 minutes'", metavar="TIME"
)
def duration(value: Any) -> float:
    """Return a time in seconds, as Dask takes it: ``60``, ``"2 minutes"``, a ``timedelta``."""
    is_text = isinstance(value, (str, datetime.timedelta))
    seconds = float(parse_timedelta(value, default="seconds")) if is_text else _as_float(value)
    _require(seconds > 0)
    return min(seconds, MOST_SECONDS)


@_kind(
    "(lo, hi), two durations with 0 < lo <= hi",
    metavar="LO HI",
    optional=True,
    words=2,
)
def span(value: Any) -> tuple[float, float]:
    """Return two times in seconds."""
    _require(not isinstance(value, (str, bytes)))  # two characters are no pair
    low, high = map(duration.convert, value)
    _require(low <= high)
    return low, high


def choice(*choices: str, more: Callable[[], tuple[str, ...]] = tuple) -> Kind:
    """Return the kind of an option with several choices, or with choices found by `more`."""

    def convert(value: Any) -> str:
        _require(isinstance(value, str) and value in (*choices, *more()))
        return str(value)

    return Kind(convert, f"one of {', '.join(choices)}", "NAME")


@_kind("True or False")
def flag(value: Any) -> bool:
    """Return a truth value, but of no other type."""
    _require(isinstance(value, bool))
    return bool(value)


def _several(value: Any) -> tuple[Any, ...]:
    _require(not isinstance(value, (bytes, Mapping)))
    return (value,) if isinstance(value, str) else tuple(value)


@_kind(
    "a list of addresses, names or hosts, or None for all; how many may train: np, min_np, max_np",
    metavar="A B …",
    optional=True,
    words=-1,
)
def workers_named(value: Any) -> tuple[str, ...]:
    """Return addresses, names and hosts of workers."""
    names = _several(value)
    for name in names:  # Dask numbers the workers of a LocalCluster
        _require(isinstance(name, (str, numbers.Integral)) and not isinstance(name, bool))
        _require(name != "")
    _require(names)  # a search without a result does not mean all
    return tuple(map(str, names))


@_kind("names of variables, as in ('model', 'history')", metavar="NAME …", words=-1)
def variable_names(value: Any) -> tuple[str, ...]:
    """Return names of variables of the function."""
    given = () if value is None else _several(value)
    names = tuple(each for name in given for each in str(name).split(","))
    _require(all(map(str.isidentifier, names)))
    return names


@_kind(
    "amounts above 0 by name, as in {'GPU': 1}, on a line GPU=1",
    metavar="NAME=N …",
    from_words=lambda words: {
        name: float(amount) for name, _, amount in (word.partition("=") for word in words)
    },
    words=-1,
)
def amounts(value: Any) -> dict[str, float]:
    """Return amounts of Dask's resources by name; empty for none."""
    _require(value is None or isinstance(value, Mapping))
    found = {}
    for key, amount in (value or {}).items():
        found[key] = _as_float(amount)
        if not isinstance(key, str) or not key or not 0 < found[key] < math.inf:
            raise OptionError(f"[{shown(key)}]={shown(amount)}: must be a number above 0")
    return found


def _variables_of(words: tuple[str, ...]) -> dict[str, str]:
    found = {}
    for word in words:
        key, equals, text = word.partition("=")
        if not equals and key not in os.environ:
            raise OptionError(f": {key!r} is not set here; give {key}=VALUE")
        found[key] = text if equals else os.environ[key]
    return found


@_kind(
    "a dict of text, as in {'NCCL_DEBUG': 'INFO'}",
    metavar="NAME[=VALUE] …",
    from_words=_variables_of,
    words=-1,
    free_text=True,
)
def variables(value: Any) -> dict[str, str]:
    """Return environment variables. Errors do not show their values, which may be secret."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise OptionError(f": must be {variables.expects}")
    for key, text in value.items():
        if not isinstance(key, str) or not key or "=" in key or "\0" in key:
            raise OptionError(f": {shown(key)} must be the name of a variable")
        if not isinstance(text, str) or "\0" in text:
            raise OptionError(f"[{key!r}]: must be text, not {type(text).__name__}")
        if key in OWN_VARIABLES:
            raise OptionError(f"[{key!r}]: nbelastic sets this variable itself")
    return {str(key): str(text) for key, text in value.items()}


def _path(value: Any) -> str:
    """Return an absolute path; a relative path starts at the kernel's directory."""
    _require(isinstance(value, (str, os.PathLike)) and str(value))
    path: str = os.path.abspath(os.path.expanduser(os.fspath(value)))
    return path


@_kind("a path or a URL", metavar="PLACE", optional=True)
def location(value: Any) -> str:
    """Return a path, or a URL that fsspec knows."""
    path = _path(value)
    text = str(os.fspath(value))
    if "://" not in text and "::" not in text:
        return path
    from fsspec import available_protocols  # noqa: PLC0415 - only who wants it waits for it
    from fsspec.utils import get_protocol  # noqa: PLC0415

    protocol = get_protocol(text)
    if protocol not in available_protocols():
        raise OptionError(
            f"={without_secrets(text)!r}: fsspec knows no protocol {protocol!r}; "
            "must be a path or a URL such as s3://bucket/directory"
        )
    return text


@_kind("a path in a directory that exists", metavar="FILE", optional=True)
def file(value: Any) -> str:
    """Return the path of a file that can be made."""
    path = _path(value)
    _require(os.path.isdir(os.path.dirname(path)) and not os.path.isdir(path))
    return path


# -- the table -------------------------------------------------------------------------------------

_FILE: dict[str, Any] = yaml.safe_load((Path(__file__).parents[1] / "nbelastic.yaml").read_text())
dask.config.update_defaults(_FILE)

DEFAULTS: dict[str, Any] = {
    name: value for name, value in _FILE["nbelastic"].items() if name not in ("sharing", "debug")
}
"""The default of each option, as the package has it."""

_UNSET: Any = object()


@dataclass(frozen=True)
class OptionRow:
    """An option in the table."""

    name: str  # as in Python
    kind: Kind
    group: str  # its heading in help
    example: str  # words of a magic's line
    meaning: str
    more: str  # for the docstring of ``fit`` alone

    @property
    def flag(self) -> str:
        """The option on a line of a magic or of the terminal."""
        return f"--{self.name.replace('_', '-')}"


def _option(group: str, kind: Kind, example: str, meaning: str, more: str = "") -> Any:
    shown = kind not in (location, variables)  # they may have passwords in them
    row = (kind, group, example, meaning, more)
    return field(default=_UNSET, repr=shown, metadata={"row": row})


_MANY, _WHERE, _SHARED, _WAY, _BACK, _WRONG = (
    "How many ranks",
    "Where",
    "When jobs share the cluster",
    "How tensors travel",
    "What comes back",
    "When things go wrong",
)


@dataclass(frozen=True, kw_only=True)
class Options:
    """What :func:`nbelastic.fit` takes, under the same names."""

    # fmt: off
    np: int | None = _option(_MANY, count(), "--np 4",
        "workers to wait for before anything starts; min_np and max_np default to it, so alone "
        "it fixes the number of ranks")
    min_np: int | None = _option(_MANY, count(), "--min-np 2",
        "fewest ranks that may train; below, the job waits for workers; without it, np or 1")
    max_np: int | None = _option(_MANY, count(), "--min-np 2 --max-np 8",
        "most ranks that may train; without it, np or all that the cluster offers")
    check_every: int = _option(_MANY, count(), "--max-np 8 --check-every 100",
        "commits before new ranks may join, counted from the last reset; ranks leave at any commit",
        "Larger values make resets rarer on a cluster that grows slowly. After a failure, new "
        "ranks that are ready join at once.")
    workers: tuple[str, ...] | None = _option(_WHERE, workers_named, "--workers alice bob",
        "only these workers: names, addresses or hosts, as in Client.submit")
    resources: dict[str, float] = _option(_WHERE, amounts, "--resources GPU=1 MEM=2",
        "what a worker must offer for each rank, as in Client.submit", 'Such as ``{"GPU": 1}``.')
    slots_per_host: int | None = _option(_WHERE, count(), "--slots-per-host 4",
        "most ranks on one machine")
    priority: int = _option(_SHARED, whole(), "--priority 10",
        "jobs of a higher priority get what they want first",
        "No job is taken below its ``min_np`` for that, unless it is `preemptible`.")
    weight: float = _option(_SHARED, positive, "--weight 2",
        "this job's part of what jobs of one priority share, relative to theirs")
    preemptible: bool = _option(_SHARED, flag, "--min-np 4 --preemptible",
        "a job of a higher priority may take ranks below min_np; one rank stays and keeps the "
        "state, until the job goes on by itself", "``elastic_timeout`` does not run meanwhile.")
    backend: str = _option(_WAY, choice(*BACKENDS, more=backend_names), "--np 4 --backend gloo",
        f"how tensors travel between ranks: one of {', '.join(BACKENDS)}, "
        "or what an installed package brings",
        "``shm`` is through shared memory within a host and Gloo across hosts, or not at all; "
        "``gloo`` by Gloo alone; ``auto`` the best of both that all ranks can do, and tensors of "
        "GPUs by NCCL or CUDA IPC where a trial shows that all can (experimental); ``nccl`` and "
        "``cuda_ipc`` the same with one of these; ``pygloo`` by the package of that name. "
        ":attr:`JobStatus.backend` says what it has become.")
    env: dict[str, str] = _option(_WAY, variables, "--env NCCL_DEBUG=INFO",
        "environment variables of the ranks' processes, added to those of their workers",
        'Such as ``{"NCCL_DEBUG": "INFO"}``. They are set before the function runs, and too late '
        "for what Python and torch read when they start. They travel with the job, in plain text.")
    pull: tuple[str, ...] = _option(_BACK, variable_names, "--pull model,history",
        "variables of rank 0 that come back at the end, or at a stop, into the objects of these "
        "names: models, optimizers, plain values",
        "They are of the function, from outside it, such as a model of the notebook. They take "
        "their values by ``load_state_dict`` or ``set_weights``, lists, dicts and sets in place, "
        "others by assignment. With ``block=False``, :meth:`Job.pull` does it.")
    reset_limit: int | None = _option(_WRONG, count(0), "--reset-limit 20",
        "most changes of membership, then ResetLimitExceeded")
    elastic_timeout: float = _option(_WRONG, duration, "--elastic-timeout 60",
        "how long to wait for enough workers, then NotEnoughWorkers; and for a rank to be ready")
    stall_timeout: float = _option(_WRONG, duration, "--stall-timeout 2m",
        "how long a rank may hold up others that wait for it, before they go on without it")
    heartbeat_timeout: float = _option(_WRONG, duration, "--heartbeat-timeout 30",
        "silence after which a worker counts as frozen, where no process on its host can see it")
    exit_timeout: float = _option(_WRONG, duration, "--exit-timeout 10m",
        "how long threads, exit handlers and children of a rank may run when its function has "
        "returned, then they are cut off", "The job ends after them. A warning names a cut.")
    lease: float = _option(_WRONG, duration, "--lease 24h",
        "how long the job goes on when its kernel is gone",
        ":func:`nbelastic.attach` takes it over from another one.")
    notices: str = _option(_WRONG, choice("auto", "off"), "--notices off",
        "auto: ranks leave machines that say they will go (spot machines, end of a batch job)",
        "The agent of one worker of each host asks the cloud's metadata service for a notice, and "
        "each agent knows when its SLURM or PBS job ends. Ranks leave such workers at their next "
        "commit or ``check_host_updates()``. ``off``: no agent asks.")
    checkpoint: str | None = _option(_WRONG, location, "--checkpoint s3://bucket/run",
        "where commits are also written to disk: a path that all workers see, or a URL that "
        "fsspec knows",
        "Rank 0 writes in the background. A job that loses all its ranks at once goes on from "
        "there. Before all machines with the state go, a rank writes its last commit there.")
    checkpoint_every: int = _option(_WRONG, count(), "--checkpoint ckpt --checkpoint-every 10",
        "commits between two checkpoints", "The last commit of a loop is one, too.")
    resume: bool = _option(_WRONG, flag, "--checkpoint ckpt --resume",
        "start from the newest complete checkpoint there")
    timeline: str | None = _option(_WRONG, file, "--timeline timeline.json",
        "record what ranks do, and write it to this file at the end: a path that all workers "
        "and the kernel see; https://ui.perfetto.dev opens it",
        "Chrome's trace format: operations, steps, commits and resets, with a row for each rank, "
        "each of which appends to a file next to it until then. Horovod's ``HOROVOD_TIMELINE``.")
    blacklist_cooldown: tuple[float, float] | None = _option(_WRONG, span,
        "--blacklist-cooldown 10 100",
        "a worker that failed is left out for LO, then twice that, up to HI; without it, one "
        "whose function raised what others do not raise is not used again",
        "It is known by name and host, so that a restart does not hide it.")
    # fmt: on

    def __post_init__(self) -> None:
        for row in TABLE:
            value = getattr(self, row.name)
            value = DEFAULTS[row.name] if value is _UNSET else value
            object.__setattr__(self, row.name, row.kind.check(row.name, value))
        given = [(name, getattr(self, name)) for name in ("min_np", "np", "max_np")]
        known = [(name, value) for name, value in given if value is not None]
        for (low, least), (high, most) in itertools.combinations(known, 2):
            if least > most:
                raise OptionError(f"{low}={least} is above {high}={most}")
        if self.resume and self.checkpoint is None:
            raise OptionError(
                "resume=True: needs checkpoint=, the place where the earlier job's are"
            )
        if self.backend == "pygloo" and self.heartbeat_timeout <= PYGLOO_SILENCE:
            raise OptionError(
                f"heartbeat_timeout={self.heartbeat_timeout:g}: with backend='pygloo' it must be "
                f"above {PYGLOO_SILENCE:g} s, for which a rank that waits sends no heartbeat"
            )

    @classmethod
    def given(cls, values: Mapping[str, Any]) -> Options:
        """Return options from a user's values, Dask's configuration and Horovod's variables."""
        known = {}
        for row in TABLE:
            value = values[row.name]
            if value is None:
                value = dask.config.get(f"nbelastic.{row.name}", DEFAULTS[row.name])
                if value == DEFAULTS[row.name]:
                    value = _of_horovod(row.name, value)
            known[row.name] = value
        return cls(**known)

    def rank_spec(
        self, job: str, run: str, start: int, place: Place, state_bytes: int | None
    ) -> RankSpec:
        """Return what a rank needs to know; `run` is the unique id of its job."""
        checkpoint = self.checkpoint and CheckpointSpec(
            run=run,
            url=self.checkpoint,
            every=self.checkpoint_every,
            resume=self.resume,
            patience=min(READ_PATIENCE, self.stall_timeout / 2),
        )
        return RankSpec(
            job=job,
            start=start,
            place=place,
            operation_timeout_s=self.stall_timeout * 1.5 + 30.0,
            heartbeat_timeout_s=self.heartbeat_timeout,
            exit_timeout_s=self.exit_timeout,
            backend=self.backend,
            checkpoint=checkpoint or None,
            state_bytes=state_bytes,
            max_np=self.limits().max_np,
            timeline=None if self.timeline is None else part_of(self.timeline, run, start),
            env=self.env,
            pull=self.pull,
        )

    def limits(self) -> Limits:
        """Return the limits that these options mean; one with an option's name has its value."""
        fallback = 1 if self.np is None else self.np
        least = self.min_np if self.min_np is not None else min(fallback, self.max_np or fallback)
        known = {name: getattr(self, name) for name in Limits.__struct_fields__ if name in ROWS}
        known |= {
            "np": self.np if self.np is not None else least,
            "min_np": least,
            "max_np": self.max_np if self.max_np is not None else self.np,
            "forming_timeout": max(self.heartbeat_timeout, 1.0),
            "cooldown": self.blacklist_cooldown,
            "checkpoint": self.checkpoint is not None,
        }
        return Limits(**known)


TABLE: tuple[OptionRow, ...] = tuple(
    OptionRow(each.name, *each.metadata["row"]) for each in fields(Options)
)
"""All options of a job that a line or a configuration can set."""

ROWS = {row.name: row for row in TABLE}  # the options of a job by name


def described(types: Mapping[str, Any]) -> str:
    """Return the options as a docstring has them, with the types that a signature says."""
    lines = []
    for row in TABLE:
        kind = str(types[row.name]).removesuffix(" | None").replace(" | ", " or ")
        default = DEFAULTS[row.name]
        known = "optional" if default is None else f"default {default}"
        lines.append(f"{row.name} : {kind}, {known}")
        words = f"{row.meaning[:1].upper()}{row.meaning[1:]}. {row.more}"
        lines += [f"    {line}" for line in textwrap.wrap(words, 92, break_on_hyphens=False)]
    return "\n".join(lines)


OF_SCRIPTS = tuple(row for row in TABLE if row.name != "pull")
"""Those of a script, which no notebook waits for."""

LIMITS = ("min_np", "max_np", "priority", "weight")  # options that can change while the job runs

HOROVODS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "HOROVOD_TIMELINE": ("timeline", lambda text: None if text == "DYNAMIC" else text),
    "HOROVOD_ELASTIC_TIMEOUT": ("elastic_timeout", str),
    "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS":  # 0 is Horovod's "never", which is its default
        ("stall_timeout", lambda text: None if text == "0" else text),
    "HOROVOD_STALL_CHECK_DISABLE":
        ("stall_timeout", lambda text: math.inf if text in ("1", "true") else None),
}  # fmt: skip
"""Options by Horovod's environment variables, with what makes a value of its text."""


def _of_horovod(option: str, value: Any) -> Any:
    for name, (meant, read) in HOROVODS.items():
        text = os.environ.get(name)
        given = read(text) if text and meant == option else None
        if given is not None:
            logger.info("%s=%s: %s=%r", name, text, option, given)
            value = given
    return value


def check_name(name: str | None) -> str:
    """Return a job's name: the given name, or a new name for None."""
    if name is None:
        return f"job-{uuid.uuid4().hex[:8]}"
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", name):
        raise OptionError(
            f"name={shown(name)}: must be text of at most 64 letters, digits, '_', '.' and '-', "
            "a letter or digit first"
        )
    return name


def changed_limits(present: JobStatus, **given: Any) -> LimitsChanged:
    """Return the event that changes a job's limits; None leaves a value unchanged."""
    known = {name: value for name, value in given.items() if value is not None}
    change = LimitsChanged(**{name: ROWS[name].kind.check(name, known[name]) for name in known})
    low = present.min_np if change.min_np is None else change.min_np
    high = present.max_np if change.max_np is None else change.max_np
    if high is not None and low > high:
        raise OptionError(f"min_np={low} would be above max_np={high}")
    return change
