"""Step of an epoch: this rank's micro-batches in order, and the count of rows."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from nbelastic.data.plan.dealing import Dealing, mix
from nbelastic.elastic.followed import seed_generators
from nbelastic.elastic.ranks.context import current_or_none

if TYPE_CHECKING:
    from nbelastic.data.loader import Loader
    from nbelastic.elastic.ranks.step_share import StepShare

# Kind of seeds: of the micro-batches that are computed, apart from those of sources.
_COMPUTING = 2


class StepParticipant(Protocol):
    """Object that acts before and after each micro-batch, for instance on a model's buffers."""

    def begin(self, share: StepShare) -> None:
        """Begin a step."""

    def before(self, number: int) -> None:
        """Begin a micro-batch."""

    def after(self, number: int) -> None:
        """End a micro-batch."""

    def end(self) -> None:
        """End the micro-batches of a step. All ranks call this at the same point."""


class Step:
    """A step of an epoch: an iterable over this rank's micro-batches of the step.

    Random generators are seeded before each micro-batch is computed, by seed, epoch, step and the
    number of the micro-batch.

    Attributes
    ----------
    epoch, number : int
        Its epoch, and its number in it, from 0.
    rows : int
        Its rows, on all ranks. Of sources of unknown length they are known after the loop over its
        micro-batches; before, all count as full.
    """

    def __init__(
        self,
        loader: Loader,
        dealing: Dealing,
        number: int,
        share: StepShare,
        counts: list[int],
        batches: Iterator[Any],
    ) -> None:
        self.epoch = dealing.epoch
        self.number = number
        self.counts = counts
        self._loader = loader
        self.dealing = dealing
        self.share = share
        self._batches = batches
        self._begun = self._open = self._ended = False
        share.finish = self._finish

    def __len__(self) -> int:
        """Return the number of this rank's micro-batches."""
        return len(self.share.expected)

    @property
    def rows(self) -> int:
        """Its rows, on all ranks."""
        return sum(self.counts)

    @property
    def numbers(self) -> tuple[int, ...]:
        """Numbers of this rank's micro-batches, from 0 to V - 1."""
        return self.share.expected

    def __iter__(self) -> Iterator[Any]:
        """Iterate over this rank's micro-batches, weighted by their rows. Once only."""
        return self._iterate(None)

    def weighted(self, weight: Callable[[Any], Any]) -> Iterator[Any]:
        """Iterate over this rank's micro-batches, with other weights than their rows.

        The gradient of the step is ``Σ w·g / Σ w`` over all micro-batches. A loss that is a mean
        over tokens needs their numbers as weights: a mean of means would favour short sequences.

        Parameters
        ----------
        weight : callable
            Gets a batch and returns a number that is not negative. A micro-batch of weight 0 does
            not count, whatever its gradient.

        Examples
        --------
        >>> for x, y in step.weighted(lambda batch: (batch[1] != -100).sum()):  # doctest: +SKIP
        ...     loss_fn(model(x), y).backward()
        """
        return self._iterate(weight)

    def _iterate(self, weight: Callable[[Any], Any] | None) -> Iterator[Any]:
        if self._begun:
            raise RuntimeError("the micro-batches of a step can be iterated over only once")
        self._begun = True
        share, loader, context = self.share, self._loader, current_or_none()
        if share.over and self._ended:
            raise RuntimeError(
                "the loop over the loader has gone on from this step; iterate over each step "
                "before the next: `for step in loader:`"
            )
        if share.over and context is not None:
            # ``next(iter(loader))`` has ended its loop at once. Its batches can be looked at, and a
            # backward() finds this step, and is refused.
            share.outer, context.share = context.share, share
        try:
            for number in share.expected:
                loader.check_latest(self)
                self._close()
                batch = next(self._batches)
                loader.rows_under_way = rows_of(batch)
                parts = list(cut(batch, loader.parts))
                share.number, share.weights[number] = number, 0.0
                share.taken += self.counts[number]
                for each in loader.participants:
                    each.before(number)
                seed_generators(mix(self.dealing.seed, _COMPUTING, self.epoch, self.number, number))
                self._open = True
                loader.balancer.watch.start()
                for position, (part, fraction) in enumerate(parts):
                    self._end_part()
                    share.part = position, len(parts)
                    rows = fraction * share.row_weights[number]
                    share.part_weight = self._weight(weight, part, rows)
                    share.weights[number] += share.part_weight
                    yield part
            self._finish()
            share.number = None  # a backward() from here on belongs to no micro-batch
        finally:
            if share.over and context is not None and context.share is share:
                context.share = share.enclosing

    def _weight(self, weight: Callable[[Any], Any] | None, batch: Any, by_rows: float) -> float:
        if weight is None:
            return by_rows
        value = float(weight(batch))
        if not 0.0 <= value < math.inf:
            raise ValueError(
                f"step.weighted: the weight of a micro-batch is {value}; it must be a number, at "
                "least 0"
            )
        return value

    def _close(self) -> None:
        if not self._open:
            return
        self._open = False
        self._loader.balancer.watch.stop()
        self._end_part()
        number = self.share.number
        assert number is not None
        for each in self._loader.participants:
            each.after(number)

    def _end_part(self) -> None:
        """End the part of a micro-batch that is under way."""
        at_end, self.share.at_end = self.share.at_end, ()
        for call in at_end:
            call()

    def _finish(self) -> None:
        """End the last micro-batch, and the loop over them."""
        if self._ended:
            return
        self._close()
        self._ended = True
        share = self.share
        self._loader.settle()
        # With the last step ends what it was fetched from, such as worker processes: no cycle of
        # references may keep that until garbage is collected.
        self._batches, share.finish = iter(()), lambda: None
        self._loader.balancer.note(share, full=self.rows == self.dealing.global_batch)
        for each in self._loader.participants:
            each.end()
        # Ranks have ended with different micro-batches. What the optimizer draws is the same.
        seed = mix(self.dealing.seed, _COMPUTING, self.epoch, self.number, share.micro_batches)
        seed_generators(seed)
        context = current_or_none()
        if context is not None:
            context.telemetry.recorded(share.taken)

    def skip(self) -> None:
        """Pass over micro-batches not taken, for the next step to find its own."""
        for _ in range(self.share.missing):
            next(self._batches)
        self._finish()


def cut(batch: Any, parts: int) -> Iterator[tuple[Any, float]]:
    """Yield a batch in parts of about equally many rows, each with its fraction of the rows."""
    rows = rows_of(batch)
    parts = max(min(parts, rows), 1)
    if parts == 1:
        yield batch, 1.0
        return
    bounds = [rows * part // parts for part in range(parts + 1)]
    for begin, end in itertools.pairwise(bounds):
        yield _part(batch, rows, slice(begin, end)), (end - begin) / rows


def rows_of(batch: Any) -> int:
    """Return the rows of a collated batch: the length of its first array; 0 if it has none."""
    shape = getattr(batch, "shape", None)
    if shape is not None:
        return int(shape[0]) if len(shape) else 0
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    inside = batch if isinstance(batch, (list, tuple)) else ()
    return next(filter(None, map(rows_of, inside)), 0)


def _part(value: Any, rows: int, wanted: slice) -> Any:
    shape = getattr(value, "shape", None)
    if shape is not None:
        return value[wanted] if len(shape) and shape[0] == rows else value
    if isinstance(value, Mapping):
        found = {key: _part(each, rows, wanted) for key, each in value.items()}
        return type(value)(found)  # type: ignore[call-arg]
    if not isinstance(value, (list, tuple)):
        return value
    if len(value) == rows and not rows_of(value):  # objects, such as texts
        return value[wanted]
    inner = [_part(each, rows, wanted) for each in value]
    return type(value)(*inner) if hasattr(value, "_fields") else type(value)(inner)


class RowLedger:
    """Rows of the steps that are done, over all epochs.

    A step is entered when it begins. It counts in the commit after it, and in what follows. What
    all ranks have taken of a step comes from the reduction of its gradients (`StepShare.seen`).
    """

    def __init__(self) -> None:
        self.redone = 0  # rows of steps that had begun on this rank, and were rolled back
        self._seen = self._lost = 0
        self._step: tuple[StepShare, Sequence[int]] | None = None

    def begin(self, rows: Sequence[int], share: StepShare) -> None:
        """Enter a step, with the rows of its micro-batches; the step before counts."""
        self._seen, self._lost = self.totals
        self._step = share, rows

    @property
    def totals(self) -> tuple[int, int]:
        """Rows seen and rows lost, including the step under way."""
        if self._step is None:
            return self._seen, self._lost
        share, rows = self._step
        seen = share.seen
        if seen is None:  # no optimizer has stepped, so each rank knows its own part alone
            seen = 0 if share.missing else sum(rows)
        return self._seen + seen, self._lost + sum(rows) - seen

    def state_dict(self) -> dict[str, int]:
        """Return the counts, as of the end of the step under way."""
        seen, lost = self.totals
        return {"seen": seen, "lost": lost, "redone": self.redone}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go back to earlier counts; the rows counted since then are done again."""
        begun, self._step = sum(self.totals), None
        self._seen, self._lost = int(state_dict.get("seen", 0)), int(state_dict.get("lost", 0))
        self.redone = max(self.redone, int(state_dict.get("redone", 0)))
        self.redone += max(begun - self._seen - self._lost, 0)
