"""The options of a job, checked before anything else happens."""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass, field
from typing import Any

from nbelastic.errors import OptionError
from nbelastic.membership import Limits

__all__ = ["Options"]


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

    def __post_init__(self) -> None:
        for name in ("np", "min_np", "max_np", "slots_per_host"):
            _check_count(name, getattr(self, name), least=1)
        _check_count("reset_limit", self.reset_limit, least=0)
        for name in ("elastic_timeout", "stall_timeout", "heartbeat_timeout"):
            _check_seconds(name, getattr(self, name))
        self._check_order()
        self._check_cooldown()
        for key, value in self.resources.items():
            if not isinstance(value, numbers.Real) or value <= 0:
                raise OptionError(f"resources[{key!r}]={value!r}: must be a number above 0")

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
        if len(bounds) != 2 or not 0 < bounds[0] <= bounds[1] or not math.isfinite(bounds[1]):
            raise OptionError(
                f"blacklist_cooldown={bounds!r}: must be (lo, hi) in seconds with 0 < lo <= hi"
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
            forming_timeout=max(self.heartbeat_timeout, 1.0),
            reset_limit=self.reset_limit,
            cooldown=self.blacklist_cooldown,
            slots_per_host=self.slots_per_host,
        )


def _check_count(name: str, value: Any, least: int) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or int(value) < least:
        raise OptionError(f"{name}={value!r}: must be a whole number, at least {least}")


def _check_seconds(name: str, value: Any) -> None:
    good = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not good or not float(value) > 0 or math.isnan(float(value)):
        raise OptionError(f"{name}={value!r}: must be a number of seconds above 0")
