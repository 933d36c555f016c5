"""Commits without copies: tensors that optimizers change, left where they are.

Between an optimizer's step and the commit after it nothing can fail, as long as no operation over
all ranks runs there; and until its next step what was committed *is* what the tensors hold. Where a
training function commits after each step, nothing needs to be copied, then. A :class:`Deferral`
learns whether it does, a commit at a time:

=========  =========================================================================================
copied     The commit has copies. So it begins, and so it goes on until :data:`LEARNED` commits in a
           row were *regular*: after the optimizers' steps, before which nobody else had changed the
           tensors, with no operation in between.
held       The tensors hold the commit's values: no optimizer has stepped since.
in flux    They hold the values of a step that has not been committed yet. What else belongs to the
           state was noted when the step was done (a *boundary*).
=========  =========================================================================================

Where the rhythm breaks (an operation begins in flux; somebody else has changed a tensor that is
held), the values of the commit are gone. What is there instead is as whole: the state at the end of
a step, the same on all ranks. It is copied before the operation begins, and *stands in* for the
commit: a rank that restores it is ahead of one that restores the commit
(:meth:`~nbelastic.elastic.context.Context.stood_in`). The next regular commits count less: it takes
four times as many to trust the rhythm again.

A rank that receives its state from one that knows the rhythm trusts it from the first commit on.

What is not noticed: values changed through ``tensor.data`` by others than optimizers, once the
rhythm is trusted. Then the tensors are restored as they are.
"""

from __future__ import annotations

import operator
import weakref
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from nbelastic.elastic.context import Context
    from nbelastic.torch.outline import Outlined

__all__ = ["LEARNED", "Deferral", "Rhythm"]

LEARNED = 3
"""Regular commits in a row after which commits are not copied any more."""

SLOWER = 4
"""How many times more it takes after the rhythm was broken."""


class Rhythm:
    """How commits have followed steps. Pure: told of what happens, it says what to expect.

    Attributes
    ----------
    stepped : bool
        Whether an optimizer has stepped since the last commit.
    """

    def __init__(self) -> None:
        self.stepped = False
        self._regular = True
        self._in_a_row = 0
        self._needed = LEARNED

    @property
    def known(self) -> bool:
        """Whether the next step will be committed before anything can fail."""
        return self._in_a_row >= self._needed

    def trust(self) -> None:
        """Take the word of another rank, which knows it, that steps are followed by commits."""
        self._in_a_row = max(self._in_a_row, self._needed)

    def step(self) -> None:
        """Note the step of an optimizer."""
        self.stepped = True

    def disturb(self) -> None:
        """Note an operation after a step, or a change that no optimizer has made."""
        self._regular = False

    def commit(self) -> None:
        """Note a commit. One without a step before it says nothing, unless it was disturbed."""
        if not self._regular:
            if self.known:
                self._needed *= SLOWER
            self._in_a_row = 0
        elif self.stepped:
            self._in_a_row += 1
        self.stepped, self._regular = False, True


_address_of = torch.Tensor.data_ptr
_version_of = operator.attrgetter("_version")

Marks = tuple[list[int], list[int]]
"""For each tensor where its data is; and how often it was changed in place."""


class Deferral:
    """What a state knows of its optimizers' steps.

    Parameters
    ----------
    stepped : callable
        Called after a step that nothing has been copied before.
    broken : callable
        Called with whether the tensors are as that step has left them, when the rhythm breaks.

    Attributes
    ----------
    held : bool
        Whether the last commit has no copies of the optimizers' tensors.
    tensors : frozenset of int
        The ids of the tensors that optimizers change; the same object as long as they are the same.
    """

    def __init__(self, stepped: Callable[[], None], broken: Callable[[bool], None]) -> None:
        self.rhythm = Rhythm()
        self.held = False
        self.tensors: frozenset[int] = frozenset()
        self._on_step = stepped
        self._on_break = broken
        self._context: Context | None = None
        self._exchanges = self._generation = 0
        self._outlined: Outlined | None = None
        self._tensors: list[torch.Tensor] = []
        self._marks: Marks = ([], [])
        self._watcher = _Hook(weakref.ref(self), "_before_exchange")
        self._hooked: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()

    @property
    def in_flux(self) -> bool:
        """Whether what is held is a step newer than the last commit."""
        return self.held and self.rhythm.stepped

    @property
    def untouched(self) -> bool:
        """Whether the tensors are as the last commit, or the step since, has left them."""
        return _marks_of(self._tensors) == self._marks

    def commit(self, outlined: Outlined, context: Context | None, *, copy: bool) -> frozenset[int]:
        """Take in that there is a commit; return the ids of the tensors not to copy.

        Parameters
        ----------
        outlined : Outlined
            All models, optimizers and so on of the state.
        context : Context or None
            Of this rank, which says when operations begin; None if there is none yet.
        copy : bool
            Whether to copy in any case.
        """
        generation = 0 if context is None else context.generation
        untouched = self.untouched
        if generation == self._generation:
            self._observe(untouched)
            self.rhythm.commit()
        else:  # tensors have changed, and much was sent, for reasons of the membership
            self.rhythm.stepped = False
        if context is not self._context:
            self._rest()
        self._context, self._generation = context, generation
        if outlined is not self._outlined or not outlined.whole:
            self._outlined, untouched = outlined, False
            optimizers = [e for e in outlined.things if isinstance(e, torch.optim.Optimizer)]
            for optimizer in optimizers:
                self._hook(optimizer)
            self._tensors = _tensors_of(optimizers)
            self.tensors = frozenset(map(id, self._tensors))
        if not untouched:
            self._marks = _marks_of(self._tensors)
        self.held = self.rhythm.known and context is not None and not copy
        if not self.held:
            self._rest()
            return frozenset()
        self._watch()
        return self.tensors

    def copied(self) -> None:
        """Take in that the last commit has copies now."""
        self._rest()
        self.held = False

    def restored(self) -> None:
        """Take in that all is as at the last commit."""
        self.rhythm.stepped = False
        self._marks = _marks_of(self._tensors)
        if self.held:
            self._watch()

    # -- what happens between commits ------------------------------------------------------------

    def _observe(self, untouched: bool) -> None:
        """Look back at the end of the time between two commits."""
        operations = self._context is not None and self._context.exchanges != self._exchanges
        if not untouched or (self.rhythm.stepped and operations):
            self.rhythm.disturb()

    def _before_step(self) -> None:
        if self.untouched:
            return
        self.rhythm.disturb()
        if self.held:
            self._on_break(False)

    def _after_step(self) -> None:
        self._marks = _marks_of(self._tensors)
        if not self.rhythm.stepped:
            self.rhythm.step()
            self._exchanges = 0 if self._context is None else self._context.exchanges
        if self.held:
            self._on_step()
            self._watch()

    def _before_exchange(self) -> None:
        untouched = self.untouched
        if self.rhythm.stepped or not untouched:
            self.rhythm.disturb()
            self._on_break(untouched)

    def _watch(self) -> None:
        context, watcher = self._context, self._watcher
        if context is not None and watcher not in context.before_exchange:
            context.before_exchange += (watcher,)

    def _rest(self) -> None:
        context, watcher = self._context, self._watcher
        if context is not None and watcher in context.before_exchange:
            context.before_exchange = tuple(w for w in context.before_exchange if w is not watcher)

    def _hook(self, optimizer: torch.optim.Optimizer) -> None:
        if optimizer not in self._hooked:
            self._hooked.add(optimizer)
            deferral = weakref.ref(self)
            optimizer.register_step_pre_hook(_Hook(deferral, "_before_step"))
            optimizer.register_step_post_hook(_Hook(deferral, "_after_step"))


class _Hook:
    """Tells a deferral something, as long as its state lives; a copied optimizer tells nothing."""

    def __init__(self, deferral: weakref.ref[Deferral] | None, method: str) -> None:
        self._deferral = deferral
        self._method = method

    def __call__(self, *_: object) -> None:
        deferral = None if self._deferral is None else self._deferral()
        if deferral is not None:
            getattr(deferral, self._method)()

    def __reduce__(self) -> tuple[Any, ...]:
        return _Hook, (None, self._method)


def _tensors_of(optimizers: Sequence[torch.optim.Optimizer]) -> list[torch.Tensor]:
    """Return what the optimizers change, each tensor once."""
    found: dict[int, torch.Tensor] = {}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            found.update((id(parameter), parameter) for parameter in group["params"])
        for values in optimizer.state.values():
            for value in values.values():
                if isinstance(value, torch.Tensor):
                    found[id(value)] = value
    return list(found.values())


def _marks_of(tensors: Sequence[torch.Tensor]) -> Marks:
    return [*map(_address_of, tensors)], [*map(_version_of, tensors)]
