"""The options of a job, in one table.

A field of :class:`Options` is all that there is of an option: its name, what it may be, and what it
means. ``fit`` has a parameter of the same name; the magics' parser and help and the tables in
``docs/`` are made from the table. Defaults are in ``nbelastic.yaml``, a part of Dask's
configuration.
"""

from __future__ import annotations

import functools
import inspect
import logging
import math
import os
import re
import types
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dask.config
import yaml

from nbelastic.collectives import BACKENDS, backend_names
from nbelastic.elastic.checkpoint.manager import CheckpointSpec
from nbelastic.elastic.ranks.runtime import RankSpec
from nbelastic.elastic.ranks.timeline import part_of
from nbelastic.errors import OptionError
from nbelastic.messages import Limits, LimitsChanged, Place

from .kinds import (
    AMOUNTS,
    DURATION,
    FILE,
    FLAG,
    LOCATION,
    NAMES,
    NUMBER,
    RANGE,
    VARIABLE_NAMES,
    VARIABLES,
    Kind,
    choice,
    count,
    shown,
    whole,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from nbelastic.driver.status import JobStatus

logger = logging.getLogger(__name__)

READ_PATIENCE = 60.0
"""Most seconds to wait for the next bytes of a checkpoint."""

PYGLOO_SILENCE = 30.0
"""Seconds for which pygloo may hold the interpreter of a rank that does nothing but wait."""

_FILE: dict[str, Any] = yaml.safe_load((Path(__file__).parents[2] / "nbelastic.yaml").read_text())
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
    meaning: str
    example: str  # words of a magic's line

    @property
    def flag(self) -> str:
        """The option on a line of a magic or of the terminal."""
        return f"--{self.name.replace('_', '-')}"


def _option(group: str, kind: Kind, example: str, meaning: str) -> Any:
    shown = kind not in (LOCATION, VARIABLES)  # they may have passwords in them
    return field(default=_UNSET, repr=shown, metadata={"row": (kind, group, meaning, example)})


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
    """What :func:`nbelastic.fit` takes, under the same names.

    Values are checked and brought into one form; what is not given has the package's default.
    """

    # fmt: off
    np: int | None = _option(_MANY, count(), "--np 4",
        "workers to wait for before anything starts; min_np and max_np default to it, so alone "
        "it fixes the number of ranks")
    min_np: int | None = _option(_MANY, count(), "--min-np 2",
        "fewest ranks that may train; below, the job waits for workers; without it, np or 1")
    max_np: int | None = _option(_MANY, count(), "--min-np 2 --max-np 8",
        "most ranks that may train; without it, np or all that the cluster offers")
    check_every: int = _option(_MANY, count(), "--max-np 8 --check-every 100",
        "commits before new ranks may join, counted from the last reset; ranks leave at any commit")
    workers: tuple[str, ...] | None = _option(_WHERE, NAMES, "--workers alice bob",
        "only these workers: names, addresses or hosts, as in Client.submit")
    resources: dict[str, float] = _option(_WHERE, AMOUNTS, "--resources GPU=1 MEM=2",
        "what a worker must offer for each rank, as in Client.submit")
    slots_per_host: int | None = _option(_WHERE, count(), "--slots-per-host 4",
        "most ranks on one machine")
    priority: int = _option(_SHARED, whole(), "--priority 10",
        "jobs of a higher priority get what they want first")
    weight: float = _option(_SHARED, NUMBER, "--weight 2",
        "this job's part of what jobs of one priority share, relative to theirs")
    preemptible: bool = _option(_SHARED, FLAG, "--min-np 4 --preemptible",
        "a job of a higher priority may take ranks below min_np; one rank stays and keeps the "
        "state, until the job goes on by itself")
    backend: str = _option(_WAY, choice(*BACKENDS, more=backend_names), "--np 4 --backend gloo",
        f"how tensors travel between ranks: one of {', '.join(BACKENDS)}, "
        "or what an installed package brings")
    env: dict[str, str] = _option(_WAY, VARIABLES, "--env NCCL_DEBUG=INFO",
        "environment variables of the ranks' processes, added to those of their workers")
    pull: tuple[str, ...] = _option(_BACK, VARIABLE_NAMES, "--pull model,history",
        "variables of rank 0 that come back at the end, or at a stop, into the objects of these "
        "names: models, optimizers, plain values")
    reset_limit: int | None = _option(_WRONG, count(0), "--reset-limit 20",
        "most changes of membership, then ResetLimitExceeded")
    elastic_timeout: float = _option(_WRONG, DURATION, "--elastic-timeout 60",
        "how long to wait for enough workers, then NotEnoughWorkers; and for a rank to be ready")
    stall_timeout: float = _option(_WRONG, DURATION, "--stall-timeout 2m",
        "how long a rank may hold up others that wait for it, before they go on without it")
    heartbeat_timeout: float = _option(_WRONG, DURATION, "--heartbeat-timeout 30",
        "silence after which a worker counts as frozen, where no process on its host can see it")
    exit_timeout: float = _option(_WRONG, DURATION, "--exit-timeout 10m",
        "how long threads, exit handlers and children of a rank may run when its function has "
        "returned, then they are cut off")
    lease: float = _option(_WRONG, DURATION, "--lease 24h",
        "how long the job goes on when its kernel is gone")
    notices: str = _option(_WRONG, choice("auto", "off"), "--notices off",
        "auto: ranks leave machines that say they will go (spot machines, end of a batch job)")
    checkpoint: str | None = _option(_WRONG, LOCATION, "--checkpoint s3://bucket/run",
        "where commits are also written to disk: a path that all workers see, or a URL that "
        "fsspec knows")
    checkpoint_every: int = _option(_WRONG, count(), "--checkpoint ckpt --checkpoint-every 10",
        "commits between two checkpoints")
    resume: bool = _option(_WRONG, FLAG, "--checkpoint ckpt --resume",
        "start from the newest complete checkpoint there")
    timeline: str | None = _option(_WRONG, FILE, "--timeline timeline.json",
        "record what ranks do, and write it to this file at the end: a path that all workers "
        "and the kernel see; https://ui.perfetto.dev opens it")
    blacklist_cooldown: tuple[float, float] | None = _option(_WRONG, RANGE,
        "--blacklist-cooldown 10 100",
        "a worker that failed is left out for LO, then twice that, up to HI; without it, one "
        "whose function raised what others do not raise is not used again")
    # fmt: on

    def __post_init__(self) -> None:
        for row in TABLE:
            value = getattr(self, row.name)
            value = DEFAULTS[row.name] if value is _UNSET else value
            object.__setattr__(self, row.name, row.kind.check(row.name, value))
        self._check_order()
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
        """Return the options given by a user, completed from Dask's configuration.

        `values` has at least all options; None is what is not given. What neither has may be an
        environment variable of Horovod's.
        """
        known = {}
        for row in TABLE:
            value = values[row.name]
            if value is None:
                value = dask.config.get(f"nbelastic.{row.name}", DEFAULTS[row.name])
                if value == DEFAULTS[row.name]:
                    value = _of_horovod(row.name, value)
            known[row.name] = value
        return cls(**known)

    def _check_order(self) -> None:
        low, start, high = self.min_np, self.np, self.max_np
        if low is not None and high is not None and low > high:
            raise OptionError(f"min_np={low} is above max_np={high}")
        if start is not None and low is not None and start < low:
            raise OptionError(f"np={start} is below min_np={low}")
        if start is not None and high is not None and start > high:
            raise OptionError(f"np={start} is above max_np={high}")

    def rank_spec(
        self, job: str, run: str, start: int, place: Place, state_bytes: int | None
    ) -> RankSpec:
        """Return what a rank needs to know of the options, and of itself.

        `run` is the job's id among jobs of its name; `place` the one foreseen for this start.
        """
        checkpoint = None
        if self.checkpoint is not None:
            checkpoint = CheckpointSpec(
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
            checkpoint=checkpoint,
            state_bytes=state_bytes,
            max_np=self.limits().max_np,
            timeline=None if self.timeline is None else part_of(self.timeline, run, start),
            heeded=tuple(name for name in HOROVODS if name in os.environ),
            env=self.env,
            pull=self.pull,
        )

    def limits(self) -> Limits:
        """Return the limits that these options mean.

        ``min_np`` and ``max_np`` default to ``np``; without ``np``, to 1 and to all that the
        cluster offers.
        """
        fallback = 1 if self.np is None else self.np
        least = self.min_np if self.min_np is not None else min(fallback, self.max_np or fallback)
        return Limits(
            np=self.np if self.np is not None else least,
            min_np=least,
            max_np=self.max_np if self.max_np is not None else self.np,
            elastic_timeout=self.elastic_timeout,
            stall_timeout=self.stall_timeout,
            exit_timeout=self.exit_timeout,
            forming_timeout=max(self.heartbeat_timeout, 1.0),
            reset_limit=self.reset_limit,
            check_every=self.check_every,
            cooldown=self.blacklist_cooldown,
            slots_per_host=self.slots_per_host,
            priority=self.priority,
            weight=self.weight,
            preemptible=self.preemptible,
            checkpoint=self.checkpoint is not None,
        )


TABLE: tuple[OptionRow, ...] = tuple(
    OptionRow(each.name, *each.metadata["row"]) for each in fields(Options)
)
"""All options of a job that a line or a configuration can set."""

ROWS = {row.name: row for row in TABLE}
"""The options of a job by name."""

OF_SCRIPTS = tuple(row for row in TABLE if row.name != "pull")
"""Those of a script, which no notebook waits for."""

LIMITS = ("min_np", "max_np", "priority", "weight")
"""Options that can change while the job runs."""

HOROVODS: Mapping[str, tuple[str, Callable[[str], Any]]] = {
    "HOROVOD_TIMELINE": ("timeline", lambda text: None if text == "DYNAMIC" else text),
    "HOROVOD_ELASTIC_TIMEOUT": ("elastic_timeout", str),
    "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": (
        "stall_timeout",
        lambda text: None if text == "0" else text,  # Horovod's "never", which is its default
    ),
    "HOROVOD_STALL_CHECK_DISABLE": (
        "stall_timeout",
        lambda text: math.inf if text in ("1", "true") else None,
    ),
}
"""Options by Horovod's environment variables, with what makes a value of its text."""


def _of_horovod(option: str, value: Any) -> Any:
    """Return the value of an option that an environment variable of Horovod's has."""
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


def changed_limits(
    present: JobStatus,
    min_np: int | None = None,
    max_np: int | None = None,
    priority: int | None = None,
    weight: float | None = None,
) -> LimitsChanged:
    """Return the event that changes a job's limits; None leaves a value unchanged."""
    given: dict[str, Any]
    given = {"min_np": min_np, "max_np": max_np, "priority": priority, "weight": weight}
    for name, value in given.items():
        given[name] = None if value is None else ROWS[name].kind.check(name, value)
    change = LimitsChanged(**given)
    low = present.min_np if change.min_np is None else change.min_np
    high = present.max_np if change.max_np is None else change.max_np
    if high is not None and low > high:
        raise OptionError(f"min_np={low} would be above max_np={high}")
    return change


def call_arguments(
    fn: Callable[..., Any], args: Any, kwargs: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a training function, if they fit its signature."""
    if not isinstance(args, (tuple, list)):  # others are one argument, or lose their values
        raise OptionError(f"args={shown(args)}: must be a tuple or list, as in args=(value,)")
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise OptionError(f"kwargs={shown(kwargs)}: must be a dict, as in kwargs={{'lr': 0.1}}")
    strange = next((key for key in kwargs or () if not isinstance(key, str)), None)
    if strange is not None:
        raise OptionError(f"kwargs: {shown(strange)} must be the name of a parameter")
    positional, named = tuple(args), dict(kwargs or {})
    _check_call(fn, positional, named)
    return positional, named


def _check_call(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse a coroutine or generator function, and a function without these parameters."""
    for asks, kind in (
        (inspect.iscoroutinefunction, "coroutine"),
        (inspect.isgeneratorfunction, "generator"),
        (inspect.isasyncgenfunction, "generator"),
    ):
        if asks(fn):
            raise OptionError(f"fn={shown(fn)}: must be a function, not a {kind} function")
    if not isinstance(fn, (types.FunctionType, types.MethodType, functools.partial)):
        return  # other callables check their own arguments
    try:
        # What a decorator passes on is not what it takes.
        inspect.signature(fn, follow_wrapped=False).bind(*args, **kwargs)
    except TypeError as error:
        name = getattr(fn, "__name__", "fn")
        raise OptionError(
            f"{name}: {error}; fit calls it with what args= and kwargs= give"
        ) from None
    except ValueError:  # a part of it is written in C
        return
