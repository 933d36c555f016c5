"""Reduction of the gradients of one step, from first arrival to last delivery."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from nbelastic.elastic.ranks.timeline import timeline
from nbelastic.errors import CollectiveError
from nbelastic.torch.gradients.groups import Bucket
from nbelastic.torch.gradients.step import GradientStep, agree, change_of
from nbelastic.torch.ops.coordination.coordination import announce, is_joined

if TYPE_CHECKING:
    from collections.abc import Iterable

    from nbelastic.collectives import Communicator
    from nbelastic.elastic.ranks.context import Context
    from nbelastic.torch.gradients.arrived import ArrivedGradients
    from nbelastic.torch.gradients.layout import Layout
    from nbelastic.torch.gradients.layout_agreement import LayoutAgreement

# Gradients of so many elements are cheap to copy.
SMALL_GRADIENT = 1 << 16


class ReductionStep(GradientStep):
    """Progress of one step: passes counted, groups launched.

    Ranks agree on a layout at the beginning of the step or when backward has ended. A step of a
    process set, not `of_all`, concerns no rank that has joined, and carries no flags.
    """

    def __init__(
        self,
        context: Context,
        communicator: Communicator,
        parameters: list[torch.Tensor],
        arrived: ArrivedGradients,
        passes: int,
        agreement: LayoutAgreement,
        *,
        of_all: bool,
    ) -> None:
        super().__init__(context, communicator, parameters)
        self.layout: Layout | None = None  # None in a world of one
        self._agreement = agreement
        self._arrived = arrived
        self._passes = passes
        self._passes_left = dict.fromkeys(map(id, parameters), passes)
        self._last_pass: dict[int, tuple[int, int]] = {}  # addresses of gradients, their versions
        self._launched = 0
        self._description = ""
        self._of_all = of_all
        self._announced: set[str] = set()

    @property
    def has_gradients(self) -> bool:
        return bool(self._arrived.noted) or self._arrived.any_sparse

    @property
    def incomplete(self) -> bool:
        passes = self._passes
        return passes > 1 and any(0 < left < passes for left in self._passes_left.values())

    def prepare(self) -> None:
        agreement, communicator = self._agreement, self.communicator
        if self.layout is not None or communicator.size == 1:
            return
        if agreement.exchanges(communicator, self.parameters):
            self.announce("layout")
        if agreement.is_to_exchange_order:
            self._compare(agreement.description(communicator, self.parameters))
        self.layout = agreement.arrange(communicator, self.parameters)
        # Compared before the first group is launched.
        self._description = agreement.description(communicator, self.parameters)
        self.layout.begin()

    def _compare(self, description: str) -> None:
        if description:
            self.communicator.agree(description)

    def arrive(self, parameters: Iterable[torch.Tensor]) -> None:
        layout, arrived, passes_left = self.layout, self._arrived, self._passes_left
        accumulates, noted = self._passes > 1, arrived.noted
        launches = layout is not None and not layout.after_backward
        places = None if layout is None else layout.places
        for parameter in parameters:
            key = id(parameter)
            left = passes_left.get(key)
            if left is None:
                continue  # not this optimizer's any more; or check() finds out
            gradient = parameter.grad
            if gradient is None or left == 0:
                raise self._unexpected(parameter)
            left = (self._passes_to_come(key, gradient, left) if accumulates else left) - 1
            passes_left[key] = left
            if left > 0:
                continue
            if gradient.layout is not torch.strided:
                arrived.streams.join(gradient.device, [])
                if not arrived.sparse_as_dense:
                    arrived.any_sparse = True
                    continue
                gradient = arrived.make_dense(parameter, gradient)
            if arrived.sampled is None:
                gradient = self._sample(parameter, gradient)
            noted[key] = (parameter, gradient, gradient._version, gradient.data_ptr())
            if places is not None:
                group, position = places[key]
                if group.arrive(position, gradient) and launches:
                    self._launch_complete()

    def _passes_to_come(self, key: int, gradient: torch.Tensor, left: int) -> int:
        """Return the number of passes, this pass included, until a gradient is complete.

        All of them, if it is not that of the pass before with this one added to it: then earlier
        passes were dropped by ``model.zero_grad()``. In a GAN, the generator's loss leaves such
        gradients in the discriminator.
        """
        if gradient.layout is not torch.strided:
            return left
        expected = self._last_pass.get(key)
        self._last_pass[key] = address, version = gradient.data_ptr(), gradient._version
        return left if expected in (None, (address, version - 1)) else self._passes

    def _unexpected(self, parameter: torch.Tensor) -> Exception:
        if parameter.grad is None:
            return CollectiveError(
                "a gradient was added to that of a step which an earlier generation left half-way; "
                "call optimizer.zero_grad() before backward()"
            )
        return RuntimeError(
            f"a gradient of {self._arrived.name(parameter)} was computed more than "
            f"backward_passes_per_step={self._passes} times before step(); increase "
            "it to accumulate gradients over several backward passes. If the last pass was for "
            "another optimizer's step (a generator's loss, through its discriminator), freeze this "
            "optimizer's parameters in that pass: parameter.requires_grad_(False)"
        )

    def _sample(self, parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        """Sample a gradient that can cheaply stay out of all buffers; return the gradient."""
        if self.layout is None:
            suits = gradient.is_cpu
        else:
            group, position = self.layout.places[id(parameter)]
            view = group.views[position]
            # Unchanged in its own memory until it is delivered.
            stays = view is None and (self.layout.after_backward or isinstance(group, Bucket))
            suits = gradient.numel() <= SMALL_GRADIENT or stays
            if suits and gradient is view:
                self._arrived.streams.join(gradient.device, [gradient])
                parameter.grad = gradient = gradient.clone()
        if suits:
            self._arrived.take_sample(parameter, gradient)
        return gradient

    def _launch_complete(self) -> None:
        """Launch the next groups as far as all their gradients have arrived."""
        assert self.layout is not None
        for group in self.layout.groups[self._launched :]:
            if group.expected:
                break
            self._launch_next(self.layout)

    def announce(self, phase: str) -> None:
        """Tell ranks that have joined of a phase of this step, once, before its first exchange.

        Between the two, and between the sums, backward may exchange other things.
        """
        if self._of_all and phase not in self._announced:
            self._announced.add(phase)
            number = self._agreement.number_in(self.communicator)
            announce(self.communicator, {"kind": "step", "number": number, "phase": phase})

    def launch_all(self) -> bool:
        """Launch all groups with the present gradients, unless this would wait for another rank.

        Return whether it did.
        """
        layout = self.layout
        if layout is None or layout.after_backward:
            return False
        while self._launched < len(layout.groups):
            self._launch_next(layout)
        return True

    def _check_consistency(self) -> None:
        """Check, once, that all ranks take the same step."""
        self.announce("sums")
        self._compare(self._description)
        self._description = ""

    def _launch_next(self, layout: Layout) -> None:
        self._check_consistency()
        number, self._launched = self._launched, self._launched + 1
        layout.launch(number, self.communicator, self._change)

    def check(self, trained: list[torch.Tensor]) -> None:
        self._arrived.check_untouched()
        self._arrived.check_trained(trained, self.parameters)

    def finish(self) -> None:
        layout, context = self.layout, self.context
        if layout is None:
            if self._of_all:
                agree(context, self._change())
            return
        if layout.coalesced:
            self._arrived.check_sample()
            self._check_consistency()
            self._launched = len(layout.groups)
            layout.launch_all(self.communicator, self._change)
        elif layout.after_backward:
            # All are on their way from an accelerator before the first is waited for.
            for group in layout.groups:
                group.complete()
        while self._launched < len(layout.groups):
            if self._launched == len(layout.groups) - 1:
                self._arrived.check_sample()
            self._launch_next(layout)
        with timeline.span("REDUCE_GRADIENTS"):
            change = layout.deliver()
        self.found_sparse = layout.found_sparse
        # Where sums are formed on an accelerator, all were launched during backward.
        self._arrived.check_sample()
        if self._of_all:
            agree(context, change)

    def _change(self) -> float:
        return change_of(self.context, joined=is_joined(self.communicator)) if self._of_all else 0.0

    @property
    def concerns_peers(self) -> bool:
        if self.communicator.size == 1:
            return False
        if self.layout is not None and not self.layout.after_backward:
            return self._launched > 0
        return self._launched > 0 or bool(self._arrived.noted)
