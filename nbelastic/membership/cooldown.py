"""Who may not come back yet.

A worker that failed is left out for a while: `lo` seconds after its first failure, then twice as
long each time, up to `hi`. Without a range it is left out for good. The random part is handed in,
so that the same events always lead to the same exclusions.

Horovod's ``--blacklist-cooldown-range`` is the same idea; there the waits differ from the
documented ones, here they are ``min(lo * 2**n, hi)`` plus at most a tenth, and never above `hi`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["JITTER", "Cooldown"]

JITTER = 0.1
"""Largest random part of an exclusion, as a fraction of it."""


@dataclass
class Cooldown:
    """Exclusions by key, a worker's or a host's.

    Attributes
    ----------
    bounds : tuple of (float, float) or None
        Shortest and longest exclusion in seconds; None for exclusions without end.
    failures : dict of str to int
        How often each key has failed.
    until : dict of str to float or None
        When each exclusion ends; None for never.
    """

    bounds: tuple[float, float] | None = None
    failures: dict[str, int] = field(default_factory=dict)
    until: dict[str, float | None] = field(default_factory=dict)

    def fail(self, key: str, now: float, chance: float) -> float | None:
        """Note a failure and return how many seconds `key` is excluded, None for good.

        Parameters
        ----------
        key : str
            Who failed.
        now : float
            The time, in seconds.
        chance : float
            A random number from 0 up to 1.
        """
        count = self.failures[key] = self.failures.get(key, 0) + 1
        if self.bounds is None:
            self.until[key] = None
            return None
        low, high = self.bounds
        doubled = low * 2.0 ** min(count - 1, 64)
        seconds = min(min(doubled, high) * (1 + JITTER * chance), high)
        self.until[key] = now + seconds
        return seconds

    def excludes(self, key: str, now: float) -> bool:
        """Return whether `key` is excluded now."""
        if key not in self.until:
            return False
        end = self.until[key]
        return end is None or now < end

    def next_end(self, now: float) -> float | None:
        """Return when the next exclusion ends, or None."""
        ends = [end for end in self.until.values() if end is not None and end > now]
        return min(ends, default=None)
