"""Optimizer that steps with the gradients of all ranks."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch

from nbelastic.collectives import Op
from nbelastic.elastic.ranks.context import current
from nbelastic.torch.compression import AnyCompressor, Compression
from nbelastic.torch.gradients.options import ReduceOptions, check_groups, names_of
from nbelastic.torch.gradients.reducer import Reducer
from nbelastic.torch.ops.coordination.process_sets import added_set
from nbelastic.torch.ops.operation.reduction import GradientOp
from nbelastic.torch.ops.reductions import allreduce

if TYPE_CHECKING:
    Base = torch.optim.Optimizer
else:
    Base = object

AnyOptimizer = TypeVar("AnyOptimizer", bound=torch.optim.Optimizer)


def DistributedOptimizer(  # noqa: N802 - Horovod's name: it was a class once
    optimizer: AnyOptimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: AnyCompressor = Compression.none,
    backward_passes_per_step: int = 1,
    op: Op | GradientOp = Op.AVERAGE,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[torch.Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: object = None,
) -> AnyOptimizer:
    """Make `optimizer` step with gradients reduced over all ranks.

    Gradients travel while backward still runs, and ``step()`` waits for the last of them. The
    optimizer survives changes of membership: each step reduces over the ranks that there are. On
    one rank it does what it did before.

    A parameter without a gradient on this rank counts as zero where others have one. Where no rank
    has one it keeps none, so the optimizer leaves it alone. (Horovod gives it zeros, which weight
    decay and momentum act on.) Parameters may be added, frozen and unfrozen between steps,
    on all ranks alike.

    Clipping gradients, and ``torch.amp.GradScaler``, work on reduced gradients::

        scaler.scale(loss).backward()
        optimizer.synchronize()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with optimizer.skip_synchronize():
            scaler.step(optimizer)
        scaler.update()

    To change gradients between ``backward()`` and ``synchronize()`` is an error. So all ranks find
    the same infinities, and skip the same steps. Do not rely on their values in between: they are
    views of the buffers that are being reduced. The next backward uses those again, so clone what
    you want to keep longer.

    Wrap each optimizer of a GAN by itself. A discriminator that is trained by two losses has
    ``backward_passes_per_step=2``. One that is trained by their sum has 1, and is frozen
    (``requires_grad_(False)``) while the generator's loss goes through it.

    ``torch.save(optimizer)`` saves the plain optimizer, to be wrapped again where it is loaded; a
    deep copy is a distributed optimizer of the copied parameters.

    ``step(closure)`` reduces the gradients after each call of the closure, and also the loss that
    it returns, because optimizers that search along a line decide by it.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
        This object is changed and returned. Its class becomes one derived from its present class,
        so all that refers to it (a scheduler, a scaler, a state) stays right.
    named_parameters : iterable of (str, Tensor), optional
        Names for messages: ``model.named_parameters()``.
    compression : default Compression.none
        How gradients travel; ``Compression.fp16`` and ``Compression.bf16`` halve them. Anything
        with the methods ``compress(tensor)``, which returns what travels and a context, and
        ``decompress(tensor, ctx)`` will do; such gradients are reduced when backward has ended.
    backward_passes_per_step : int, default 1
        How many backward passes add up on this rank before gradients are reduced. They are summed,
        not averaged, as torch does. Passes whose gradients ``zero_grad()`` has dropped do not
        count.
    op : default Average
        Average, Sum or Adasum, which adds up what differs between the ranks' gradients of a
        parameter and averages what does not (:mod:`nbelastic.torch.ops.operation.reduction`). It
        combines gradients; Horovod's combines what each rank's optimizer makes of them.
    gradient_predivide_factor : float, default 1.0
        With Average: gradients are divided by this before they are summed, and by
        ``size / gradient_predivide_factor`` after. Makes room in float16.
    num_groups : int, default 0
        Horovod's older name of `groups`.
    groups : int or list of lists of Tensor, optional
        How many groups to reduce gradients in, or which parameters go together; 0 or None: groups
        of about 25 MB in the order in which gradients arrive.
    sparse_as_dense : bool, default False
        Whether sparse gradients travel as dense ones, as over a
        :class:`~nbelastic.torch.elastic.Loader` they do anyway. Else ranks gather their indices
        and values.
    process_set : ProcessSet, optional
        The ranks whose gradients are reduced; by default all. Other ranks step by themselves.

    Returns
    -------
    torch.optim.Optimizer
        `optimizer`, with these methods besides its own:

        - ``synchronize()`` waits for the reduced gradients before ``step()`` does;
        - ``skip_synchronize()``, a context in which ``step()`` uses them as they are;
        - ``set_backward_passes_per_step(passes)``;
        - ``reset()`` drops gradients, and reductions under way.

    Raises
    ------
    NotInitialized
        ``init()`` has not been called.
    ValueError
        An argument has a value it cannot have. The optimizer is as it was.
    """
    if isinstance(optimizer, _Distributed):
        raise ValueError("the optimizer is a DistributedOptimizer already")
    names = names_of(optimizer, named_parameters)
    options = ReduceOptions(
        op=op,
        compression=compression,
        predivide=gradient_predivide_factor,
        passes=backward_passes_per_step,
        groups=check_groups(optimizer, groups, num_groups),
        sparse_as_dense=sparse_as_dense,
        process_set=added_set(process_set),
    )
    return _wrap(optimizer, names, options)


def _wrap(
    optimizer: AnyOptimizer, names: Mapping[int, str], options: ReduceOptions
) -> AnyOptimizer:
    optimizer._reducer = Reducer(optimizer, names, options)  # type: ignore[attr-defined]
    current().telemetry.device = next((str(p.device) for p in _parameters(optimizer)), "cpu")
    vars(optimizer).pop("step", None)  # that a scheduler, made before, has set to note a call
    optimizer.__class__ = _distributed(type(optimizer))  # type: ignore[arg-type]
    return optimizer


def is_distributed(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer steps with the gradients of all ranks."""
    return isinstance(optimizer, _Distributed)


def is_pending(value: object) -> bool:
    """Return whether `value` is an optimizer with gradients that are not reduced yet."""
    return isinstance(value, _Distributed) and value._reducer.pending


def accumulates(value: object) -> bool:
    """Return whether `value` is an optimizer between the backward passes of one step."""
    return isinstance(value, _Distributed) and value._reducer.accumulates


class _Distributed(Base):
    """Methods of a distributed optimizer; the first base of its class."""

    _reducer: Reducer
    _skips = False

    def synchronize(self) -> None:
        """Wait until all gradients are reduced; afterwards ``step()`` does not.

        Raises
        ------
        CollectiveError
            A peer is gone, or the generation is over. The gradients are None.
        RuntimeError
            Gradients were changed since backward.
        """
        self._reducer.synchronize()

    def skip_synchronize(self) -> AbstractContextManager[object]:
        """Make ``step()`` use the gradients as they are: ``synchronize()`` has reduced them."""
        skipping = contextlib.ExitStack()  # a generator would set the traceback of exceptions
        skipping.callback(setattr, self, "_skips", False)
        self._skips = True
        return skipping

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Wait until all gradients are reduced, if that has not been done, and step.

        Parameters
        ----------
        closure : callable, optional
            Computes the loss and its gradients. Its loss is reduced, too.

        Raises
        ------
        CollectiveError
            A peer is gone, or the generation is over. Nothing was stepped.
        RuntimeError
            Gradients were changed since backward, or ``skip_synchronize()`` was used without
            ``synchronize()``, or there is a closure in a step of a loader.
        """
        if closure is not None:
            if self._reducer.in_micro_batches:
                raise RuntimeError(
                    "optimizer.step(closure) cannot be used with a Loader: the closure would need "
                    "the micro-batches of a step again, and their mean loss; call step() without it"
                )
            closure = functools.partial(_reduced, self, closure)
        elif self._skips:
            if self._reducer.pending:
                raise RuntimeError("call optimizer.synchronize() before skip_synchronize()")
        elif self._reducer.synchronized:
            # A fused optimizer is stepped by GradScaler, which does not know of the context.
            if getattr(self, "found_inf", None) is None:
                warnings.warn(
                    "optimizer.step() called without optimizer.skip_synchronize() context after "
                    "optimizer.synchronize(); the gradients are not reduced again. Step in `with "
                    "optimizer.skip_synchronize():`, as Horovod would reduce them twice",
                    stacklevel=2,
                )
        else:
            if getattr(self, "found_inf", None) is not None:
                raise RuntimeError(
                    "GradScaler has looked for infinities before gradients were reduced, so ranks "
                    "may disagree; call optimizer.synchronize() before scaler.step(optimizer)"
                )
            self._reducer.synchronize()
        self._reducer.synchronized = False
        self._opt_called = True  # schedulers look for it before their first step
        return super().step(closure) if closure is not None else super().step()

    # Else torch would run the hooks of step() twice: here and in the class it derives from.
    step.hooked = True  # type: ignore[attr-defined]
    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # it notes its calls itself

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Set all gradients to None, or to zero.

        Raises
        ------
        RuntimeError
            Between ``backward()`` and ``step()`` or ``synchronize()``, when other ranks need them.
        """
        self._reducer.forget()
        # In a step of micro-batches, a zero that is added to would be one value more.
        super().zero_grad(set_to_none=set_to_none or self._reducer.in_micro_batches)

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Set how many backward passes add up before gradients are reduced."""
        reducer = self._reducer
        if reducer.step is not None:
            raise RuntimeError(
                "backward_passes_per_step can only change between step() and backward()"
            )
        reducer.layout.options = dataclasses.replace(reducer.layout.options, passes=passes)

    def reset(self) -> None:
        """Drop gradients, and reductions under way, before a state is restored."""
        self._reducer.reset()

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        """Pickle the plain optimizer, which can be used anywhere, and wrapped again."""
        return object.__new__, (_plain(type(self)),), self.__getstate__()

    def __deepcopy__(self, memo: dict[int, Any]) -> _Distributed:
        """Return a distributed optimizer of copied parameters."""
        made: Any = object.__new__(_plain(type(self)))
        memo[id(self)] = made
        made.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        pairs = zip(_parameters(self), _parameters(made), strict=True)
        names = self._reducer.names
        named = {id(copied): names[id(mine)] for mine, copied in pairs if id(mine) in names}
        options = self._reducer.layout.options
        options = dataclasses.replace(options, groups=copy.deepcopy(options.groups, memo))
        return cast("_Distributed", _wrap(made, named, options))


def with_methods_of(first: type, base: type, **more: Any) -> type:
    """Return a class with other methods, and with the name of `base`: saved objects refer to it."""
    names = {name: getattr(base, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(base.__name__, (first, base), {**names, **more})


_distributed = functools.cache(functools.partial(with_methods_of, _Distributed))


def _plain(kind: type[_Distributed]) -> type[torch.optim.Optimizer]:
    return cast("type[torch.optim.Optimizer]", kind.__bases__[1])


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _reduced(optimizer: _Distributed, closure: Callable[[], Any]) -> Any:
    """Call `closure`, then reduce the computed gradients and the returned loss."""
    loss = closure()
    optimizer.synchronize()
    if loss is None:
        return None
    options = optimizer._reducer.layout.options
    if not options.process_set.included():
        return loss
    value = loss.detach() if isinstance(loss, torch.Tensor) else torch.tensor(loss)
    op = options.op if isinstance(options.op, Op) else Op.AVERAGE
    reduced = allreduce(value, op=op, process_set=options.process_set)
    return reduced if isinstance(loss, torch.Tensor) else reduced.item()
