"""The options of a job, checked before anything else happens."""

from __future__ import annotations

import math
import numbers
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from nbelastic.collectives import BACKENDS
from nbelastic.errors import OptionError
from nbelastic.membership import Limits

__all__ = [
    "Options",
    "call_arguments",
    "checkpoint_url",
    "count_option",
    "resource_amounts",
    "worker_names",
]

PYGLOO_SILENCE = 30.0
"""Seconds for which pygloo may hold the interpreter of a rank that does nothing but wait."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What :func:`nbelastic.fit` takes, under the same names."""

    np: int | None = None
    min_np: int | None = None
    max_np: int | None = None
    workers: tuple[str, ...] | None = None
    resources: dict[str, float] = field(default_factory=dict)
    slots_per_host: int | None = None
    reset_limit: int | None = None
    elastic_timeout: float = 600.0
    stall_timeout: float = 60.0
    heartbeat_timeout: float = 10.0
    blacklist_cooldown: tuple[float, float] | None = None
    lease: float = 3600.0
    checkpoint: str | None = None
    checkpoint_every: int = 100
    resume: bool = False
    backend: str = "auto"

    def __post_init__(self) -> None:
        for name in ("np", "min_np", "max_np", "slots_per_host", "checkpoint_every"):
            self._count(name, least=1)
        self._count("reset_limit", least=0)
        for name in ("elastic_timeout", "stall_timeout", "heartbeat_timeout", "lease"):
            _check_seconds(name, getattr(self, name))
            object.__setattr__(self, name, float(getattr(self, name)))
        self._check_order()
        self._check_cooldown()
        self._check_checkpoint()
        self._check_backend()
        for key, value in self.resources.items():
            good = isinstance(value, numbers.Real) and not isinstance(value, bool)
            if not isinstance(key, str) or not good or not 0 < value < math.inf:
                raise OptionError(f"resources[{key!r}]={value!r}: must be a number above 0")

    def _count(self, name: str, least: int) -> None:
        """Check a whole number, and keep it as an int: NumPy's cannot be sent to the scheduler."""
        object.__setattr__(self, name, count_option(name, getattr(self, name), least=least))

    def _check_order(self) -> None:
        low, start, high = self.min_np, self.np, self.max_np
        if low is not None and high is not None and low > high:
            raise OptionError(f"min_np={low} is above max_np={high}")
        if start is not None and low is not None and start < low:
            raise OptionError(f"np={start} is below min_np={low}")
        if start is not None and high is not None and start > high:
            raise OptionError(f"np={start} is above max_np={high}")

    def _check_cooldown(self) -> None:
        bounds = self.blacklist_cooldown
        if bounds is None:
            return
        try:
            low, high = map(float, bounds)
        except (TypeError, ValueError):  # not a pair, or not of numbers
            low = high = math.nan
        if not 0 < low <= high < math.inf:
            raise OptionError(
                f"blacklist_cooldown={bounds!r}: must be (lo, hi) in seconds with 0 < lo <= hi"
            )
        object.__setattr__(self, "blacklist_cooldown", (low, high))

    def _check_backend(self) -> None:
        if self.backend not in BACKENDS:
            raise OptionError(f"backend={self.backend!r}: must be one of {', '.join(BACKENDS)}")
        if self.backend == "pygloo" and self.heartbeat_timeout <= PYGLOO_SILENCE:
            raise OptionError(
                f"heartbeat_timeout={self.heartbeat_timeout:g}: with backend='pygloo' it must be "
                f"above {PYGLOO_SILENCE:g} s, for which a rank that waits sends no heartbeat"
            )

    def _check_checkpoint(self) -> None:
        if not isinstance(self.resume, bool):
            raise OptionError(f"resume={self.resume!r}: must be True or False")
        if self.checkpoint is None:
            if self.resume:
                raise OptionError(
                    "resume=True: needs checkpoint=, the place where the earlier job's are"
                )
            return
        from fsspec import available_protocols  # noqa: PLC0415 - only who wants it waits for it
        from fsspec.utils import get_protocol  # noqa: PLC0415

        protocol = get_protocol(self.checkpoint)
        if protocol not in available_protocols():
            raise OptionError(
                f"checkpoint={self.checkpoint!r}: fsspec knows no protocol {protocol!r}; "
                "must be a path or a URL such as s3://bucket/directory"
            )

    def checkpoints(self) -> dict[str, Any] | None:
        """Return what ranks are told about checkpoints; None where there are none."""
        if self.checkpoint is None:
            return None
        return {"url": self.checkpoint, "every": self.checkpoint_every, "resume": self.resume}

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
            forming_timeout=max(self.heartbeat_timeout, 1.0),
            reset_limit=self.reset_limit,
            cooldown=self.blacklist_cooldown,
            slots_per_host=self.slots_per_host,
        )


def checkpoint_url(place: Any) -> str | None:
    """Return the URL or path that ``checkpoint=`` means, wherever it is looked at.

    Parameters
    ----------
    place : str, path-like or None
        What the user has given; a path may be relative to the kernel's directory.
    """
    if place is None:
        return None
    if not isinstance(place, (str, os.PathLike)) or not str(place):
        raise OptionError(f"checkpoint={place!r}: must be a path or a URL")
    text = os.fspath(place)
    return text if "://" in text or "::" in text else os.path.abspath(os.path.expanduser(text))


def count_option(name: str, value: Any, least: int) -> int | None:
    """Return an option that is a whole number or None.

    Raises
    ------
    OptionError
        It is neither, or below `least`.
    """
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or int(value) < least:
        raise OptionError(f"{name}={value!r}: must be a whole number, at least {least}")
    return int(value)


def worker_names(workers: Any) -> tuple[str, ...] | None:
    """Return the addresses, names and hosts that ``workers=`` means; None for all workers."""
    if workers is None or isinstance(workers, str):
        return (workers,) if workers else None
    if isinstance(workers, numbers.Integral) or not isinstance(workers, Iterable):
        raise OptionError(
            f"workers={workers!r}: must be a list of addresses, names or hosts; "
            "how many may train: np, min_np, max_np"
        )
    return tuple(str(each) for each in workers) or None


def resource_amounts(resources: Any) -> dict[str, float]:
    """Return what ``resources=`` asks of a worker."""
    if resources is None:
        return {}
    if not isinstance(resources, Mapping):
        raise OptionError(f"resources={resources!r}: must be a dict, as in {{'GPU': 1}}")
    return dict(resources)


def call_arguments(args: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return what a training function is called with."""
    if isinstance(args, (str, bytes)) or not isinstance(args, Iterable):
        raise OptionError(f"args={args!r}: must be a tuple or list, as in args=(value,)")
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise OptionError(f"kwargs={kwargs!r}: must be a dict, as in kwargs={{'lr': 0.1}}")
    strange = next((key for key in kwargs or () if not isinstance(key, str)), None)
    if strange is not None:
        raise OptionError(f"kwargs: {strange!r} must be the name of a parameter")
    return tuple(args), dict(kwargs or {})


def _check_seconds(name: str, value: Any) -> None:
    good = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not good or not float(value) > 0 or math.isnan(float(value)):
        raise OptionError(f"{name}={value!r}: must be a number of seconds above 0")
