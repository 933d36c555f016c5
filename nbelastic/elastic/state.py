"""State: what training can be rolled back to, and what a newcomer receives.

The life of a state inside :func:`nbelastic.elastic.run`:

=======================  ==========================================================================
``commit()``             ``save()``, count the version, then ``check_host_updates()``
a peer fails             ``restore()``: exactly the last commit
ranks leave or join      ``leave()`` on all members while the old generation still works, then
                         ``save()``: one consistent cut, whatever was committed before
a generation has formed  ``on_reset()`` on ranks whose rank or size is not what they were told
                         before, then ``align(behind)``, then ``save()``
=======================  ==========================================================================
"""

from __future__ import annotations

import copy
import pickle
from typing import TYPE_CHECKING, Any

from nbelastic.elastic.context import current
from nbelastic.elastic.parcel import Parcel
from nbelastic.elastic.transfer import spread
from nbelastic.errors import OptionError, StateMismatch
from nbelastic.pickling import dumps

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from nbelastic.elastic.checkpoint import Checkpoints
    from nbelastic.elastic.sampler import SamplerSnapshot, ShardSampler
    from nbelastic.elastic.shards import Deal

__all__ = ["ObjectState", "State"]


class State:
    """Base of all states; Horovod's class of the same name.

    A state of your own overrides :meth:`save`, :meth:`restore` and :meth:`sync`; its ``sync``
    broadcasts from rank ``nbelastic.elastic.sync_root()``.
    """

    _checkpoints: Checkpoints | None = None  # while the elastic loop runs, if the job has any

    def __init__(self) -> None:
        self._reset_callbacks: list[Callable[[], None]] = []

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], None]]) -> None:
        """Add functions to call after a change of membership, before the state is synchronised.

        Parameters
        ----------
        callbacks : iterable of callables without arguments
            Called in the order of registration, on every rank that was a member before.
        """
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Run :meth:`reset` and the reset callbacks. Called by the elastic loop."""
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def commit(self) -> None:
        """Save the state, so that training can be rolled back to here, and check for changes.

        Raises
        ------
        HostsUpdatedInterrupt
            Ranks are about to join or leave; :func:`nbelastic.elastic.run` catches it.
        """
        self.save()
        current().committed()
        if self._checkpoints is not None:
            self._checkpoints.committed()
        self.check_host_updates()

    def set_total(self, *, epoch: int, batch: int = 0) -> None:
        """Declare how far training goes, so that progress and remaining time can be shown.

        Parameters
        ----------
        epoch : int
            Epochs in all; ``state.epoch`` is the one under way, counted from 0.
        batch : int, optional
            Batches in an epoch; ``state.batch`` is the last one done, counted from 0.

        Examples
        --------
        >>> state.set_total(epoch=10, batch=len(loader))  # doctest: +SKIP
        """
        for name, value in (("epoch", epoch), ("batch", batch)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise OptionError(
                    f"set_total({name}={value!r}): must be a whole number, at least 0"
                )
        current().vitals.total = (epoch, batch)

    def check_host_updates(self) -> None:
        """Check whether ranks are about to join or leave, without saving.

        Raises
        ------
        HostsUpdatedInterrupt
            As for :meth:`commit`.
        """
        context = current()
        context.vitals.checked()
        context.vitals.place = (_count(self, "epoch"), _count(self, "batch"))
        context.check_membership()

    def prepare_to_join(self) -> Sequence[tuple[int, int]]:
        """Do what costs time only once, before others wait for it. Called on newcomers.

        Returns
        -------
        sequence of (int, int)
            Addresses and sizes of memory that it took, and gave back, and that the first step takes
            again.
        """
        return ()

    def align(self, behind: Sequence[int]) -> None:
        """Bring all members of a new generation to the same state. Called by the elastic loop.

        Parameters
        ----------
        behind : sequence of int
            Ranks that have not got the newest committed version (in a first generation: all but
            the source), the same on all ranks. Empty after most faults: then nothing but what
            ranks did apart (samples seen) needs to be exchanged.
        """
        del behind
        self.sync()

    def leave(self) -> None:
        """Exchange what must not go with those who leave. Called in the old generation."""

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
        Initial values; later ones are assigned to the attributes. They must be picklable, and
        copying them at each commit should be cheap. Attributes that are not named here are neither
        saved nor synchronised.

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
        for name in values:
            if name.startswith("_") or hasattr(type(self), name):
                raise OptionError(f"a state cannot have a value named {name!r}: choose another")
        self._names = tuple(values)
        self.__dict__.update(values)
        self.save()

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    _aligned = False  # with the other ranks, once at least

    # -- what kinds of states do differently -----------------------------------------------------

    def _samplers(self) -> list[ShardSampler]:
        """Return the samplers among the values, in an order that is the same on all ranks."""
        from nbelastic.elastic.sampler import ShardSampler

        values = (getattr(self, name) for name in self._names)
        return [value for value in values if isinstance(value, ShardSampler)]

    def _pack(self) -> Parcel:
        """Return all values but samplers for those who are behind."""
        return _parcel_of({name: getattr(self, name) for name in self._names}, self._samplers())

    def _pack_commit(self) -> Parcel:
        """Return what :meth:`_pack` did at the last commit."""
        return _parcel_of(self._saved, [sampler for sampler, _ in self._saved_samplers])

    def _samplers_at_commit(self) -> list[tuple[ShardSampler, SamplerSnapshot]]:
        """Return the samplers, and what they were at the last commit."""
        return self._saved_samplers

    def _unpack(self, parcel: Parcel) -> None:
        """Take over what another rank has packed.

        Raises
        ------
        StateMismatch
            It does not fit this state, which has not changed.
        """
        values = pickle.loads(parcel.head)
        samplers = self._samplers()
        mine = [n for n in self._names if not any(getattr(self, n) is each for each in samplers)]
        check_names("the values", mine, values)
        self.__dict__.update(values)

    # -- the life of a state ---------------------------------------------------------------------

    def save(self) -> None:
        """Keep copies of the present values as the last commit."""
        values = {name: getattr(self, name) for name in self._names}
        samplers = self._samplers()
        self._saved = copy.deepcopy(values, {id(each): each for each in samplers})
        self._saved_samplers = [(each, each.snapshot()) for each in samplers]

    def restore(self) -> None:
        """Go back to exactly the last commit."""
        memo = {id(each): each for each, _ in self._saved_samplers}
        self.__dict__.update(copy.deepcopy(self._saved, memo))
        for sampler, snapshot in self._saved_samplers:
            sampler.go_back(snapshot)

    def sync(self) -> None:
        """Make all ranks equal to rank ``current().source``, and save.

        What ranks did apart (samples they recorded) is added up. All ranks call it at once.
        """
        context = current()
        context.communicator()
        others = [rank for rank in range(context.size) if rank != context.source]
        self._come_together(unsettled=(), receivers=others, resumed=False)
        self.save()

    def align(self, behind: Sequence[int]) -> None:
        """Bring all members of a new generation to the same state; see :meth:`State.align`.

        Raises
        ------
        CollectiveError
            A peer is gone. This rank's values have not changed.
        """
        self._come_together(unsettled=behind, receivers=behind, resumed=True)

    def leave(self) -> None:
        """Add up what the ranks did apart, so that nobody who leaves takes it along."""
        self._come_together(unsettled=(), receivers=(), resumed=True)

    def _come_together(
        self, *, unsettled: Sequence[int], receivers: Sequence[int], resumed: bool
    ) -> None:
        """Exchange everything first, then take it over."""
        context = current()
        samplers = self._samplers()
        deals: Sequence[Deal] = ()
        if samplers:
            from nbelastic.elastic.settlement import settle_together

            deals = settle_together(samplers, context, unsettled)
        if context.rank in receivers or (receivers and context.rank == context.source):
            members = [context.source, *receivers]
            parcel = self._pack() if context.rank == context.source else None
            parcel = spread(context.communicator(), members, parcel, context.take_room())
            if context.rank != context.source:
                self._take_over(parcel, context.source)
        for sampler, deal in zip(samplers, deals, strict=True):
            sampler.install(deal, context.rank, resumed=resumed)
        self._aligned = True

    def _take_over(self, parcel: Parcel, source: int) -> None:
        try:
            self._unpack(parcel)
        except StateMismatch as error:
            raise StateMismatch(
                f"the state of rank {source} does not fit the one that this rank has built: "
                f"{error}. All ranks must build the same state"
            ) from None


def check_names(
    what: str, expected: Iterable[str], came: Iterable[str], *, in_order: bool = False
) -> None:
    """Raise :class:`~nbelastic.errors.StateMismatch` unless the names are the same."""
    expected, came = list(expected), list(came)
    if (expected != came) if in_order else (sorted(expected) != sorted(came)):
        raise StateMismatch(
            f"expected {what} {', '.join(expected) or 'none'}; came {', '.join(came) or 'none'}"
        )


def _parcel_of(values: dict[str, Any], samplers: Sequence[ShardSampler]) -> Parcel:
    kept = {k: v for k, v in values.items() if not any(v is each for each in samplers)}
    return Parcel(dumps(kept))


def _count(state: State, name: str) -> int:
    value = getattr(state, name, 0)
    return value if isinstance(value, int) else 0
