"""An optimizer that steps with the gradients of all ranks."""

from __future__ import annotations

import contextlib
import functools
import weakref
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch

from nbelastic.collectives import Op
from nbelastic.elastic.context import current
from nbelastic.torch.adasum import GradientOp
from nbelastic.torch.arguments import (
    check_compression,
    check_groups,
    check_op,
    check_passes,
    names_of,
)
from nbelastic.torch.compression import Compression, Compressor
from nbelastic.torch.layout import ReduceOptions
from nbelastic.torch.reducer import Reducer
from nbelastic.torch.reductions import allreduce
from nbelastic.torch.world import check_process_set

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    Base = torch.optim.Optimizer
else:
    Base = object

__all__ = ["DistributedOptimizer"]

AnyOptimizer = TypeVar("AnyOptimizer", bound=torch.optim.Optimizer)


def DistributedOptimizer(  # noqa: N802 - Horovod's name: it was a class once
    optimizer: AnyOptimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: type[Compressor] = Compression.none,
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
    optimizer lives through changes of membership: each step goes over the ranks that there are. On
    one rank it does what it did before.

    A parameter without a gradient on this rank counts as zero where others have one; where no rank
    has one it keeps none, so that the optimizer leaves it alone. (Horovod gives it zeros, which
    weight decay and momentum act on.) Parameters may be added, frozen and unfrozen between steps,
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
    the same infinities, and skip the same steps. What they hold then is not to be relied on: they
    are views of the buffers that are being reduced. The next backward uses those again, so clone
    what you want to keep longer.

    ``step(closure)`` reduces the gradients after each call of the closure, and also the loss that
    it returns, since optimizers that search along a line decide by it.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
        Any. It is this object that is changed and returned: its class becomes one derived from
        its present class, and all that refers to it (a scheduler, a scaler, a state) stays right.
    named_parameters : iterable of (str, Tensor), optional
        Names for messages: ``model.named_parameters()``.
    compression : default Compression.none
        How gradients travel; ``Compression.fp16`` and ``Compression.bf16`` halve them.
    backward_passes_per_step : int, default 1
        How many backward passes add up on this rank before gradients are reduced. They are summed,
        not averaged, as torch does.
    op : default Average
        Average, Sum or Adasum, which adds up what differs between the ranks' gradients of a
        parameter and averages what does not (:mod:`nbelastic.torch.adasum`). It combines gradients;
        Horovod's combines what each rank's optimizer makes of them.
    gradient_predivide_factor : float, default 1.0
        With Average: gradients are divided by this before they are summed, and by
        ``size / gradient_predivide_factor`` after. Makes room in float16.
    num_groups : int, default 0
        Horovod's older name of `groups`.
    groups : int or list of lists of Tensor, optional
        How many groups to reduce gradients in, or which parameters go together; 0 or None: groups
        of about 25 MB in the order in which gradients arrive.
    sparse_as_dense : bool, default False
        Whether to make sparse gradients dense. Else they are an error.
    process_set : None
        Only all ranks.

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
    check_process_set(process_set)
    names = names_of(optimizer, named_parameters)
    options = ReduceOptions(
        op=check_op(op, gradient_predivide_factor),
        compression=check_compression(compression),
        predivide=gradient_predivide_factor,
        passes=check_passes(backward_passes_per_step),
        groups=check_groups(optimizer, groups, num_groups),
        sparse_as_dense=sparse_as_dense,
    )
    optimizer._reducer = Reducer(optimizer, names, options)  # type: ignore[attr-defined]
    optimizer._op = op  # type: ignore[attr-defined]
    current().vitals.device = str(optimizer.param_groups[0]["params"][0].device)
    patched = vars(optimizer).pop("step", None)
    optimizer.__class__ = _distributed(type(optimizer))  # type: ignore[assignment,arg-type]
    if patched is not None:
        _patch_again(optimizer, patched)
    return optimizer


class _Distributed(Base):
    """What a distributed optimizer does differently; the first base of its class."""

    _reducer: Reducer
    _op: Op | GradientOp
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

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Have ``step()`` use the gradients as they are: reduced by ``synchronize()`` before."""
        self._skips = True
        try:
            yield
        finally:
            self._skips = False

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
            ``synchronize()``.
        """
        if closure is not None:
            closure = functools.partial(_reduced, self, closure)
        elif self._skips:
            if self._reducer.pending:
                raise RuntimeError("call optimizer.synchronize() before skip_synchronize()")
        elif not self._reducer.synchronized:
            if getattr(self, "found_inf", None) is not None:
                raise RuntimeError(
                    "GradScaler has looked for infinities before gradients were reduced, so ranks "
                    "may disagree; call optimizer.synchronize() before scaler.step(optimizer)"
                )
            self._reducer.synchronize()
        self._reducer.synchronized = False
        return super().step(closure) if closure is not None else super().step()

    # Else torch would run the hooks of step() twice: here and in the class it derives from.
    step.hooked = True  # type: ignore[attr-defined]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Set all gradients to None, or to zero.

        Raises
        ------
        RuntimeError
            Between ``backward()`` and ``step()`` or ``synchronize()``: others count on them.
        """
        self._reducer.forget()
        super().zero_grad(set_to_none=set_to_none)

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Set how many backward passes add up before gradients are reduced."""
        self._reducer.set_passes(check_passes(passes))

    def reset(self) -> None:
        """Drop gradients, and reductions under way; for whoever restores a state."""
        self._reducer.reset()


@functools.cache
def _distributed(base: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    names = {
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
    }
    return cast("type[torch.optim.Optimizer]", type(base.__name__, (_Distributed, base), names))


def _patch_again(optimizer: torch.optim.Optimizer, patched: Callable[..., Any]) -> None:
    """Put back what a scheduler, made before, has put on the instance to see that it steps."""
    alive = weakref.ref(optimizer)

    @functools.wraps(patched)
    def step(*args: Any, **kwargs: Any) -> Any:
        distributed = alive()
        assert distributed is not None
        distributed._opt_called = True  # type: ignore[attr-defined]
        return type(distributed).step(distributed, *args, **kwargs)

    optimizer.step = step  # type: ignore[method-assign]


def _reduced(optimizer: _Distributed, closure: Callable[[], Any]) -> Any:
    """Call `closure`, then reduce the gradients it has computed and the loss it returns."""
    loss = closure()
    optimizer.synchronize()
    if loss is None:
        return None
    value = loss.detach() if isinstance(loss, torch.Tensor) else torch.tensor(loss)
    op = optimizer._op if isinstance(optimizer._op, Op) else Op.AVERAGE
    reduced = allreduce(value, op=op)
    return reduced if isinstance(loss, torch.Tensor) else reduced.item()
