"""Record of gradients as backward left them, to detect changes by the user."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch

SAMPLE_VALUES = 16

# A parameter and its gradient, with the gradient's version and address (0 if sparse) on arrival.
Arrival = tuple[torch.Tensor, torch.Tensor, int, int]


def same(some: Sequence[object], others: Sequence[object]) -> bool:
    """Return whether two sequences are of the same objects; comparing tensors yields tensors."""
    return len(some) == len(others) and all(map(operator.is_, some, others))


class Streams:
    """Streams on which backward has computed gradients, for readers on other streams."""

    def __init__(self) -> None:
        self._noted: set[tuple[int, int, int]] = set()

    def noting(self, parameter: torch.Tensor, hook: Callable[[torch.Tensor], object]) -> Any:
        """Return a hook that notes the stream of a gradient of `parameter` and calls `hook`."""
        if parameter.device.type != "cuda":
            return hook
        note, index = self._noted.add, parameter.device.index
        present = torch._C._cuda_getCurrentStream

        def called(parameter: torch.Tensor) -> None:  # for each gradient of a step
            note(present(index))
            hook(parameter)

        return called

    def join(self, device: torch.device, gradients: Collection[torch.Tensor]) -> None:
        """Make the present stream of `device` wait for all noted streams of the device.

        The allocator does not reuse the memory of `gradients` before the present stream is done.
        """
        if not self._noted or device.type != "cuda":
            return
        present = torch.cuda.current_stream(device)
        # Threads of other devices go on noting; the next join finds what they note from here on.
        here = {each for each in self._noted.copy() if each[1] == device.index}
        self._noted -= here
        for stream_id, device_index, device_type in here:
            stream = torch.cuda.Stream(  # type: ignore[no-untyped-call]
                stream_id=stream_id, device_index=device_index, device_type=device_type
            )
            if stream != present:
                present.wait_stream(stream)
                for gradient in gradients:
                    gradient.record_stream(present)
        # The next join may be on yet another stream, which has to wait for this one.
        self._noted.add((present.stream_id, present.device_index, present.device_type))


class ArrivedGradients:
    """Gradients of a step of one optimizer, as they arrived; cleared after each step."""

    def __init__(self, names: Mapping[int, str], *, sparse_as_dense: bool = False) -> None:
        self.noted: dict[int, Arrival] = {}  # by ids of parameters, in the order of arrival
        # The parameter of one gradient, which stays out of all buffers, and its first values. Not
        # every change in place raises a version: GradScaler makes some that do not.
        self.sampled: torch.Tensor | None = None
        self._values = torch.empty(0)
        self._equal: torch.Tensor | bool = True  # in the last comparison
        self.streams = Streams()  # on which gradients of accelerators were computed
        self._names = names
        self.sparse_as_dense = sparse_as_dense
        # Of steps over loaders: the gradients of the last one, by the ids of their parameters.
        self._delivered: dict[int, weakref.ref[torch.Tensor]] = {}
        self._counted = (-1, 0)  # a generation, and its steps

    def note(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        """Record `gradient`, in its present version, as the result of backward."""
        address = gradient.data_ptr() if gradient.layout is torch.strided else 0
        self.noted[id(parameter)] = (parameter, gradient, gradient._version, address)

    def take_sample(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        """Keep some values of a gradient."""
        self.streams.join(gradient.device, [gradient])
        self.sampled, self._values, self._equal = parameter, _first_values(gradient).clone(), True

    def present(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """Return a parameter's gradient, of this step or kept; None if it stays sparse."""
        gradient = parameter.grad
        if gradient is not None and gradient.layout is not torch.strided:
            if not self.sparse_as_dense:
                return None
            parameter.grad = gradient = gradient.to_dense()
        return gradient

    def replace(self, parameter: torch.Tensor, copied: torch.Tensor) -> None:
        """Use a copy in the place of a gradient, unless it is the sample or was changed."""
        arrival = self.noted[id(parameter)]
        stays = parameter is self.sampled or arrival[1].requires_grad
        if not stays and _is_untouched(arrival):
            parameter.grad = copied
            self.note(parameter, copied)

    def check_untouched(self) -> None:
        """Refuse gradients changed since backward; an accelerator's sample is compared later."""
        for arrival in self.noted.values():
            if not _is_untouched(arrival):
                raise self._changed(arrival[0])
        if self.sampled is None:
            return
        before, now = self._values, _first_values(self.noted[id(self.sampled)][1])
        if before.is_cpu:
            self._equal = torch.equal(before, now) or bool(((before == now) | now.isnan()).all())
            self.check_sample()
        else:
            self._equal = torch.isclose(before, now, rtol=0, atol=0, equal_nan=True).all()

    def check_trained(self, trained: list[torch.Tensor], before: list[torch.Tensor]) -> None:
        """Refuse gradients of `trained` parameters added or unfrozen since the step began."""
        if same(trained, before):
            return
        known = {id(parameter) for parameter in before}
        for parameter in trained:
            if id(parameter) not in known and parameter.grad is not None:
                raise RuntimeError(
                    f"{self.name(parameter)} was added or unfrozen between a backward() and its "
                    "step(); do it after step()"
                )

    def deliver(self, parameters: Iterable[torch.Tensor]) -> None:
        """Record the reduced gradients of a step over a loader, to which no other may be added."""
        # Weakly, because zero_grad() frees gradients.
        self._delivered = {id(p): weakref.ref(p.grad) for p in parameters if p.grad is not None}

    def is_delivered(self, parameter: torch.Tensor) -> bool:
        """Return whether a parameter still has the gradient of the step before."""
        before = self._delivered.get(id(parameter))
        return before is not None and before() is parameter.grad

    def steps_before(self, generation: int) -> int:
        """Count a step over a loader; return how many came before it in its generation."""
        known, steps = self._counted
        steps = steps if known == generation else 0
        self._counted = generation, steps + 1
        return steps

    def check_sample(self) -> None:
        """Raise if the sampled gradient was changed; this waits for an accelerator."""
        equal, self._equal = self._equal, True
        if self.sampled is not None and not equal:
            raise self._changed(self.sampled)

    def discard(self) -> None:
        """Drop the gradients that have arrived, unless already replaced."""
        for parameter, gradient, _, _ in self.noted.values():
            if parameter.grad is gradient:
                parameter.grad = None

    def clear(self) -> None:
        """Forget the step; gradients stay where they are."""
        self.noted.clear()
        self.sampled = None

    def name(self, parameter: torch.Tensor) -> str:
        """Return what messages call a parameter."""
        return f"parameter {self._names.get(id(parameter), '(unnamed)')!r}"

    def _changed(self, parameter: torch.Tensor) -> RuntimeError:
        return RuntimeError(
            f"the gradient of {self.name(parameter)} was changed between backward() and step(), "
            "when it was being reduced; to clip or unscale gradients, call "
            "optimizer.synchronize() first and step in `with optimizer.skip_synchronize():`"
        )


def _is_untouched(arrival: Arrival) -> bool:
    """Return whether a gradient is unchanged since its arrival."""
    parameter, gradient, version, address = arrival
    same_memory = not address or gradient.data_ptr() == address
    return parameter.grad is gradient and gradient._version == version and same_memory


def _first_values(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.detach().flatten()[:SAMPLE_VALUES]
