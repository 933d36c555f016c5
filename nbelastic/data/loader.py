"""Loader of the micro-batches that this rank computes, step by step."""

from __future__ import annotations

import dataclasses
import json
import numbers
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import torch

from nbelastic.data.balancer import Balancer
from nbelastic.data.batch import Batch, kernel_fingerprint
from nbelastic.data.plan.dealing import DIGESTS, Dealing, Draws
from nbelastic.data.sources.map_source import MapSource
from nbelastic.data.sources.row_source import DataSample, RowSource, is_count
from nbelastic.data.sources.streams import StreamRows, StreamSource
from nbelastic.data.sources.units import UnitSource, WindowedRows
from nbelastic.data.step import RowLedger, Step, StepParticipant
from nbelastic.elastic.ranks.context import Context, current_or_none
from nbelastic.elastic.ranks.step_share import StepShare
from nbelastic.errors import OptionError, StateMismatch
from nbelastic.status import DataStatus

_ORDER = ("epoch", "seed", "shuffle", "drop_last")  # fields of the deal that a state brings along

NOT_EXACT = (
    "the training is not exact: {reason}\n"
    "Parameters may differ in their last bits from those of a run with other ranks. The rows of "
    "each step and the size of its batch are not affected.\n"
    "Batch(exact=True) refuses this, Batch(exact=False) does not mention it."
)

NO_MEMORY = (
    "a rank ran out of memory with {rows} rows at a time, and goes on with {fits}\n"
    "It goes back to the last commit, and computes each micro-batch in {parts} parts, with "
    "the weights of their rows ({device}). Layers such as BatchNorm see each part by itself.\n"
    "To save the time of the attempt, pass Batch(..., micro={fits})."
)
LEFT_EARLY = (
    "epoch {epoch} was left after {done} of {steps} steps\n"
    "A commit takes the rest for what is still to be done: after a failure in the first step of "
    "the next epoch, the loop would train steps that were left out.\n"
    "Pass Loader(steps={done}), so that an epoch has so many."
)


class Loader:
    """Deal the rows of a dataset to steps, and yield this rank's micro-batches of each.

    Which rows a step has, and which of its micro-batches, depends on seed, epoch and batch. The
    number of ranks only decides which rank computes which micro-batches. Make the loader part of a
    :class:`~nbelastic.torch.elastic.TorchState`: then each row goes into the model once per epoch,
    whichever ranks fail, leave and join. A commit counts the step that was handed out before it.

    Iteration goes on after the last step that was done. An epoch ends with a smaller step if rows
    are left over; gradients are weighted by rows.

    The number of torch's threads when the loader is made, on the rank with the newest state, is
    that of all ranks, because results depend on it.

    Parameters
    ----------
    dataset : torch.utils.data.Dataset, Parquet, Dask, Stateful or Shards
        A source, or a map-style dataset: anything with ``len()`` and ``[]``.
    batch : Batch
        Rows of a step, and micro-batches.
    shuffle : bool, default True
        Whether to permute the rows, differently in each epoch.
    seed : int, default 0
        Of the order, and of all random numbers; the same on all ranks.
    drop_last : bool, default False
        Whether to leave out rows that do not fill a step.
    steps : int, optional
        Most steps of an epoch. By default an epoch has all steps that its rows make. A loop that
        stops early by itself (``break``, ``itertools.islice``) does not say that the epoch is done.
    weights : array_like, optional
        A number for each row of a map-style dataset, at least 0. Rows are then drawn with
        replacement, in proportion to it, as by ``WeightedRandomSampler``: as many as there are
        rows, by seed and epoch, the same for every number of ranks. By default each row is dealt
        once per epoch.
    collate_fn : callable, optional
        As for ``DataLoader``; it gets the rows of one micro-batch.
    buffers : mapping of str to callable, optional
        Functions for buffers of models in the same state that are no running means, by their names
        in the model, or by patterns such as ``"*.min_val"``. A function gets the buffer's value at
        the step's start, and a tensor of its values after each micro-batch of the step, stacked in
        their order; each micro-batch has begun with the value at the start. It returns the new
        value, and must depend on nothing else. All values of a step are in memory at once.
    balance : {"even", "speed"}, default "even"
        Which ranks compute how many micro-batches. With ``"speed"``, slower ranks compute fewer, by
        the time of their forward and backward passes. Other quotas are taken at a commit, if they
        make a step more than 5 % shorter. Rows, weights and exact bits do not depend on them.
    **options
        Further options of ``DataLoader``: ``num_workers``, ``pin_memory``, ``persistent_workers``,
        ``prefetch_factor`` and others. Their unit of work is one micro-batch, so none of them
        changes order or progress.

    Attributes
    ----------
    epoch : int
        Number of the epoch.
    step : int
        Steps of it that are done: with the next commit, if the last one is still under way.
    batch : Batch
        As given, with its micro-batch.
    buffers : dict of str to callable
        As given.
    why_not_exact : str
        What keeps the training from being exact; empty if nothing does.
    parts : int
        Parts in which this rank computes each micro-batch: 1, until it runs out of memory. Then the
        elastic loop goes back to the last commit and doubles them. The loop over a step yields one
        after the other, weighted by their rows.

    Raises
    ------
    OptionError
        A value cannot be used, or the number of micro-batches is not known.

    Examples
    --------
    >>> loader = Loader(dataset, Batch(256, micro=32), seed=1)  # doctest: +SKIP
    >>> for step in loader:  # doctest: +SKIP
    ...     optimizer.zero_grad()
    ...     for x, y in step:
    ...         loss_fn(model(x), y).backward()
    ...     optimizer.step()
    ...     state.commit()
    """

    def __init__(
        self,
        dataset: Any,
        batch: Batch,
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        steps: int | None = None,
        weights: Any = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        buffers: Mapping[str, Callable[..., Any]] | None = None,
        balance: Literal["even", "speed"] = "even",
        **options: Any,
    ) -> None:
        for name, value, is_right, must_be in (
            ("batch", batch, isinstance(batch, Batch), "a Batch, as in Batch(256, micro=32)"),
            ("seed", seed, isinstance(seed, numbers.Integral), "a whole number"),
            ("steps", steps, steps is None or is_count(steps), "a whole number, at least 1"),
            ("buffers", buffers, _are_functions(buffers or {}), "a dict of functions by name"),
            ("balance", balance, balance in ("even", "speed"), "'even' or 'speed'"),
        ):
            if not is_right:
                raise OptionError(f"Loader({name}={value!r}): must be {must_be}")
        self.buffers = dict(buffers or {})
        context = current_or_none()
        self.batch = batch.divided_by(None if context is None else context.max_np)
        self._source = self._source_of(dataset, collate_fn, options)
        is_open = self._source.is_open
        for name, option in (("drop_last", drop_last), ("steps", steps)):
            if is_open and option:
                raise OptionError(
                    f"Loader({self._source.name}, {name}=…): its epoch lasts as long as its "
                    "streams, and which step is the last is not known before; leave it out"
                )
        self._dealing = Dealing(
            len(self._source),
            self.batch.global_batch // self.batch.micro_batches,
            self.batch.micro_batches,
            seed=int(seed),
            shuffle=bool(shuffle),
            drop_last=bool(drop_last),
            limit=None if steps is None else int(steps),
            draws=None if weights is None else self._draws_of(weights, shuffle),
        )
        if self._dealing.steps == 0 and not is_open:
            raise OptionError(
                f"Loader: {len(self._source)} rows make no step of {self.batch.global_batch}"
            )
        self.step = 0
        self.why_not_exact = "" if batch.exact else "Batch(exact=False)"
        self._threads = torch.get_num_threads()
        self._kernels = kernel_fingerprint() if batch.exact else ""
        self._state: Callable[[], Any] = lambda: None
        self.participants: list[StepParticipant] = []  # they take part in each step
        self._begun: Step | None = None  # the latest
        self._unsettled: Step | None = None
        self._described = self._source.describe()
        self._units = json.dumps(self._described)  # one text: each commit is looked through
        self.balancer = Balancer(self.batch.micro_batches, by_speed=balance == "speed")
        self._completed_in: tuple[int, int, int] | None = None  # generation, rank and size
        self._told: set[str] = set()
        self._ledger = RowLedger()
        self.parts = 1
        self.rows_under_way = 0  # of the micro-batch

    def _draws_of(self, weights: Any, shuffle: bool) -> Draws:
        if not isinstance(self._source, MapSource):
            raise OptionError(
                f"Loader({self._source.name}, weights=…): only rows of a map-style dataset can be "
                "drawn by weights"
            )
        if not shuffle:
            raise OptionError("Loader(weights=…, shuffle=False): draws have no order; leave it out")
        return Draws(weights, len(self._source))

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over a loader made in another process, with this process's threads and kernels."""
        self.__dict__.update(state)
        self._threads = torch.get_num_threads()
        self._kernels = kernel_fingerprint() if self.batch.exact else ""

    def _source_of(
        self, dataset: Any, collate_fn: Callable[[list[Any]], Any] | None, options: dict[str, Any]
    ) -> RowSource:
        if not isinstance(dataset, (StreamSource, UnitSource)):
            _refuse_without_rows(dataset)
            return MapSource(dataset, collate_fn, **options)
        if isinstance(dataset, UnitSource) and collate_fn is not None:
            options["collate_fn"] = collate_fn
        for name in options:
            raise OptionError(
                f"Loader({dataset.name}, {name}=…): {dataset.name} does not take it; leave it out"
            )
        if isinstance(dataset, UnitSource):
            return WindowedRows(dataset, self.batch.micro_batches)
        return StreamRows(dataset, self.batch.micro_batches, collate_fn)

    def __len__(self) -> int:
        """Return the number of steps of an epoch.

        Raises
        ------
        TypeError
            The source does not know it.
        """
        if self._source.is_open:
            raise TypeError(f"the number of steps of {self._source.name} is not known")
        return self._dealing.steps

    @property
    def epoch(self) -> int:
        """Number of the epoch."""
        return self._dealing.epoch

    @property
    def block(self) -> range:
        """Numbers of the micro-batches that this rank computes of a step."""
        return self.balancer.blocks.block(self.balancer.place[1])

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch, unless begun. A state with ``epoch`` among its values does so itself."""
        if epoch != self.epoch:
            done, steps = self.step, self._dealing.steps
            knows = self.participants and not self._source.is_open
            if knows and epoch > self.epoch and 0 < done < steps:  # a commit has it as unfinished
                self._say(LEFT_EARLY.format(epoch=self.epoch, done=done, steps=steps))
            self._dealing = dataclasses.replace(self._dealing, epoch=int(epoch))
            self.step = 0
            self._completed_in = None

    def sample(self) -> Any:
        """Return a micro-batch like the training's, which counts nowhere."""
        if not self._source.is_open:
            return next(iter(self._source.fetch(self._dealing, 0, self.block)))
        before = self.state_dict()
        try:
            return next(iter(next(iter(self))))
        finally:
            self.load_state_dict(before)

    def __iter__(self) -> Iterator[Step]:
        """Iterate over the steps of the epoch that are left.

        If none is left, and no state has ``epoch`` among its values, the next epoch begins. An
        earlier loop over this loader cannot go on.

        Raises
        ------
        RuntimeError
            ``state.epoch`` is that of an epoch which the loop before has completed.
        """
        self.settle()
        state = self._state()
        epoch = getattr(state, "epoch", None)
        if isinstance(epoch, numbers.Integral):
            epoch = int(epoch)
            self.set_epoch(epoch)
            if self._completed_in == self.balancer.place:
                raise RuntimeError(
                    f"the loader has no step left: epoch {epoch} is done, and state.epoch is still "
                    f"{epoch}. Use `for state.epoch in range(state.epoch, epochs)`, and "
                    "leave a loader for validation out of the state"
                )
        elif not self._source.has_step(self._dealing, self.step):
            self.set_epoch(self.epoch + 1)
        return self._iterate(self._dealing, self.step)

    def _iterate(self, dealing: Dealing, number: int) -> Iterator[Step]:
        context, source = current_or_none(), self._source
        self._leave(context, self._begun)
        outer = None if context is None else context.share
        step: Step | None = None
        epochs, known = (0, 0) if context is None else context.telemetry.total
        if context is not None and epochs and not known:
            context.telemetry.total = (epochs, dealing.steps)
        blocks, batches, order = None, iter(()), 0
        try:
            while source.has_step(dealing, number):
                block = self.block
                if blocks is not self.balancer.blocks:  # a commit has fixed other quotas
                    blocks = self.balancer.blocks
                    batches = source.fetch(dealing, number, block)
                    order = dealing.digest(*blocks.quotas)
                counts = source.counts(dealing, number, block)
                share = StepShare(
                    dealing.micro_batches,
                    block,
                    tuple(each for each in block if counts[each]),
                    [count / dealing.micro for count in counts],
                    exact=bool(self.batch.exact),
                    place=(dealing.epoch % DIGESTS, number, order),
                    outer=outer,
                    deviates=bool(self.batch.exact and self.why_not_exact),
                    blocks=blocks,
                    in_state=bool(self.participants),
                )
                step = Step(self, dealing, number, share, counts, batches)
                number += 1
                self.step = number  # done, as soon as a commit says so
                self._begun, self.balancer.timed = step, share
                self._unsettled = step if source.is_open else None
                if context is not None:
                    context.share = share
                if self.participants:  # else no commit says what is done
                    self._ledger.begin(counts, share)
                self._report(context, block)
                for each in self.participants:
                    each.begin(share)
                yield step
                self.check_latest(step)
                step.skip()
                share.over = True
                if share.others_deviate:
                    self.forgo_exactness("another rank is not exact")
                    self._report(context, block)
            self._completed_in = self.balancer.place
        finally:
            self._leave(context, step)

    def _leave(self, context: Context | None, step: Step | None) -> None:
        """End a step, and go back to the enclosing step, unless another step has begun since."""
        if step is not None:
            step.share.over = True
            if context is not None and context.share is step.share:
                context.share = step.share.enclosing

    def check_latest(self, step: Step) -> None:
        """Refuse to go on with a step once a newer loop has begun."""
        if step is not self._begun:
            raise RuntimeError(
                "a newer loop over the same loader has begun, so this one cannot go on; make a "
                "loader for each"
            )

    @property
    def incomplete(self) -> bool:
        """Whether the step under way lacks micro-batches of this rank."""
        step = self._begun
        if step is None or step.share.over:
            return False
        return step.share.missing > 0 or self._unsettled is not None

    def settle(self) -> None:
        """Agree with other ranks on the rows of the step that has begun, if its source is open."""
        step = self._unsettled
        if step is None:
            return
        self._source.settle(step.dealing, step.number, step.counts)
        step.share.row_weights[:] = [count / step.dealing.micro for count in step.counts]
        self._unsettled = None

    def _report(self, context: Context | None, block: range) -> None:
        if context is not None:
            why = self.why_not_exact
            context.telemetry.share = (self.batch.micro_batches, block.start, block.stop, why)

    def _say(self, warning: str) -> None:
        """Add a warning to the job's history, once."""
        context = current_or_none()
        if context is not None and warning not in self._told:
            self._told.add(warning)
            context.warn(warning)

    # -- what states and models call ---------------------------------------------------------------

    def follow(self, state: object) -> None:
        """Take the number of the epoch from ``state.epoch``, if any."""
        self._state = weakref.ref(state)

    def rows_in_commit(self) -> DataStatus:
        """Return the rows of all steps so far, which are in a commit."""
        dealing, (seen, lost) = self._dealing, self._ledger.totals
        rows, done = dealing.rows_of_epoch, self._source.rows_before(dealing, self.step)
        left = rows - done if rows else None
        return DataStatus(
            self._source.name, dealing.epoch, done, left, seen, self._ledger.redone, lost
        )

    def forgo_exactness(self, reason: str) -> None:
        """Record a reason against exact training; with ``exact=True``, refuse the training."""
        if self.batch.exact is True:
            raise OptionError(f"Batch(exact=True): {reason}")
        if self.batch.exact and not self.why_not_exact:
            self.why_not_exact = reason
            self._say(NOT_EXACT.format(reason=reason))

    @property
    def can_make_room(self) -> bool:
        """Whether a micro-batch is under way that has more rows than parts."""
        computes = self._begun is not None and self._begun.share.number is not None
        return computes and self.parts < self.rows_under_way

    def make_room(self, device: str) -> None:
        """Compute micro-batches in twice as many parts, because `device` has no memory left.

        Raises
        ------
        OptionError
            The batch is to be exact, and parts are rounded otherwise.
        """
        rows = self.rows_under_way
        before, self.parts = self.parts, min(2 * self.parts, rows)
        self.forgo_exactness(
            f"a rank ran out of memory, and computes micro-batches in {self.parts} parts"
        )
        words = {"rows": -(-rows // before), "parts": self.parts, "fits": -(-rows // self.parts)}
        self._say(NO_MEMORY.format(device=device, **words))

    def data_sample(self) -> DataSample | None:
        """Return digests of some rows of the dataset, to be compared with those of other ranks."""
        return self._source.sample()

    def requirements(self) -> dict[str, str]:
        """Return the properties that ranks with a shared state must have in common, by name."""
        dealing = self._dealing
        found = {
            "batch": f"{dealing.global_batch} rows in {dealing.micro_batches} micro-batches",
            **self._described,
        }
        if dealing.draws is not None:
            found["weights"] = dealing.draws.digest
        if self.batch.exact is True:
            found["kernels"] = self._kernels
        return found

    def state_dict(self) -> dict[str, Any]:
        """Return epoch and step, and all that the order depends on.

        It can be loaded with any number of ranks and workers.
        """
        dealing = self._dealing
        return {
            **{name: getattr(dealing, name) for name in _ORDER},
            "step": self.step,
            "rows": dealing.length,
            "global_batch": dealing.global_batch,
            "micro_batches": dealing.micro_batches,
            "threads": self._threads,
            "kernels": self._kernels,
            "units": self._units,
            "source": self._source.state_dict(),
            "ledger": self._ledger.state_dict(),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from a state dict, with its order and number of threads.

        Raises
        ------
        StateMismatch
            It is of other rows, another batch or, with ``exact=True``, a process that computes
            other bits. Nothing has changed.
        """
        mine = self.state_dict()
        for name in ("rows", "global_batch", "micro_batches"):
            theirs = state_dict.get(name)  # None if it is the state dict of something else
            if theirs != mine[name]:
                raise StateMismatch(
                    f"the loader has {name}={mine[name]}, the state dict {name}={theirs}"
                )
        then, now = json.loads(state_dict.get("units", self._units)), self._described
        for name in [*then, *now]:
            if then.get(name) != now.get(name):
                raise StateMismatch(
                    f"{name} has changed since the state was saved: it was "
                    f"{then.get(name, 'not there')}, and is {now.get(name, 'gone')}"
                )
        kernels = state_dict.get("kernels", "")
        if self.batch.exact and kernels and kernels != self._kernels:
            reason = f"this process computes other bits ({self._kernels}) than others ({kernels})"
            if self.batch.exact is True:
                raise StateMismatch(reason)
            self.forgo_exactness(reason)
        self._source.load_state_dict(state_dict.get("source", {}))
        self._ledger.load_state_dict(state_dict.get("ledger", {}))
        self._completed_in = self._unsettled = None
        order = {name: state_dict[name] for name in _ORDER}
        self._dealing = dataclasses.replace(self._dealing, **order)
        self.step = int(state_dict["step"])
        self._threads = int(state_dict["threads"])
        if self.batch.exact and self._threads != torch.get_num_threads():
            torch.set_num_threads(self._threads)


def _are_functions(buffers: Any) -> bool:
    return isinstance(buffers, Mapping) and all(map(callable, buffers.values()))


def _refuse_without_rows(dataset: Any) -> None:
    """Refuse a dataset whose rows cannot be chosen by number, with what to pass instead."""
    has_rows = callable(getattr(dataset, "__len__", None)) and hasattr(dataset, "__getitem__")
    of_columns = type(dataset).__module__.partition(".")[0] in ("pandas", "polars", "pyarrow")
    named = of_columns or (isinstance(dataset, Mapping) and 0 not in dataset)
    if named or not has_rows or isinstance(dataset, (str, bytes)):
        raise OptionError(
            f"Loader({type(dataset).__name__}): must be a map-style dataset, with len() and [] by "
            "number from 0. Pass the dataset of a DataLoader, with its batch as Batch(...); "
            "TensorDataset(*tensors) for a frame or a dict; hvd.elastic.Parquet(path) for files; "
            "hvd.elastic.Stateful(make) for an IterableDataset"
        )
