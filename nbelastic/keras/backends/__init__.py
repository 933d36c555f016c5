"""Back ends of Keras, each an adapter, and the reduction of gradients on any.

TensorFlow and JAX call back in a thread of their own, while the rank's thread waits in the compiled
function. So that thread acts for the rank. An error there reaches the rank as one of the library's;
the original is kept.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import keras
from torch import Tensor, tensor  # here, `torch` is the module of its back end

from nbelastic.elastic.ranks.context import Acting, Context, current
from nbelastic.errors import OptionError
from nbelastic.torch.gradients.options import ReduceOptions
from nbelastic.torch.ops.coordination.process_sets import added_set, group_of
from nbelastic.torch.ops.reductions import grouped_allreduce

Operation = Callable[[list[Tensor]], Sequence[Tensor]]


def backend() -> Backend:
    """Return the adapter of Keras' back end, unless a distribution of Keras is set."""
    if keras.distribution.distribution() is not None:
        raise OptionError(
            "keras.distribution is set: Keras would distribute the model over devices by itself, "
            "over a fixed number of processes. nbelastic gives each rank a model of its own. "
            "Remove keras.distribution.set_distribution(…)"
        )
    name = keras.config.backend()
    if name not in ("torch", "tensorflow", "jax"):
        raise OptionError(
            f"Keras has the back end {name!r}; nbelastic.keras works with torch, tensorflow and "
            "jax. Set KERAS_BACKEND before Keras is imported"
        )
    found: Backend = importlib.import_module(f"nbelastic.keras.backends.{name}").ADAPTER
    return found


class Backend(Protocol):
    """Adapter of a back end: two conversions, and calls into Python from compiled functions."""

    in_place: bool = False  # variables are tensors of PyTorch, which are read and filled in place

    def to_torch(self, value: Any) -> Tensor:
        """Return a variable, a tensor or an array as a tensor of PyTorch; best without a copy."""

    def from_torch(self, tensor: Tensor, dtype: Any = None) -> Any:
        """Return a tensor of PyTorch as one of this back end, of the same type or of `dtype`."""

    def read(self, variables: Sequence[Any]) -> list[Tensor]:
        """Return the variables' values; they may share memory with them."""
        return [self.to_torch(each) for each in variables]

    def write(self, variables: Sequence[Any], values: Sequence[Tensor]) -> None:
        """Copy values into variables."""
        for variable, value in zip(variables, values, strict=True):
            variable.assign(self.from_torch(value.clone(), variable.dtype))

    def settle(self, model: Any) -> None:
        """Set a model's variables to their present values; turn off what cannot work."""
        return

    def call_back(
        self, tensors: Sequence[Any], operation: Operation, results: Sequence[tuple[Any, Any]]
    ) -> list[Any]:
        """Call a function on tensors of PyTorch, from a compiled function or not.

        `results` are the types and shapes that come out. Sparse tensors are made dense.
        """
        return list(operation(list(tensors)))

    def apply_if(self, ready: Any, update: Callable[[], None], changed: Sequence[Any]) -> None:
        """Make an update if `ready`, known to a compiled function only when it runs."""
        if ready:
            update()

    def reduction(self, options: KerasOptions) -> Reduction:
        """Return a new reduction of gradients."""
        return Reduction(options, self)


_hidden: list[BaseException] = []


def called_back(context: Context, function: Callable[[], Sequence[Tensor]]) -> Sequence[Tensor]:
    """Call a function for the rank in a thread of a library, and keep its error."""
    try:
        with Acting(context):
            return function()
    except BaseException as error:
        _hidden[:] = [error.with_traceback(None)]
        raise


def raised() -> BaseException | None:
    """Return, once, the error of the last operation between ranks that a library has hidden."""
    return _hidden.pop() if _hidden else None


@dataclass(frozen=True, kw_only=True)
class KerasOptions(ReduceOptions):
    """How the gradients of a Keras optimizer are reduced; checked when it is made."""

    predivide: float = 1.0
    passes: int = 1  # batches whose gradients add up on a rank before they are reduced
    average_passes: bool = False  # their sum is divided by their number
    groups: Any = 0  # how many, 0 for any; or lists of variables
    sparse_as_dense: bool = False  # sparse gradients are made dense
    local: Any = ()  # layers whose gradients stay on their rank, or one
    scale_local: bool = True  # these are divided by the number of ranks
    process_set: Any = None  # ranks that reduce among them, or all; others keep their gradients

    def __post_init__(self) -> None:
        super().__post_init__()
        several = isinstance(self.local, (list, tuple, set))
        layers = self.local if several else [] if self.local is None else [self.local]
        object.__setattr__(self, "local", tuple(layers))
        object.__setattr__(self, "process_set", added_set(self.process_set))

    def is_local(self) -> set[int]:
        """Return the identities of variables whose gradients stay on their rank."""
        return {id(each) for layer in self.local for each in layer.trainable_variables}


class Reduction:
    """Reduction of an optimizer's, or a tape's, gradients by calls into Python."""

    defers = False  # an update waits for :meth:`complete`; only on the torch back end
    dry = False  # gradients are applied as they are, in a step that is made to be compiled

    def __init__(self, options: KerasOptions, back: Backend) -> None:
        self.options, self._back = options, back
        # The passes of a step that are done, by their variables: how many, and their sums.
        self._sums: dict[tuple[int, ...], tuple[int, list[Any]]] = {}

    @property
    def accumulates(self) -> bool:
        """Whether some of the passes of a step are done, and not all."""
        return bool(self._sums)

    def built(self, optimizer: Any) -> None:
        """Prepare for an optimizer that has its variables."""

    def before_backward(self) -> None:
        """Prepare for the gradients of a loss."""

    def synchronize(self, optimizer: Any) -> None:
        """Wait for the reduced gradients before ``apply()`` does."""

    def complete(self) -> None:
        """Apply an update that was put off."""

    def forget(self) -> None:
        """Drop an update that was put off, and gradients of passes."""
        self._sums.clear()

    def apply(
        self, optimizer: Any, gradients: list[Any], trained: list[Any], apply: Callable[..., None]
    ) -> None:
        """Reduce gradients and apply them, unless passes of the step are to come."""
        ready, reduced = self.reduce(gradients, trained, self.options.is_local())
        if self.options.passes == 1:
            apply(reduced, trained)
        else:
            changed = [*trained, *optimizer.variables]
            self._back.apply_if(ready, lambda: apply(reduced, trained), changed)

    def reduce(
        self, gradients: Sequence[Any], variables: Sequence[Any], local: Collection[int]
    ) -> tuple[Any, list[Any]]:
        """Reduce gradients over all ranks, except gradients of `local` variables, by their ids.

        Returns whether there are reduced ones, which is not so between the passes of a step, and
        them; None stays None.
        """
        there = [n for n, each in enumerate(gradients) if each is not None]
        tensors = [gradients[n] for n in there]
        places = tuple(id(variables[n]) for n in there)

        def add(given: list[Tensor]) -> list[Tensor]:
            found = self._add(given, places, local)
            return [tensor(found is not None), *(found or given)]

        results = [("bool", ()), *((each.dtype, each.shape) for each in tensors)]
        ready, *reduced = self._back.call_back(tensors, add, results)
        whole = list(gradients)
        for number, each in zip(there, reduced, strict=True):
            whole[number] = each
        return ready, whole

    def _add(
        self, gradients: list[Tensor], places: tuple[int, ...], local: Collection[int]
    ) -> list[Tensor] | None:
        """Add the gradients of a batch; return reduced ones after the last of a step."""
        options, context = self.options, current()
        if self.dry:
            return gradients
        if options.passes > 1:
            done, sums = self._sums.pop(places, (0, [0.0] * len(gradients)))
            gradients = [one + more for one, more in zip(sums, gradients, strict=True)]  # copies
            if done + 1 < options.passes:
                self._sums[places] = done + 1, gradients
                return None
        gradients = self._scaled(gradients, places, local)
        context.communicator()  # in a job without an elastic loop, the first one makes it a member
        if context.rank not in group_of(options.process_set).ranks:
            return gradients
        shared = [number for number, place in enumerate(places) if place not in local]
        factors = 1.0 / options.predivide, options.predivide
        how = options.compression, options.op, *factors, options.process_set
        reduced = grouped_allreduce([gradients[number] for number in shared], None, None, *how)
        for number, each in zip(shared, reduced, strict=True):
            gradients[number] = each
        return gradients

    def _scaled(
        self, gradients: list[Any], places: Sequence[int], local: Collection[int]
    ) -> list[Any]:
        """Return gradients averaged over passes, and local ones divided by the number of ranks."""
        options = self.options
        size = group_of(options.process_set).size if local and options.scale_local else 1
        passes = options.passes if options.average_passes else 1
        factors = [passes * (size if place in local else 1) for place in places]
        return [
            each if each is None or factor == 1 else each / factor
            for each, factor in zip(gradients, factors, strict=True)
        ]
