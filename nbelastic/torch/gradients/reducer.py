"""Hooks and steps that collect and reduce an optimizer's gradients.

A :class:`~nbelastic.torch.gradients.step.GradientStep` begins with the first gradient
(or with :meth:`Reducer.synchronize`, on a rank that has computed none), and ends when
:meth:`Reducer.synchronize` has the reduced gradients. All ranks reduce the same groups in the same
order, whichever parameters they have used. See ``docs/design/gradients.md``.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping
from typing import Any

import torch

from nbelastic.collectives import Op
from nbelastic.elastic.ranks.context import Context, current, current_or_none
from nbelastic.elastic.ranks.step_share import StepShare
from nbelastic.torch.gradients.layout import Layout
from nbelastic.torch.gradients.micro_batches import MicroBatchReduction
from nbelastic.torch.gradients.options import ReduceOptions
from nbelastic.torch.gradients.step import (
    GradientStep,
    ReductionStep,
    gather_sparse,
    reduce_apart,
)
from nbelastic.torch.ops.coordination.joined_rank import SERVICES, at_end
from nbelastic.torch.ops.coordination.process_sets import group_in

NOT_IN_STATE = (
    "the Loader that trains is in no state\n"
    "A commit does not say which of its steps are done: after a change of membership its epoch "
    "begins anew.\n"
    "Make it a value of the state: TorchState(model, optimizer, loader=loader)."
)


class Reducer:
    """Reduction of one optimizer's gradients over all ranks, step by step."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        names: Mapping[int, str],
        options: ReduceOptions,
    ) -> None:
        self._deferred = False
        self._optimizer = weakref.ref(optimizer)
        self.names = names  # of parameters by their ids, for messages
        self._context = current()
        self._sparse: list[torch.Tensor] = []  # with sparse gradients, as far as all ranks know
        self.layout = Layout(type(optimizer).__name__, options, names)
        self.arrived = self.layout.arrived
        self.step: GradientStep | None = None
        self._failed_share: StepShare | None = None
        self._hooks: dict[int, tuple[torch.Tensor, Any]] = {}
        self._yielded: set[int] = set()  # parameters that a newer optimizer has
        # Backward may run in several threads where parameters are on several devices.
        self._lock = threading.Lock()
        self._checked = False
        self.synchronized = False  # the optimizer's gradients are the reduced ones
        _take_over(self)

    @property
    def pending(self) -> bool:
        """Whether gradients have arrived that are not reduced yet."""
        step = self.step
        return step is not None and step.has_gradients and not self._is_stale(step)

    @property
    def accumulates(self) -> bool:
        """Whether a step without a loader has had some of its backward passes, and not all."""
        step = self.step
        return step is not None and step.incomplete and not self._is_stale(step)

    @property
    def in_micro_batches(self) -> bool:
        """Whether the step under way consists of micro-batches."""
        return self._find_context().share is not None

    def on_gradient(self, parameter: torch.Tensor) -> None:
        """Handle that backward has accumulated into ``parameter.grad``."""
        with self._lock:
            try:
                step = self._present_step()
                step.communicator.check()  # the rest of backward would be for nothing
                self.synchronized = False
                step.arrive(parameter)
            except BaseException:  # also an interrupt, which leaves a step half-way
                self._fail()
                raise

    @torch.no_grad()
    def synchronize(self) -> None:
        """Launch what has not been launched, wait, and write the reduced gradients."""
        with self._lock:
            try:
                step = self._present_step()
                step.finish(self.trained())
                self._reduce_apart(step)
                if step.share is not None:
                    self.arrived.deliver(step.parameters)
            except BaseException:
                self._fail()
                raise
            self._hook(step.parameters)
            self.step = None
            self.arrived.clear()
            self.synchronized = True

    def forget(self) -> None:
        """Begin anew because the user sets the gradients to zero."""
        if self.pending:
            raise RuntimeError(
                "optimizer.zero_grad() was called after backward() but before step() or "
                "synchronize(), while gradients were being reduced; move it before backward() or "
                "after step()"
            )
        with self._lock:
            self._abandon()

    def reset(self) -> None:
        """Drop the step under way and all gradients: the state is being restored."""
        # Nothing is exchanged, and no agreement is forgotten, so some ranks may call it alone.
        with self._lock:
            self._fail(restores=True)

    # -- steps -----------------------------------------------------------------------------------

    def _present_step(self) -> GradientStep:
        step = self.step
        if step is not None and not self._is_stale(step):
            return step
        context = self._find_context()
        self._check_share(step, context)
        self._abandon()
        kind = ReductionStep if context.share is None else MicroBatchReduction
        step = self.step = kind(self.layout, context, self.trained())
        step.communicator.current_operation = "the reduction of gradients by a DistributedOptimizer"
        self._hook(step.parameters)
        if step.share is not None or step.communicator.size == 1:
            self.layout.release()  # neither uses buckets, whose memory is as large as the model
        if step.share is not None and not self._checked:
            self._checked = True
            if context.loops and not step.share.in_state:
                context.warn(NOT_IN_STATE)
        return step

    def _check_share(self, before: GradientStep | None, context: Context) -> None:
        """Refuse a step of micro-batches after a step with lost or unused gradients."""
        if context.share is not None and context.share is self._failed_share:
            raise RuntimeError(
                "gradients of this step were dropped when an error was raised in it, so it cannot "
                "go on; let the error end the loop over the micro-batches, without optimizer.step()"
            )
        if (
            before is not None
            and before.share is not None
            and before.generation == context.generation
            and before.has_gradients
            and any(each.grad is not None for each in before.parameters)
        ):
            raise RuntimeError(
                "the gradients of a step of micro-batches were not used before the next step "
                "began; call optimizer.step() after the loop over each step, or drop them by "
                "optimizer.zero_grad(). For larger batches make Batch(global_batch=…) larger"
            )

    @torch.no_grad()
    def step_with_nothing(self) -> None:
        """Take part in the other ranks' step, as a joined rank."""
        self.end_with_nothing()
        self.forget()
        for parameter in self.trained(apart=True):
            parameter.grad = None  # one kept from an earlier step would be added
        with self._lock:
            apart = self._sparse or self.layout.options.apart
            # Sums of a backward are not waited for: others may need this rank before they end.
            later = not apart and self._present_step().launch_all()
        self._deferred = True
        if not later:
            self.end_with_nothing()

    def end_with_nothing(self) -> None:
        """Wait for a step of the other ranks in which this rank has taken part."""
        if self._deferred:
            self._deferred = False
            self.synchronize()
            for parameter in self.trained(apart=True):
                parameter.grad = None
            self.synchronized = False

    def _reduce_apart(self, step: GradientStep) -> None:
        """Reduce the gradients outside the layout: sparse and compressed gradients."""
        if step.share is None and step.communicator.size > 1:
            self._sparse += step.found_sparse  # no bucket has them from the next step on
            options = self.layout.options
            group, op = group_in(step.context, options.process_set), options.op
            keys, trained = set(map(id, self._sparse)), self.trained(apart=True)
            sparse = [parameter for parameter in trained if id(parameter) in keys]
            if sparse:
                if not isinstance(op, Op):
                    raise ValueError(
                        f"the gradient of {self.arrived.name(sparse[0])} is sparse, and op=Adasum "
                        "needs dense ones; pass sparse_as_dense=True"
                    )
                gather_sparse(group, sparse, op)
            if options.apart:
                dense = [each for each in trained if id(each) not in keys]
                reduce_apart(group, dense, options)
        if isinstance(self._optimizer(), torch.optim.SparseAdam):  # takes no other gradients
            for parameter in self.trained(apart=True):
                if parameter.grad is not None and parameter.grad.layout is torch.strided:
                    parameter.grad = parameter.grad.to_sparse(1)

    def _is_stale(self, step: GradientStep) -> bool:
        """Return whether the rank is in another generation, context or share of work by now."""
        context = self._find_context()
        return context.generation != step.generation or context.share is not step.share

    def _abandon(self) -> None:
        """Drop the step. If other ranks may wait for its groups, the generation has failed here."""
        step, self.step = self.step, None
        self.synchronized = False
        if step is not None and step.concerns_peers:
            self.arrived.discard()
            self.layout.fail(step.communicator.generation)
        self.arrived.clear()

    def _fail(self, *, restores: bool = False) -> None:
        """Drop the step and all gradients, because only some may have been reduced."""
        if not restores or (self.step is not None and self.step.has_gradients):
            self._failed_share = self._find_context().share
        self._abandon()
        for parameter in self.trained(apart=True):
            parameter.grad = None

    # -- surroundings ----------------------------------------------------------------------------

    def _find_context(self) -> Context:
        """Return the rank's context, also in a thread of autograd's own."""
        return current_or_none() or self._context

    def trained(self, *, apart: bool = False) -> list[torch.Tensor]:
        """Return the trained parameters; without `apart` only the parameters reduced together."""
        optimizer = self._optimizer()
        groups = [] if optimizer is None else optimizer.param_groups
        # An integration may leave groups to their rank.
        groups = [group for group in groups if not group.get("local")]
        trained = [p for group in groups for p in group["params"] if p.requires_grad]
        if apart or self.in_micro_batches:
            return trained
        if self.layout.options.apart:
            return []
        keys = set(map(id, self._sparse))
        return [each for each in trained if id(each) not in keys] if keys else trained

    def _hook(self, parameters: list[torch.Tensor]) -> None:
        """Register autograd hooks on exactly these parameters, as long as this object lives."""
        keys = {id(parameter) for parameter in parameters}
        for key in self._hooks.keys() - keys:
            self._hooks.pop(key)[1].remove()
        method = weakref.WeakMethod(self.on_gradient)  # parameters may outlive it

        def hook(parameter: torch.Tensor) -> None:
            alive = method()
            if alive is not None:
                alive(parameter)

        for parameter in parameters:
            key = id(parameter)
            if key not in self._yielded and key not in self._hooks:
                register: Any = parameter.register_post_accumulate_grad_hook
                handle = register(self.arrived.streams.noting(parameter, hook))
                self._hooks[key] = (parameter, handle)


def _take_over(reducer: Reducer) -> None:
    """Hook the parameters of `reducer` for it alone: a replaced optimizer may live on."""
    keys = {id(parameter) for parameter in reducer.trained(apart=True)}
    with _alive_lock:  # it must not change while it is iterated over
        for other in _alive:
            for key in keys & other._hooks.keys():
                other._hooks.pop(key)[1].remove()
                other._yielded.add(key)
        _alive[reducer] = None
    reducer._hook(reducer.trained())


def _of_all_ranks(context: Context) -> list[Reducer]:
    """Return the reducers of a rank that reduce over all ranks, in the order of their making."""
    with _alive_lock:
        alive = [*_alive]
    return [each for each in alive if each._context is context and each.layout.options.of_all]


def _step_of_joined(context: Context, what: dict[str, Any]) -> None:
    """Take part in a step of an optimizer, as a rank that has joined."""
    for reducer in _of_all_ranks(context):
        if reducer.layout.number_in(reducer.layout.communicator(context)) == what["number"]:
            reducer.step_with_nothing()
            return


def _end_steps_of_joined(context: Context) -> None:
    for reducer in _of_all_ranks(context):
        reducer.end_with_nothing()


SERVICES["step"] = _step_of_joined
at_end.append(_end_steps_of_joined)

_alive: weakref.WeakKeyDictionary[Reducer, None] = weakref.WeakKeyDictionary()
_alive_lock = threading.Lock()
