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


def _option(kind: Kind, group: str, meaning: str, example: str) -> Any:
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

    np: int | None = _option(
        count(),
        _MANY,
        "workers to wait for before anything starts; min_np and max_np default to it, so alone it "
        "fixes the number of ranks",
        "--np 4",
    )
    min_np: int | None = _option(
        count(),
        _MANY,
        "fewest ranks that may train; below, the job waits for workers; without it, np or 1",
        "--min-np 2",
    )
    max_np: int | None = _option(
        count(),
        _MANY,
        "most ranks that may train; without it, np or all that the cluster offers",
        "--min-np 2 --max-np 8",
    )
    check_every: int = _option(
        count(),
        _MANY,
        "commits before new ranks may join, counted from the last reset; ranks leave at any commit",
        "--max-np 8 --check-every 100",
    )
    workers: tuple[str, ...] | None = _option(
        NAMES,
        _WHERE,
        "only these workers: names, addresses or hosts, as in Client.submit",
        "--workers alice bob",
    )
    resources: dict[str, float] = _option(
        AMOUNTS,
        _WHERE,
        "what a worker must offer for each rank, as in Client.submit",
        "--resources GPU=1 MEM=2",
    )
    slots_per_host: int | None = _option(
        count(),
        _WHERE,
        "most ranks on one machine",
        "--slots-per-host 4",
    )
    priority: int = _option(
        whole(),
        _SHARED,
        "jobs of a higher priority get what they want first",
        "--priority 10",
    )
    weight: float = _option(
        NUMBER,
        _SHARED,
        "this job's part of what jobs of one priority share, relative to theirs",
        "--weight 2",
    )
    preemptible: bool = _option(
        FLAG,
        _SHARED,
        "a job of a higher priority may take ranks below min_np; one rank stays and keeps the "
        "state, until the job goes on by itself",
        "--min-np 4 --preemptible",
    )
    backend: str = _option(
        choice(*BACKENDS, more=backend_names),
        _WAY,
        f"how tensors travel between ranks: one of {', '.join(BACKENDS)}, "
        "or what an installed package brings",
        "--np 4 --backend gloo",
    )
    env: dict[str, str] = _option(
        VARIABLES,
        _WAY,
        "environment variables of the ranks' processes, added to those of their workers",
        "--env NCCL_DEBUG=INFO",
    )
    pull: tuple[str, ...] = _option(
        VARIABLE_NAMES,
        _BACK,
        "variables of rank 0 that come back at the end, or at a stop, into the objects of these "
        "names: models, optimizers, plain values",
        "--pull model history",
    )
    reset_limit: int | None = _option(
        count(0),
        _WRONG,
        "most changes of membership, then ResetLimitExceeded",
        "--reset-limit 20",
    )
    elastic_timeout: float = _option(
        DURATION,
        _WRONG,
        "how long to wait for enough workers, then NotEnoughWorkers; and for a rank to be ready",
        "--elastic-timeout 60",
    )
    stall_timeout: float = _option(
        DURATION,
        _WRONG,
        "how long a rank may hold up others that wait for it, before they go on without it",
        "--stall-timeout 2m",
    )
    heartbeat_timeout: float = _option(
        DURATION,
        _WRONG,
        "silence after which a worker counts as frozen, where no process on its host can see it",
        "--heartbeat-timeout 30",
    )
    exit_timeout: float = _option(
        DURATION,
        _WRONG,
        "how long threads, exit handlers and children of a rank may run when its function has "
        "returned, then they are cut off",
        "--exit-timeout 10m",
    )
    lease: float = _option(
        DURATION,
        _WRONG,
        "how long the job goes on when its kernel is gone",
        "--lease 24h",
    )
    notices: str = _option(
        choice("auto", "off"),
        _WRONG,
        "auto: ranks leave machines that say they will go (spot machines, end of a batch job)",
        "--notices off",
    )
    checkpoint: str | None = _option(
        LOCATION,
        _WRONG,
        "where commits are also written to disk: a path that all workers see, or a URL "
        "that fsspec knows",
        "--checkpoint s3://bucket/run",
    )
    checkpoint_every: int = _option(
        count(),
        _WRONG,
        "commits between two checkpoints",
        "--checkpoint ckpt --checkpoint-every 10",
    )
    resume: bool = _option(
        FLAG,
        _WRONG,
        "start from the newest complete checkpoint there",
        "--checkpoint ckpt --resume",
    )
    timeline: str | None = _option(
        FILE,
        _WRONG,
        "record what ranks do, and write it to this file at the end: a path that all workers and "
        "the kernel see; https://ui.perfetto.dev opens it",
        "--timeline timeline.json",
    )
    blacklist_cooldown: tuple[float, float] | None = _option(
        RANGE,
        _WRONG,
        "a worker that failed is left out for LO, then twice that, up to HI; without it, "
        "one whose function raised what others do not raise is not used again",
        "--blacklist-cooldown 10 100",
    )

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
        """Return the options that a user has given; the others are those of Dask's configuration.

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

    def checkpoints(self) -> dict[str, Any] | None:
        """Return the settings of checkpoints for ranks; None without checkpoints."""
        if self.checkpoint is None:
            return None
        return {
            "url": self.checkpoint,
            "every": self.checkpoint_every,
            "resume": self.resume,
            "patience": min(READ_PATIENCE, self.stall_timeout / 2),
        }

    def rank_spec(
        self, job: str, run: str, start: int, place: Place, state_bytes: int | None
    ) -> RankSpec:
        """Return what a rank needs to know of the options, and of itself.

        `run` is the job's id among jobs of its name; `place` the one foreseen for this start.
        """
        checkpoint = self.checkpoints()
        return RankSpec(
            job=job,
            start=start,
            place=place,
            operation_timeout_s=self.stall_timeout * 1.5 + 30.0,
            heartbeat_timeout_s=self.heartbeat_timeout,
            exit_timeout_s=self.exit_timeout,
            backend=self.backend,
            checkpoint=None if checkpoint is None else CheckpointSpec(run=run, **checkpoint),
            state_bytes=state_bytes,
            max_np=self.limits().max_np,
            timeline=None if self.timeline is None else part_of(self.timeline, run, start),
            heeded=tuple(name for name in HOROVODS if name in os.environ),
            env=self.env,
            pull=self.pull,
        )

    def pack(self) -> dict[str, Any]:
        """Return the options as plain values."""
        return {each.name: getattr(self, each.name) for each in fields(self)}

    @classmethod
    def unpack(cls, packed: Mapping[str, Any]) -> Options:
        """Read what :meth:`pack` has written, with lists in the place of tuples or not."""
        known = {each.name for each in fields(cls)}
        values: dict[str, Any] = {name: packed[name] for name in known & packed.keys()}
        for name, value in values.items():
            values[name] = tuple(value) if isinstance(value, list) else value
        return cls(**values)

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

OF_SCRIPTS = tuple(row for row in TABLE if row.name != "pull")
"""Those of a script, which no notebook waits for."""


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
    """Return a job's name: the given one, or a new one for None."""
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
    """Return the event that changes what a job may have; None leaves a value as it is."""
    min_np = count().check("min_np", min_np)
    max_np = count().check("max_np", max_np)
    low = present.min_np if min_np is None else min_np
    high = present.max_np if max_np is None else max_np
    if high is not None and low > high:
        raise OptionError(f"min_np={low} would be above max_np={high}")
    priority = None if priority is None else whole().check("priority", priority)
    weight = None if weight is None else NUMBER.check("weight", weight)
    return LimitsChanged(min_np=min_np, max_np=max_np, priority=priority, weight=weight)


def call_arguments(
    fn: Callable[..., Any], args: Any, kwargs: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return what a training function is called with, if it can be called so."""
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
    """Refuse a function that does not take these arguments, or that does not train when called."""
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
