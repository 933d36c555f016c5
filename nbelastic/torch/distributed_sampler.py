"""Torch's ``DistributedSampler``, connected with the ranks of the job.

:class:`~nbelastic.elastic.followed.FollowedSamplers` does the rest. Here torch's classes are made
to tell of it: which samplers there are, and how many batches a loader has handed out.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import BatchSampler, DataLoader
from torch.utils.data.distributed import DistributedSampler

from nbelastic.elastic.followed import Count, FollowedSamplers, samplers_of
from nbelastic.elastic.ranks.context import current_or_none


def install() -> None:
    """Make each DistributedSampler follow the ranks of its job; idempotent."""
    wrap(DistributedSampler, "__init__", _telling(FollowedSamplers.add))
    wrap(DistributedSampler, "set_epoch", _telling(FollowedSamplers.named))
    wrap(DistributedSampler, "__iter__", _around_iteration)
    wrap(DataLoader, "__iter__", _around_loader)


def wrap(kind: Any, name: str, around: Callable[..., Any]) -> None:
    """Make a function of a class or module call `around` with the original first; idempotent."""
    original = getattr(kind, name)
    if not hasattr(original, "_nbelastic"):

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            return around(original, *args, **kwargs)

        call._nbelastic = True  # type: ignore[attr-defined]
        setattr(kind, name, call)


def _telling(tell: Callable[[FollowedSamplers, Any], None]) -> Callable[..., None]:
    """Return what calls a sampler's method, and then tells the rank's followed samplers."""

    def around(original: Callable[..., Any], sampler: Any, *args: Any, **kwargs: Any) -> None:
        original(sampler, *args, **kwargs)
        context = current_or_none()
        if context is not None:
            tell(samplers_of(context), sampler)

    return around


def _around_iteration(original: Callable[..., Any], sampler: Any) -> Iterator[Any]:
    context = current_or_none()
    found = None if context is None else samplers_of(context).find(sampler)
    if context is None or found is None or found.drawing:  # `share` itself draws the whole epoch
        own: Iterator[Any] = original(sampler)
        return own
    plain = type(sampler).__iter__ is DistributedSampler.__iter__  # then seed and epoch suffice
    return samplers_of(context).share(sampler, found, functools.partial(original, sampler), plain)


def _around_loader(original: Callable[..., Any], loader: Any) -> Iterator[Any]:
    context, batches = current_or_none(), loader.batch_sampler
    sampler = getattr(batches, "sampler", loader.sampler)
    found = None
    if context is not None and isinstance(sampler, DistributedSampler):
        found = samplers_of(context).find(sampler)
    if context is None or found is None:
        inner: Iterator[Any] = original(loader)
        return inner
    wrap(type(sampler), "__iter__", _around_iteration)  # its class may have one of its own
    rows = 1 if batches is None else batches.batch_size if type(batches) is BatchSampler else None
    count = samplers_of(context).begin(sampler, found, rows)
    ended = functools.partial(samplers_of(context).ended, sampler, found)
    return _Counted(original(loader), count, ended)


class _Counted:
    """Iterator of a loader, with a count of the batches handed out."""

    def __init__(self, inner: Iterator[Any], count: Count, ended: Callable[[], None]) -> None:
        self._inner = inner
        self._count = count
        self._ended = ended

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            batch = next(self._inner)
        except StopIteration:
            self._ended()
            raise
        self._count.batches += 1  # here, because a loader asks its sampler ahead of the loop
        return batch

    def __len__(self) -> int:
        return len(self._inner)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)
