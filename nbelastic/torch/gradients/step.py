"""Reduction of gradients in one step: the contract, and the plain step."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from nbelastic.collectives import Op
from nbelastic.elastic.ranks.context import Context
from nbelastic.elastic.ranks.groups import Group
from nbelastic.elastic.ranks.step_share import StepShare
from nbelastic.elastic.ranks.timeline import timeline
from nbelastic.errors import CollectiveError
from nbelastic.torch.gradients.layout import Layout
from nbelastic.torch.gradients.options import ReduceOptions
from nbelastic.torch.ops.coordination.comparison import begin
from nbelastic.torch.ops.coordination.coordination import announce, is_joined
from nbelastic.torch.ops.operation.reduction import as_real
from nbelastic.torch.ops.operation.tensor_operations import Allreduce, SparseAllreduce

# Gradients of so many elements are cheap to copy.
SMALL_GRADIENT = 1 << 16

_JOINED = -1000.0  # less than all other ranks can make up for


def change_of(context: Context, *, joined: bool = False) -> float:
    """Return the number that a rank, joined or not, adds to the gradients of a step.

    It is summed or averaged over the ranks, and passed to :func:`agree`. Other carriers of it:
    :mod:`nbelastic.keras.fit`, and ``one_of_all`` where nothing else carries it.
    """
    return _JOINED if joined else float(context.change_flag())


def agree(context: Context, change: float) -> None:
    """Act upon the sum of all ranks: whether the membership is about to change."""
    # A rank that has joined does not commit, so what it reads here it cannot act upon. The others
    # ask it at their next commit.
    if change >= 0:
        context.agree(bool(change))


class GradientStep:
    """Reduction of an optimizer's gradients in one step, from the first arrival to the delivery.

    The `Reducer` makes one when a step begins, and calls it with its lock held. After an error it
    drops the step and all gradients. If the step concerns peers by then, the generation has failed
    on this rank.
    """

    share: StepShare | None = None  # this rank's micro-batches, if the step consists of them
    found_sparse: Sequence[torch.Tensor] = ()  # parameters to be reduced apart from now on

    def __init__(self, layout: Layout, context: Context, parameters: list[torch.Tensor]) -> None:
        self.context = context
        self.communicator = layout.communicator(context)
        self.generation = context.generation
        self.parameters = parameters
        self.has_gradients = False  # at least one has arrived
        self.concerns_peers = False  # others may be waiting for this rank's part of the step
        self._layout, self._arrived = layout, layout.arrived
        self._passes = layout.options.passes
        self._passes_left: dict[int, int] = {}  # of each parameter, by its id

    @property
    def incomplete(self) -> bool:
        """Whether a gradient has had some of its ``backward_passes_per_step``, and not all."""
        return False

    def arrive(self, parameter: torch.Tensor) -> None:
        """Take the gradient that backward has accumulated into a parameter."""
        raise NotImplementedError

    def launch_all(self) -> bool:
        """Begin all sums with the present gradients; return whether to wait for them later."""
        return False

    def finish(self, trained: list[torch.Tensor]) -> None:
        """Begin the sums that have not begun, wait, and write the reduced gradients.

        Before, refuse gradients and `trained` parameters that the user has changed since backward.
        """
        raise NotImplementedError


class ReductionStep(GradientStep):
    """Progress of one step: passes counted, buckets launched."""

    def __init__(self, layout: Layout, context: Context, parameters: list[torch.Tensor]) -> None:
        super().__init__(layout, context, parameters)
        self._arranged = False  # stays so in a world of one
        self._passes_left = dict.fromkeys(map(id, self.parameters), self._passes)
        self._last_pass: dict[int, tuple[int, int]] = {}  # addresses of gradients, their versions
        self._launched = 0
        self._of_all = (
            layout.options.of_all
        )  # else it concerns no joined rank, and carries no flags
        self._announced = False
        if self._layout.holds(self.communicator, self.parameters):
            self._prepare()

    @property
    def incomplete(self) -> bool:
        passes = self._passes
        return passes > 1 and any(0 < left < passes for left in self._passes_left.values())

    def _prepare(self) -> None:
        """Agree with the other ranks before the sums, unless already done."""
        if self._arranged or self.communicator.size == 1:
            return
        if not self._layout.holds(self.communicator, self.parameters):
            self._announce()  # before the first exchange, in which a joined rank takes part
        self._layout.arrange(self.communicator, self.parameters)
        self._arranged = True

    def arrive(self, parameter: torch.Tensor) -> None:
        arrived, key = self._arrived, id(parameter)
        left = self._passes_left.get(key)
        if left is None:
            return  # not this optimizer's any more; or check() finds out
        gradient = parameter.grad
        if gradient is None or left == 0:
            raise self._unexpected(parameter)
        if self._passes > 1:
            left = self._passes_to_come(key, gradient, left)
        self._passes_left[key] = left - 1
        if left > 1:
            return
        self.has_gradients = True
        if gradient.layout is not torch.strided:
            arrived.streams.join(gradient.device, [])
            gradient = arrived.present(parameter)
            if gradient is None:
                return
        if arrived.sampled is None:
            gradient = self._sample(parameter, gradient)
        arrived.note(parameter, gradient)
        self.concerns_peers = self.communicator.size > 1
        if self._arranged and self._layout.bucket_of[key].arrive():
            self._launch(in_backward=True)

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
        """Sample a gradient that can cheaply stay out of its bucket; return the gradient."""
        if self._arranged:
            if gradient.numel() > SMALL_GRADIENT or gradient.requires_grad:
                return gradient
            # It may be that part of the bucket, which changes with the sum.
            self._arrived.streams.join(gradient.device, [gradient])
            parameter.grad = gradient = gradient.clone()
        elif self.communicator.size == 1 and not gradient.is_cpu:
            return gradient  # a rank alone does not ask its accelerator what the values are
        self._arrived.take_sample(parameter, gradient)
        return gradient

    def _announce(self) -> None:
        """Tell ranks that have joined of this step, once, before its first exchange."""
        # Once, because backward may exchange other things between the sums.
        if self._of_all and not self._announced:
            self._announced = True
            number = self._layout.number_in(self.communicator)
            announce(self.communicator, {"kind": "step", "number": number})

    def launch_all(self) -> bool:
        self._prepare()
        if not self._arranged:
            return False
        self._launch()
        self._passes_left = dict.fromkeys(self._passes_left, 0)  # a later gradient is an error
        return not self._layout.is_late(self.communicator)

    def _launch(self, *, in_backward: bool = False) -> None:
        """Launch the remaining buckets; in backward only the next complete ones, if any."""
        buckets = self._layout.buckets
        if in_backward and self._layout.is_late(self.communicator):
            return
        for bucket in buckets[self._launched :]:
            if in_backward and bucket.expected:
                break  # those behind it wait, too: all ranks launch in one order
            if not self._launched:
                self._announce()
                if text := self._layout.description(self.communicator, self.parameters):
                    self.communicator.agree(text)
            self.concerns_peers = True
            self._launched += 1
            trailer: Sequence[float] = ()
            if self._launched == len(buckets):
                bucket.complete()  # so that the trailer counts its gradients as well
                trailer = [self._change(), *(n for each in buckets for n in each.present)]
            bucket.launch(self.communicator, trailer)

    def finish(self, trained: list[torch.Tensor]) -> None:
        self._arrived.check_untouched()
        self._arrived.check_trained(trained, self.parameters)
        self._prepare()
        change = self._change()
        if self._arranged:
            if self._layout.is_late(self.communicator):
                # All are on their way from an accelerator before the first is waited for.
                for bucket in self._layout.buckets:
                    bucket.complete()
            self._launch()
            self._arrived.check_sample()  # only now: it waits for an accelerator
            with timeline.span("REDUCE_GRADIENTS"):
                change, self.found_sparse = self._layout.deliver()
        if self._of_all:
            agree(self.context, change)

    def _change(self) -> float:
        return change_of(self.context, joined=is_joined(self.communicator)) if self._of_all else 0.0


def gather_sparse(group: Group, parameters: Sequence[torch.Tensor], op: Op) -> None:
    """Reduce the gradients of parameters by the rows that any rank has, after backward."""
    gradients = []
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None:  # all ranks take part, this one without rows
            values = parameter.detach().new_empty(0, *parameter.shape[1:])
            rows = torch.empty(1, 0, dtype=torch.int64)
            sizes = parameter.shape
            gradient = torch.sparse_coo_tensor(rows, values, sizes, check_invariants=False)
        elif gradient.layout is torch.strided:
            gradient = gradient.to_sparse(1)
        gradients.append(gradient)
    total = SparseAllreduce(gradients, op)
    total.pattern = f"sum of the sparse gradients of an optimizer\n{total.pattern}"
    for parameter, gradient in zip(parameters, begin(group, total).wait(), strict=True):
        parameter.grad = gradient.coalesce()


def reduce_apart(group: Group, parameters: Sequence[torch.Tensor], options: ReduceOptions) -> None:
    """Reduce gradients by Adasum, or as a compression of the user's has them, after backward."""
    compression, factor = options.compression, options.predivide
    counts = torch.tensor([float(parameter.grad is not None) for parameter in parameters])
    # First who has which gradient: a parameter that no rank has used keeps None.
    begin(group, Allreduce([counts], [counts], Op.SUM)).wait()
    used = [p for p, count in zip(parameters, counts.tolist(), strict=True) if count]
    gradients = [
        torch.zeros_like(p, requires_grad=False) if p.grad is None else p.grad.detach()
        for p in used
    ]
    dense = [g if g.layout is torch.strided else g.to_dense() for g in gradients]
    pairs = [compression.compress(gradient) for gradient in dense]
    outputs = [torch.empty_like(compressed) for compressed, _ in pairs]
    sent = [as_real(compressed) for compressed, _ in pairs]
    results = [*map(as_real, outputs)]
    begin(group, Allreduce(sent, results, options.op, 1.0 / factor, factor)).wait()
    for parameter, output, (_, ctx) in zip(used, outputs, pairs, strict=True):
        parameter.grad = compression.decompress(output, ctx)
