"""Reduction of gradients in one step: the contract, and the plain step."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from nbelastic.collectives import Communicator, Op
from nbelastic.elastic.ranks.context import Context
from nbelastic.elastic.ranks.groups import Group
from nbelastic.elastic.ranks.step_share import StepShare
from nbelastic.elastic.ranks.timeline import timeline
from nbelastic.errors import CollectiveError
from nbelastic.torch.gradients.arrived import ArrivedGradients
from nbelastic.torch.gradients.layout import Layout, LayoutAgreement, turns_of
from nbelastic.torch.gradients.options import ReduceOptions
from nbelastic.torch.gradients.tree_sums import of_rows
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

    def __init__(
        self, context: Context, communicator: Communicator, parameters: list[torch.Tensor]
    ) -> None:
        self.context = context
        self.communicator = communicator
        self.generation = context.generation
        self.parameters = parameters

    @property
    def has_gradients(self) -> bool:
        """Whether a gradient has arrived."""
        raise NotImplementedError

    @property
    def incomplete(self) -> bool:
        """Whether a gradient has had some of its ``backward_passes_per_step``, and not all."""
        return False

    @property
    def concerns_peers(self) -> bool:
        """Whether other ranks may be waiting for this rank's part of the step."""
        raise NotImplementedError

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
    """Progress of one step: passes counted, buckets launched.

    A step of a process set, not `of_all`, concerns no rank that has joined, and carries no flags.
    """

    def __init__(
        self,
        context: Context,
        communicator: Communicator,
        parameters: list[torch.Tensor],
        arrived: ArrivedGradients,
        passes: int,
        agreement: LayoutAgreement,
        launch_other: Callable[[int], None],  # the sums of the optimizer with a number
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
        self._launch_other = launch_other
        self._of_all = of_all
        self._announced = False
        if agreement.holds(communicator, parameters):
            self._prepare()

    @property
    def has_gradients(self) -> bool:
        return bool(self._arrived.noted) or self._arrived.any_sparse

    @property
    def incomplete(self) -> bool:
        passes = self._passes
        return passes > 1 and any(0 < left < passes for left in self._passes_left.values())

    def _prepare(self) -> None:
        """Agree with the other ranks before the sums, unless already done."""
        agreement, communicator = self._agreement, self.communicator
        if self.layout is not None or communicator.size == 1:
            return
        if not agreement.holds(communicator, self.parameters):
            self._announce()  # before the first exchange, in which a joined rank takes part
        self.layout = agreement.arrange(communicator, self.parameters)
        for bucket in self.layout.buckets:
            bucket.begin()

    def arrive(self, parameter: torch.Tensor) -> None:
        arrived, layout, key = self._arrived, self.layout, id(parameter)
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
        if gradient.layout is not torch.strided:
            arrived.streams.join(gradient.device, [])
            gradient = arrived.present(parameter)
            if gradient is None:
                return
        if layout is None:
            arrived.time()
        if arrived.sampled is None:
            gradient = self._sample(parameter, gradient)
        arrived.note(parameter, gradient)
        if layout is not None and layout.bucket_of[key].arrive() and not layout.after_backward:
            self._launch(layout, in_backward=True)

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
            "optimizer's parameters in that pass: parameter.requires_grad_(False). If other ranks "
            "called another optimizer's step() after it, and this one before, keep to one order"
        )

    def _sample(self, parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        """Sample a gradient that can cheaply stay out of its bucket; return the gradient."""
        if self.layout is not None:
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
            number = self._agreement.number_in(self.communicator)
            announce(self.communicator, {"kind": "step", "number": number})

    def launch_all(self) -> bool:
        self._prepare()
        layout = self.layout
        if layout is None:
            return False
        self._launch(layout)
        self._passes_left = dict.fromkeys(self._passes_left, 0)  # a later gradient is an error
        return not layout.after_backward

    def _take_turn(self, *, in_backward: bool = False) -> bool:
        """Return whether the sums of this optimizer come next; in step() begin others before."""
        text = self._agreement.description(self.communicator, self.parameters)
        turns, number = turns_of(self.communicator), self._agreement.number
        vote = -1 if is_joined(self.communicator) else in_backward * number  # in step() 0
        self._announce()
        while text and turns.holder != number:
            if not turns.holder:
                turns.choose(self.communicator, number, text, vote)
            elif in_backward:
                return False
            else:
                self._launch_other(turns.holder)  # which ends its turn
        return True

    def _launch(self, layout: Layout, *, in_backward: bool = False) -> None:
        """Launch the remaining buckets; in backward only the next complete ones."""
        for bucket in layout.buckets[self._launched :]:
            if in_backward and bucket.expected:
                break  # those behind it wait, too: all ranks launch in one order
            if not self._launched and not self._take_turn(in_backward=in_backward):
                break
            self._launched += 1
            trailer: Sequence[float] = ()
            if self._launched == len(layout.buckets):
                bucket.complete()  # so that the trailer counts its gradients as well
                trailer = layout.trailer(self._change())
            bucket.launch(self.communicator, trailer)
            if trailer:
                turns_of(self.communicator).holder = 0

    def finish(self, trained: list[torch.Tensor]) -> None:
        self._arrived.check_untouched()
        self._arrived.check_trained(trained, self.parameters)
        self._prepare()
        layout, context = self.layout, self.context
        if layout is None:
            if self._of_all:
                agree(context, self._change())
            return
        if layout.after_backward:
            # All are on their way from an accelerator before the first is waited for.
            for bucket in layout.buckets:
                bucket.complete()
        self._launch(layout)
        turns = turns_of(self.communicator)
        if self._agreement.number in turns.doubted:
            self._take_turn()  # as all ranks do, or nothing is delivered
            turns.doubted.discard(turns.holder)
            turns.holder = 0
        self._arrived.check_sample()  # only now: it waits for an accelerator
        with timeline.span("REDUCE_GRADIENTS"):
            change, self.found_sparse = layout.deliver()
        if self._of_all:
            agree(context, change)

    def _change(self) -> float:
        return change_of(self.context, joined=is_joined(self.communicator)) if self._of_all else 0.0

    @property
    def concerns_peers(self) -> bool:
        began = self._launched > 0 or bool(self._arrived.noted)
        return began and self.communicator.size > 1


class SeparateReduction:
    """Reduction after backward of gradients outside of buckets: sparse, or ``options.apart``."""

    def __init__(self, options: ReduceOptions, arrived: ArrivedGradients) -> None:
        # With sparse gradients, as far as all ranks know of them.
        self.parameters: list[torch.Tensor] = []
        self._options = options
        self._arrived = arrived

    def reduce(self, group: Group, trained: Sequence[torch.Tensor]) -> None:
        """Reduce the `trained` parameters' gradients outside the layout."""
        keys = {id(parameter) for parameter in self.parameters}
        sparse = [parameter for parameter in trained if id(parameter) in keys]
        if sparse:
            self._gather(group, sparse)
        if self._options.apart:
            self._reduce_each(group, [each for each in trained if id(each) not in keys])

    def _gather(self, group: Group, parameters: Sequence[torch.Tensor]) -> None:
        if not isinstance(self._options.op, Op):
            raise ValueError(
                f"the gradient of {self._arrived.name(parameters[0])} is sparse, and op=Adasum "
                "needs dense ones; pass sparse_as_dense=True"
            )
        gradients = []
        for parameter in parameters:
            gradient = parameter.grad
            if gradient is None:  # all ranks take part, this one without rows
                values = parameter.detach().new_empty(0, *parameter.shape[1:])
                gradient = of_rows(torch.empty(0, dtype=torch.int64), values, parameter.shape)
            elif gradient.layout is torch.strided:
                gradient = gradient.to_sparse(1)
            gradients.append(gradient)
        total = SparseAllreduce(gradients, self._options.op)
        total.pattern = f"sum of the sparse gradients of an optimizer\n{total.pattern}"
        for parameter, gradient in zip(parameters, begin(group, total).wait(), strict=True):
            parameter.grad = gradient.coalesce()

    def _reduce_each(self, group: Group, parameters: Sequence[torch.Tensor]) -> None:
        options = self._options
        compression, op, factor = options.compression, options.op, options.predivide
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
        sent = [compressed for compressed, _ in pairs]
        outputs = [torch.empty_like(compressed) for compressed in sent]
        real_sent, real_outputs = [*map(as_real, sent)], [*map(as_real, outputs)]
        begin(group, Allreduce(real_sent, real_outputs, op, 1.0 / factor, factor)).wait()
        for parameter, output, (_, ctx) in zip(used, outputs, pairs, strict=True):
            parameter.grad = compression.decompress(output, ctx)
