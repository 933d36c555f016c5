"""From gradients of this rank to those of all: what happens between ``backward`` and ``step``.

A *round* is one such passage. It begins with the first gradient (or with
:meth:`Reducer.synchronize`, on a rank that has computed none), and ends when
:meth:`Reducer.synchronize` has the reduced gradients. While backward runs, gradients are put into
their buckets soon after they have arrived. A bucket is launched when all of it has arrived and all
buckets before it have been; :meth:`Reducer.synchronize` launches the rest, and all of them where
nothing goes on beside a rank's own computing (``Communicator.overlaps``). So all ranks launch the
same buckets in the same order, whichever parameters they have used. Where nothing goes on beside
that of rank 0, and one operation can reduce many tensors, all ranks reduce all buckets by one.

Where gradients are
-------------------
Most are reduced where backward has left them (see :mod:`nbelastic.torch.bucket_plan`). Another is
copied to its bucket, at most once: from then on it *is* its part of it (``parameter.grad`` refers
to it), and the next backward finds it there if nobody has set it to None. So between ``backward``
and ``synchronize`` a gradient has no value to rely on, and one that the user keeps beyond ``step``
may change with the next, as under DDP with ``gradient_as_bucket_view``. Where gradients travel as
another type, or a parameter is not contiguous, they are copied to the bucket and back. The bucket
of a GPU's parameters is on the GPU, and has a place on the host in which it is reduced (see
:mod:`nbelastic.torch.staging`).

What all ranks must share
-------------------------
Buckets are laid out for a generation. In its first round (before it, where buckets are launched
while backward runs; else when it has ended, so that nobody waits for a newcomer's first batch
instead of computing) rank 0 tells the others what it trains, so that a rank with another model
finds out instead of hanging, and in which order it has seen gradients arrive, if it has. If not,
the first round uses the reverse order of the parameters and the second the order that rank 0 has
then seen. After that nothing is exchanged but gradients.

When something fails
--------------------
Buffers under way are given away (see :mod:`nbelastic.collectives.communicator`): they are dropped,
with the gradients in them, and the next round has new ones. All other gradients are dropped as
well, since some may have been reduced and others not. A failed launch raises in the hook, so out of
``backward()``: the rest of it would be for nothing, and Python's exceptions pass through autograd
unchanged. The other ranks still wait for the buckets of a round that was left half-way, so its
generation counts as failed here: each further round in it raises
:class:`~nbelastic.errors.CollectiveError`. A round begun in an earlier generation is dropped when
the next one begins.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any

import torch

from nbelastic.elastic.context import current
from nbelastic.errors import CollectiveError, NotInitialized
from nbelastic.torch.identity import same
from nbelastic.torch.layout_keeper import LayoutKeeper
from nbelastic.torch.round import Round
from nbelastic.torch.staging import Streams

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nbelastic.collectives import Communicator
    from nbelastic.elastic.context import Context
    from nbelastic.torch.layout import Layout, ReduceOptions

__all__ = ["Reducer"]


class Reducer:
    """Reduces the gradients of one optimizer, over whatever ranks there are.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
        Its parameter groups say what to reduce: what is in them, and requires gradients, when a
        round begins. Parameters may be added, frozen and unfrozen between steps, on all ranks in
        the same step.
    names : mapping of int to str
        Names of parameters by their ids, for messages.
    options : ReduceOptions
        How.

    Attributes
    ----------
    synchronized : bool
        Whether the optimizer's gradients are the reduced ones.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, names: Mapping[int, str], options: ReduceOptions
    ) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._names = names
        self._options = options
        self._context = current()
        self._keeper = LayoutKeeper(options, names)
        self._round: Round | None = None
        self._failed: int | None = None
        self._arrived: deque[torch.Tensor] = deque()
        self._streams = Streams()
        self._hooks: dict[int, tuple[torch.Tensor, Any, bool]] = {}
        self._hooked: tuple[list[torch.Tensor], set[int]] = ([], set())
        self._yielded: set[int] = set()
        # Backward may run in several threads where parameters are on several devices.
        self._lock = threading.Lock()
        self.synchronized = False
        _take_over(self, self._trained())

    @property
    def pending(self) -> bool:
        """Whether gradients have arrived that are not reduced yet."""
        if self._arrived:
            return True
        round_ = self._round
        return round_ is not None and bool(round_.arrived) and not self._is_stale(round_)

    def on_gradient(self, parameter: torch.Tensor) -> None:
        """Take in that backward has accumulated into ``parameter.grad``, and all before it."""
        self._arrived.append(parameter)
        with self._lock:
            try:
                self._take_in()
            except BaseException:
                self._fail()
                raise

    def _take_in(self) -> None:
        round_ = self._present_round()
        round_.communicator.check()  # the rest of backward would be for nothing
        self.synchronized = False
        arrived = self._arrived
        round_.arrive([arrived.popleft() for _ in range(len(arrived))])

    @torch.no_grad()
    def synchronize(self) -> None:
        """Launch what has not been launched, wait, and write the reduced gradients.

        Raises
        ------
        CollectiveError
            A peer is gone, or the generation is over. The gradients are gone.
        RuntimeError
            Gradients or parameters are not those that backward has left.
        """
        with self._lock:
            try:
                if self._arrived:
                    self._take_in()
                round_ = self._present_round()
                round_.check_untouched(self._trained())
                if round_.unmet:
                    round_.meet(self._ready_layout(round_.communicator, round_.parameters))
                round_.finish()
            except BaseException:
                self._fail()
                raise
            self._keeper.observe(round_.arrived)
            self._hook(round_.parameters)
            self._round = None
            self.synchronized = True

    def forget(self) -> None:
        """Begin anew because the user sets the gradients to zero.

        Raises
        ------
        RuntimeError
            Gradients are being reduced: other ranks count on them.
        """
        if self.pending:
            raise RuntimeError(
                "optimizer.zero_grad() was called after backward() but before step() or "
                "synchronize(), while gradients were being reduced; move it before backward() or "
                "after step()"
            )
        with self._lock:
            self._abandon()

    def set_passes(self, passes: int) -> None:
        """Expect another number of backward passes per step, from the next round on.

        Raises
        ------
        RuntimeError
            A round is under way.
        """
        if self._round is not None:
            raise RuntimeError(
                "backward_passes_per_step can only change between step() and backward()"
            )
        self._options = dataclasses.replace(self._options, passes=passes)

    def reset(self) -> None:
        """Drop the round under way and all gradients: the state is being restored.

        Nothing is exchanged, and nothing that this rank has agreed on with others is forgotten, so
        it may be called on some ranks only.
        """
        with self._lock:
            self._fail()

    # -- rounds ----------------------------------------------------------------------------------

    def _present_round(self) -> Round:
        round_ = self._round
        if round_ is not None and not self._is_stale(round_):
            return round_
        self._abandon()
        context = self._find_context()
        communicator = context.communicator()
        parameters = self._trained()
        self._hook(parameters)
        layout, unmet = None, False
        if communicator.size == 1:
            self._keeper.release()
        elif communicator.overlaps or self._keeper.generation == communicator.generation:
            layout = self._ready_layout(communicator, parameters)
        else:
            unmet = True
        self._round = Round(
            context,
            communicator,
            parameters,
            layout,
            self._options,
            self._names,
            self._streams,
            unmet=unmet,
        )
        return self._round

    def _ready_layout(self, communicator: Communicator, parameters: list[torch.Tensor]) -> Layout:
        if communicator.generation == self._failed:
            raise CollectiveError(
                f"a step of generation {self._failed} was left half-way on this rank"
            )
        self._failed = communicator.generation  # unless the exchange goes well
        layout = self._keeper.arrange(communicator, parameters)
        self._failed = None
        layout.begin(communicator, self._options)
        return layout

    def _is_stale(self, round_: Round) -> bool:
        """Return whether the rank is in another generation, or another context, by now."""
        return self._find_context().generation != round_.generation

    def _abandon(self) -> None:
        """Drop the round; where others wait for its buckets, be of no use to its generation."""
        round_, self._round = self._round, None
        self.synchronized = False
        if round_ is not None and round_.awaited:
            round_.discard()
            self._keeper.drop()
            self._failed = round_.communicator.generation

    def _fail(self) -> None:
        """Drop the round and all gradients, of which some may have been reduced, others not."""
        self._abandon()
        self._arrived.clear()
        for parameter in self._trained():
            parameter.grad = None

    # -- surroundings ----------------------------------------------------------------------------

    def _find_context(self) -> Context:
        """Return the rank's context, also in a thread of autograd's own."""
        try:
            return current()
        except NotInitialized:
            return self._context

    def _trained(self) -> list[torch.Tensor]:
        optimizer = self._optimizer()
        groups = [] if optimizer is None else optimizer.param_groups
        return [p for group in groups for p in group["params"] if p.requires_grad]

    def _hook(self, parameters: list[torch.Tensor]) -> None:
        """Have autograd call back for `parameters` and no others, as long as this object lives.

        Once it is known in which order gradients arrive, it need not be for each: most are only
        noted, without Python's interpreter, until one that is worth it.
        """
        quiet = self._keeper.quiet()
        known, as_quiet = self._hooked
        if quiet is as_quiet and same(known, parameters):
            return
        self._hooked = parameters, quiet
        keys = {id(parameter) for parameter in parameters}
        for key in self._hooks.keys() - keys:
            self._hooks.pop(key)[1].remove()
        for parameter in parameters:
            key = id(parameter)
            if key in self._yielded:
                continue
            hooked = self._hooks.get(key)
            if hooked is not None and hooked[2] == (key in quiet):
                continue
            if hooked is not None:
                hooked[1].remove()
            hook: Any = functools.partial(_on_gradient, weakref.ref(self))
            if key in quiet:
                hook = self._arrived.append
            register: Any = parameter.register_post_accumulate_grad_hook
            handle = register(self._streams.noting(parameter, hook))
            self._hooks[key] = (parameter, handle, key in quiet)

    def _yield(self, keys: set[int]) -> None:
        """Leave the gradients of some parameters to a newer optimizer while backward runs."""
        for key in [key for key in keys if key in self._hooks]:
            self._hooks.pop(key)[1].remove()
            self._yielded.add(key)


def _take_over(reducer: Reducer, parameters: list[torch.Tensor]) -> None:
    """Hook `parameters` for `reducer` alone.

    An optimizer that was replaced may live on, in a scheduler or a notebook's history, and must not
    take part in backward any more. Should it be stepped all the same, it reduces then.
    """
    keys = {id(parameter) for parameter in parameters}
    with _alive_lock:
        for other in _alive:
            other._yield(keys)
        _alive.add(reducer)
    reducer._hook(parameters)


_alive: weakref.WeakSet[Reducer] = weakref.WeakSet()
_alive_lock = threading.Lock()


def _on_gradient(reducer: weakref.ref[Reducer], parameter: torch.Tensor) -> None:
    alive = reducer()
    if alive is not None:
        alive.on_gradient(parameter)
