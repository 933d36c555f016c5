"""Commits without copies of the tensors that optimizers change.

Until its next step, the tensors of an optimizer hold what was committed after the step before. So a
commit right after a step needs no copies, if the next step is committed at once, too: with no
operation between ranks in between, nothing can fail there. After a few such commits in a row it is
assumed to go on, until the first time that it does not: then the state at the end of the last step
*replaces* the commit, and all further commits are copied.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from nbelastic.elastic.ranks.context import Context
from nbelastic.elastic.training_checks import sample
from nbelastic.torch.gradients.arrived import same
from nbelastic.torch.rates import WhileAlive
from nbelastic.torch.state.adapters import wrapped_in
from nbelastic.torch.state.commit import Commit
from nbelastic.torch.state.optimizer_adapter import hooks_see_steps

# Regular commits in a row after which commits are not copied any more.
# A commit is *regular* if it follows steps of the optimizers, before which only they had changed
# the tensors, with no operation between ranks since the steps.
LEARNED = 3

# Bytes of optimizers' tensors above which one regular commit is enough.
# Smaller states are copied until the third, because a function that commits after its first step
# and then rarely looks regular at first. Copies of a large one would make the peak of memory.
LARGE = 1 << 28

# Commits after which values are compared before the next step: the first ones, and a few more.
SAMPLED_UNTIL, SAMPLED_AT = 4, (10, 100, 1000)

_address_of = torch.Tensor.data_ptr
_version_of = operator.attrgetter("_version")

# For each tensor the address of its data, and how often it was changed in place.
Marks = tuple[list[int], list[int]]


class LazyCommit:
    """Decision, commit by commit, whether to copy the tensors that optimizers change.

    A commit is *copied*; or *uncopied*, while the tensors hold its values; or *overwritten*, once a
    step that is not committed has changed them. When an operation begins while it is overwritten,
    or uncopied tensors have been changed otherwise, its values are gone. Then the state at the end
    of the last step, which is the same on all ranks, is copied before the operation and replaces
    it. A rank that restores that is ahead (``Context.ahead``) of a rank that restores the commit.

    Changes through ``tensor.data`` leave no mark. So some values are compared before a few steps
    with what they were at the commit. All commits are copied where they differ, where an
    optimizer's methods may make such changes, and where hooks do not see its steps.

    `on_step` is called after a step that leaves a commit overwritten, `on_break` when an uncopied
    commit is lost, with whether the tensors are as the last step has left them.
    """

    def __init__(self, on_step: Callable[[], None], on_break: Callable[[bool], None]) -> None:
        # The last commit has no copies of the optimizers' tensors; false once there are some.
        self.uncopied = False
        self.stepped = False  # since the last commit
        self.tensors: frozenset[int] = frozenset()  # ids
        self._on_step = on_step
        self._on_break = on_break
        self._regular = True  # so far
        self._in_a_row = 0
        self._needed = LEARNED
        self._broken = False  # some commit was not what it was trusted to be
        self._context: Context | None = None
        self._exchanges = self._generation = 0
        self._objects: Sequence[object] = ()
        self._parts: Sequence[object] = ()  # the optimizers among them
        self._sees_steps = False  # of all optimizers
        self._optimizers: list[torch.optim.Optimizer] = []
        self._tensors: list[torch.Tensor] = []
        self._marks: Marks = ([], [])
        self._commits = 0
        self._values: str | None = None  # some of the parameters', at the last commit
        self._watcher = WhileAlive(self.settle)  # the context outlives the state
        self._hooked: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()

    @property
    def trusted(self) -> bool:
        """Whether commits need no copies."""
        return self._in_a_row >= self._needed and not self._broken

    def trust(self) -> None:
        """Take the word of a rank whose commits need no copies."""
        self._in_a_row = LEARNED

    def commit(self, new: Commit, context: Context | None, *, copy: bool) -> frozenset[int]:
        """Decide on a new commit; return the tensors not to copy."""
        generation = 0 if context is None else context.generation
        unchanged = self._is_unchanged()
        if generation == self._generation:
            self._count(unchanged)
        # Else tensors have changed, and much was sent, for reasons of the membership.
        self.stepped = False
        self._context, self._generation = context, generation
        if context is not None and self._watcher not in context.before_exchange:
            context.before_exchange += (self._watcher,)
        objects = new.objects
        parts = [part for part in new.parts if isinstance(part.obj, torch.optim.Optimizer)]
        if not (same(objects, self._objects) and same(parts, self._parts)):
            optimizers = [part.obj for part in parts]
            tensors = _tensors_of(optimizers)
            self._objects, self._parts = objects, parts
            self._optimizers, self._tensors = optimizers, tensors
            unchanged = False
            for optimizer in optimizers:
                self._hook(optimizer)
            self._sees_steps = all(map(hooks_see_steps, optimizers)) and not any(
                wrapped_in(each) for each in objects if each not in optimizers
            )
            self.tensors = frozenset(map(id, tensors))
            self._needed = 1 if sum(each.nbytes for each in tensors) >= LARGE else LEARNED
        if not unchanged:
            self._marks = _marks_of(self._tensors)
        self._commits += 1
        looks = self._commits <= SAMPLED_UNTIL or self._commits in SAMPLED_AT
        self._values = self._look() if looks and not self._broken else None
        self.uncopied = self.trusted and self._sees_steps and context is not None and not copy
        return self.tensors if self.uncopied else frozenset()

    def settle(self) -> None:
        """Replace an uncopied commit, if its values are gone."""
        if not self.uncopied:
            return
        unchanged = self._is_unchanged()
        if self.stepped or not unchanged:
            self._regular = False
            self._on_break(unchanged)

    def restored(self) -> None:
        """Record that the state equals the last commit."""
        self._values = None
        self.stepped = False
        self._marks = _marks_of(self._tensors)

    # -- what happens between commits ------------------------------------------------------------

    def _count(self, unchanged: bool) -> None:
        """Count a regular commit in a row, if a step came before; a disturbance ends the row."""
        operations = self._context is not None and self._context.exchanges != self._exchanges
        if not self._regular or not unchanged or (self.stepped and operations):
            self._broken = self._broken or self.trusted
            self._in_a_row = 0
        elif self.stepped:
            self._in_a_row += 1
        self._regular = True

    def _before_step(self) -> None:
        if self._is_unchanged():
            before, self._values = self._values, None  # once: the step changes them
            if before is None or before == self._look():
                return
            self._broken = True
        self._regular = False
        if self.uncopied:
            self._on_break(False)

    def _after_step(self) -> None:
        self._marks = _marks_of(self._tensors)
        if not self.stepped:  # several optimizers may step before a commit
            self.stepped = True
            self._exchanges = 0 if self._context is None else self._context.exchanges
        if self.uncopied:
            self._on_step()

    def _is_unchanged(self) -> bool:
        """Return whether only optimizers have changed the tensors since the last commit."""
        return _marks_of(self._tensors) == self._marks

    def _look(self) -> str:
        return repr(sample(self._optimizers))  # as text, a value that is no number equals itself

    def _hook(self, optimizer: torch.optim.Optimizer) -> None:
        if optimizer not in self._hooked and hooks_see_steps(optimizer):
            self._hooked.add(optimizer)
            before = optimizer.register_step_pre_hook(WhileAlive(self._before_step))
            # First, as other hooks change what a commit has, such as rates.
            hooks: Any = optimizer._optimizer_step_pre_hooks
            hooks.move_to_end(before.id, last=False)
            optimizer.register_step_post_hook(WhileAlive(self._after_step))


def _tensors_of(optimizers: Sequence[torch.optim.Optimizer]) -> list[torch.Tensor]:
    """Return the tensors that optimizers change, each once."""
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
