"""State for training's rollback and for newcomers.

The life of a state inside :func:`nbelastic.elastic.run`:

=======================  ==========================================================================
``commit()``             ``save()``, count the version, then ``check_host_updates()``
a peer fails             ``restore()``: exactly the last commit
ranks leave or join      ``leave()`` on all members while the old generation still works, then
                         ``save()``: one consistent commit of all
a generation has formed  ``on_reset()`` on ranks with a new rank or size, then ``align(behind)``,
                         then ``save()``
=======================  ==========================================================================
"""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

from nbelastic.elastic.followed import Position, samplers_of
from nbelastic.elastic.ranks.context import current, current_or_none, zero_is_source
from nbelastic.elastic.ranks.timeline import timeline
from nbelastic.elastic.sampler import SamplerProgress, ShardSampler, agree_on_progress
from nbelastic.elastic.state.in_place import Originals, adopt
from nbelastic.elastic.state.state_payload import StatePayload, dump, load
from nbelastic.elastic.state.transfer import allgather_object, spread_everywhere
from nbelastic.errors import (
    HostsUpdatedInterrupt,
    NbelasticError,
    OptionError,
    StateMismatch,
)
from nbelastic.pickling import failing_part

_MIXED = 3  # Horovod's HostUpdateResult.mixed

Task = TypeVar("Task", bound="Callable[[], object]")


class State:
    """Base of all states; Horovod's class of the same name.

    A state of your own overrides :meth:`save`, :meth:`restore` and :meth:`sync`. Its ``sync``
    broadcasts from rank ``nbelastic.elastic.sync_root()``, or from rank 0, which means the same in
    the elastic loop.
    """

    # What the elastic loop needs of a state has names that no value of a user's can have.
    _on_commit: tuple[Callable[[], None], ...] = ()  # the loop's calls, while it runs in a job

    def __init__(self, bcast_object: object = None, get_rank: object = None) -> None:
        del bcast_object, get_rank  # Horovod's signature; the loop knows both
        self._reset_callbacks: list[Callable[[], None]] = []

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], None]]) -> None:
        """Add functions to call after a change of membership, before the state is synchronised.

        Parameters
        ----------
        callbacks : iterable of callables without arguments
            Called in the order of registration, on each rank that was a member before.
        """
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Run :meth:`reset` and the reset callbacks. Called by the elastic loop."""
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: float, update_res: int) -> None:
        """Do nothing; a class of your own can override it, to be told of a coming change.

        Called on all ranks by ``commit()`` or ``check_host_updates()``, just before it raises
        ``HostsUpdatedInterrupt``. It has no part in that: the scheduler tells the ranks.

        Parameters
        ----------
        timestamp : float
            The time, in seconds since 1970.
        update_res : int
            3, which is Horovod's ``HostUpdateResult.mixed``: ranks join, leave, or both.
        """

    def commit(self) -> None:
        """Save the state, so that training can be rolled back to here, and check for changes.

        Raises
        ------
        HostsUpdatedInterrupt
            Ranks are about to join or leave; :func:`nbelastic.elastic.run` catches it.
        """
        with timeline.span("COMMIT"):
            self.save()
        samplers_of(current()).save()
        current().committed()
        for call in self._on_commit:
            call()
        self.check_host_updates()

    def set_total(self, *, epoch: int = 0, batch: int = 0, step: int = 0) -> None:
        """Declare how far training goes, so that progress and remaining time can be shown.

        Parameters
        ----------
        epoch : int, optional
            Epochs in all; ``state.epoch`` is the present one, counted from 0.
        batch : int, optional
            Batches in an epoch; ``state.batch`` is the last one that is done, counted from 0.
        step : int, optional
            For a loop without epochs, its steps; ``state.step`` is the last one that is done.

        Examples
        --------
        >>> state.set_total(epoch=10, batch=len(loader))  # doctest: +SKIP
        >>> state.set_total(step=6000)  # doctest: +SKIP
        """
        for name, value in (("epoch", epoch), ("batch", batch), ("step", step)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise OptionError(
                    f"set_total({name}={value!r}): must be a whole number, at least 0"
                )
        if step and (epoch or batch):
            raise OptionError("set_total(step=…): is for a loop without epoch= and batch=")
        current().telemetry.total = (epoch, batch or step)

    def check_host_updates(self) -> None:
        """Check whether ranks are about to join or leave, without saving.

        Raises
        ------
        HostsUpdatedInterrupt
            As for :meth:`commit`.
        """
        context = current()
        context.telemetry.checked()
        epochs, batches = context.telemetry.total
        by_steps = batches and not epochs
        done = _count(self, "step") if by_steps else self._batch()
        context.telemetry.place = (_count(self, "epoch"), done)
        try:
            context.check_membership()
        except HostsUpdatedInterrupt:
            samplers_of(context).save()  # now, before the iterations of the loop are left
            self.on_hosts_updated(time.time(), _MIXED)
            raise

    def _batch(self) -> int:
        """Return the number of the last batch that is done in the epoch."""
        return _count(self, "batch")

    def _run_due(self) -> None:
        """Call functions that are due at the last commit."""

    def _sample(self) -> tuple[float, ...]:
        """Return values of trained parameters."""
        return ()

    def _step_bytes(self) -> int:
        """Return the bytes of the host that the gradients of a step and its optimizer take."""
        return 0

    def align(self, behind: Sequence[int]) -> None:
        """Bring all members of a new generation to the same state. Called by the elastic loop.

        Parameters
        ----------
        behind : sequence of int
            Ranks without the newest committed version (in a first generation all but the source),
            the same on all ranks. Empty after most faults: then ranks exchange only their progress
            in the samplers.
        """
        del behind
        with zero_is_source():
            self.sync()
        context = current_or_none()
        if context is not None:
            everyones = allgather_object(context.communicator(), samplers_of(context).saved)
            samplers_of(context).go_back(everyones[context.source])

    def leave(self) -> None:
        """Exchange values that must not be lost with leaving ranks, in the old generation."""

    def make_room(self, error: Exception) -> bool:
        """Take less memory from now on, if an error is about memory; return whether so."""
        del error
        return False

    def reset(self) -> None:
        """Adapt to a new membership. Called before the reset callbacks."""

    def save(self) -> None:
        """Keep the present values as the last commit."""
        raise NotImplementedError

    def restore(self) -> None:
        """Go back to exactly the last commit."""
        raise NotImplementedError

    def sync(self) -> None:
        """Make all ranks equal to the rank that holds the newest state."""
        raise NotImplementedError


class ObjectState(State):
    """Plain Python values, as attributes.

    Parameters
    ----------
    bcast_object, get_rank : optional
        Ignored; accepted for Horovod's signature.
    **values
        Initial values; later values are assigned to the attributes. They must be picklable, and
        cheap to copy at each commit. Attributes that are not named here are neither saved nor
        synchronised.

    Examples
    --------
    >>> state = ObjectState(epoch=0, losses=[])
    >>> state.losses.append(0.5)
    >>> state.restore()
    >>> state.losses
    []
    """

    def __init__(
        self, bcast_object: object = None, get_rank: object = None, **values: object
    ) -> None:
        super().__init__()
        del bcast_object, get_rank
        self._check_free(values)
        self._names = tuple(values)
        self._first = values
        self.__dict__.update(values)
        self.save()

    def _check_free(self, names: Iterable[str]) -> None:
        """Refuse private names of values, and names of the class's attributes."""
        for name in names:
            if name.startswith("_") or hasattr(type(self), name):
                raise OptionError(f"a state cannot have a value named {name!r}: choose another")

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    _aligned = False  # with the other ranks, once at least

    # -- functions called after commits ------------------------------------------------------------

    _tasks: Mapping[str, tuple[int, Callable[[], object]]] = MappingProxyType({})
    _doing = False
    _schedule: dict[str, int]  # commits, and of each task how often it has been due and done

    def every(self, commits: int, function: Task, *, name: str | None = None) -> Task:
        """Call a function after every `commits` commits, despite changes of membership.

        Code after a commit, such as an evaluation over all ranks, would be skipped if a peer failed
        in it: all ranks go back to that commit, and training continues with the next batch. A
        function that is registered here is called again. The mark that it is done belongs to the
        next commit, together with everything that it has assigned to the state.

        Parameters
        ----------
        commits : int
            Number of calls of :meth:`commit` from one call of the function to the next.
        function : callable without arguments
            Called on all ranks by :meth:`commit`, or when the elastic loop is entered again.
        name : str, optional
            Its name in this state; by default the name of the function.

        Returns
        -------
        callable
            `function`.

        Raises
        ------
        OptionError
            An argument cannot be used, or the elastic loop runs already.

        Examples
        --------
        >>> state = ObjectState(epoch=0)
        >>> done = state.every(2, lambda: print("evaluated"), name="evaluation")
        >>> state.commit()
        >>> state.commit()
        evaluated
        """
        if isinstance(commits, bool) or not isinstance(commits, int) or commits < 1:
            raise OptionError(
                f"every({commits!r}, …): must be a whole number of commits, at least 1"
            )
        if not callable(function):
            raise OptionError(f"every({commits}, {function!r}): must be a function")
        key = name or str(getattr(function, "__qualname__", type(function).__qualname__))
        if self._on_commit:
            raise OptionError(
                f"every({commits}, {key}): call it before the elastic loop, after the state is made"
            )
        if key in self._tasks:
            raise OptionError(
                f"every({commits}, {key}): there is a function of that name; pass another name="
            )
        if not self._tasks:
            self._schedule = {"": 0}
            self._names += ("_schedule",)
        self._schedule[key] = 0
        self._tasks = {**self._tasks, key: (commits, function)}
        self.save()
        return function

    def commit(self) -> None:
        if self._tasks:
            self._schedule[""] += 1
        super().commit()
        self._run_due()

    def _run_due(self) -> None:
        if self._doing:  # a commit in such a function
            return
        self._doing = True
        try:
            for key, (commits, function) in self._tasks.items():
                due = self._schedule[""] // commits
                if self._schedule.get(key, 0) < due:
                    function()
                    self._schedule[key] = due
        finally:
            self._doing = False

    def _values(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._names}

    # -- overridden by other kinds of states -----------------------------------------------------

    def _samplers(self) -> list[ShardSampler]:
        """Return the samplers among the values, in an order that is the same on all ranks."""
        return [value for value in self._values().values() if isinstance(value, ShardSampler)]

    def _pack(self) -> StatePayload:
        """Return all values but samplers, for ranks that are behind."""
        return self._payload_of(self._values(), self._samplers())

    def _payload_of(self, values: dict[str, Any], samplers: Sequence[ShardSampler]) -> StatePayload:
        with naming(values, lambda: samplers, sent=True):
            return StatePayload(dump((values, self._more()), samplers))

    def _more(self) -> tuple[list[str], Sequence[Position]]:
        """Return names of values that are still the first objects, and samplers' positions."""
        first = self._first
        held = [n for n in self._names if n in first and getattr(self, n) is first[n]]
        context = current_or_none()
        return held, () if context is None else samplers_of(context).saved

    def _pack_commit(self) -> StatePayload:
        """Return all values but samplers, as of the last commit."""
        return self._payload_of(self._saved, [sampler for sampler, _ in self._saved_samplers])

    def _unwritable(self) -> list[str]:
        """Return names of values that a checkpoint cannot have."""
        return []

    def _progress_at_commit(self) -> list[SamplerProgress]:
        """Return the progress of the samplers at the last commit."""
        return [snapshot.progress for _, snapshot in self._saved_samplers]

    def _unpack(self, payload: StatePayload) -> None:
        """Take over values that another rank has packed."""
        values, more = load(payload.head, self._samplers())
        check_names("the values", public(self._names), public(values))
        self._take(values, {}, more)

    def _take(self, values: dict[str, Any], owned: dict[int, Any], more: Any) -> None:
        """Take over values of another rank, except values owned by objects."""
        held, positions = more
        samplers_of(current()).go_back(positions)
        known = dict(owned)
        for name in held:
            if name in values:
                values[name] = adopt(getattr(self, name), values[name], known)
        self.__dict__.update(values)

    @staticmethod
    def _as_dict(payload: StatePayload, samplers: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return the values of a packed commit, and the states of its samplers, by name."""
        values, _ = load(payload.head, samplers)
        return dict(values)

    # -- the life of a state ---------------------------------------------------------------------

    def save(self) -> None:
        values, samplers = self._values(), self._samplers()
        memo: dict[int, Any] = {id(each): each for each in samplers}
        with naming(values, lambda: samplers):
            self._saved = copy.deepcopy(values, memo)
        self._memo = memo
        self._saved_samplers = [(each, each.snapshot()) for each in samplers]

    def restore(self) -> None:
        originals = Originals(self._memo)
        memo = {id(each): each for each, _ in self._saved_samplers}
        for name, saved in self._saved.items():
            self.__dict__[name] = originals.restored(saved, memo)
        for sampler, snapshot in self._saved_samplers:
            sampler.go_back(snapshot)

    def sync(self) -> None:
        """Make all ranks equal to rank ``current().source``, and save.

        Ranks agree on the samples that are done. All ranks call this together.
        """
        context = current()
        context.communicator()
        others = [rank for rank in range(context.size) if rank != context.source]
        self._come_together(behind=(), receivers=others, resumed=False)
        self.save()

    def align(self, behind: Sequence[int]) -> None:
        self._come_together(behind=behind, receivers=behind, resumed=True)

    def leave(self) -> None:
        self._come_together(behind=(), receivers=(), resumed=True)

    def _come_together(
        self, *, behind: Sequence[int], receivers: Sequence[int], resumed: bool
    ) -> None:
        """Exchange everything, then take it over."""
        context = current()
        samplers = self._samplers()
        agreed = agree_on_progress([each.progress() for each in samplers], context, behind)
        if receivers:
            members = [context.source, *receivers]
            payload = self._pack() if context.rank == context.source else None
            buffer, context.receive_buffer = context.receive_buffer, None
            payload = spread_everywhere(context.communicator(), members, payload, buffer)
            if payload is not None and context.rank != context.source:
                try:
                    self._unpack(payload)
                except StateMismatch as error:
                    raise StateMismatch(
                        f"the state of rank {context.source} does not fit the one that this rank "
                        f"has built: {error}. All ranks must build the same state"
                    ) from None
        for sampler, progress in zip(samplers, agreed, strict=True):
            sampler.install(progress, context.rank, context.size, resumed=resumed)
        self._aligned = True


@contextlib.contextmanager
def naming(
    values: Mapping[str, Any], kept: Callable[[], Sequence[object]], *, sent: bool = False
) -> Iterator[None]:
    """Name in an error the part of the values that cannot be copied, or sent, by itself.

    `kept` returns objects that are neither copied nor sent with them.
    """
    try:
        yield
    except NbelasticError:
        raise
    except Exception as error:  # copying and pickling run code of any class
        things = kept()

        def use(each: object) -> None:
            if sent:
                dump(each, things)
            else:
                copy.deepcopy(each, {id(thing): thing for thing in things})

        where, part = failing_part(dict(values), use)
        if not where:
            raise
        place = where.removeprefix("['").replace("']", "", 1)
        done = "sent to other ranks or to a checkpoint" if sent else "copied at each commit"
        raise NbelasticError(
            f"state.{place} (a {type(part).__name__}) cannot be {done}: "
            f"{str(error).partition('. ')[0].rstrip('.')}. Values of a state must be such that "
            "they can be copied and pickled: keep this one outside the state, and make it anew "
            "on each rank"
        ) from error


def check_names(
    what: str, expected: Iterable[str], came: Iterable[str], *, in_order: bool = False
) -> None:
    """Raise :class:`~nbelastic.errors.StateMismatch` unless the names are the same."""
    expected, came = list(expected), list(came)
    if (expected != came) if in_order else (sorted(expected) != sorted(came)):
        raise StateMismatch(
            f"expected {what} {', '.join(expected) or 'none'}; came {', '.join(came) or 'none'}"
        )


def public(names: Iterable[str]) -> list[str]:
    """Return the public names of a state's values; private values may be added later."""
    return [name for name in names if not name.startswith("_")]


def _count(state: State, name: str) -> int:
    value = getattr(state, name, 0)
    return value if isinstance(value, int) else 0
