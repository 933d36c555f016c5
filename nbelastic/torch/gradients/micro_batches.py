"""Reduction of the gradients of a step of micro-batches.

The gradient of a step is ``Σ w·g / Σ w`` over its V micro-batches. Each rank multiplies a gradient
by its weight as it arrives, and adds it to those before along the tree
(:mod:`nbelastic.collectives.reduction_tree`), while backward runs. ``synchronize()`` then forms the
sums over the ranks along the same tree. So a gradient has the same bits for every number of ranks.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
from collections.abc import Iterable, Sequence

import torch

from nbelastic.collectives import Communicator, Op
from nbelastic.elastic.ranks.context import Context
from nbelastic.elastic.ranks.step_share import StepShare
from nbelastic.errors import CollectiveError, NbelasticError, RanksDisagree
from nbelastic.torch.compression import Compression
from nbelastic.torch.gradients.layout import Layout
from nbelastic.torch.gradients.step import GradientStep, agree, change_of
from nbelastic.torch.gradients.tree_sums import MicroBatchSum, sum_over_ranks
from nbelastic.torch.ops.coordination.coordination import announce

# Steps of a generation from one comparison of parameters to the next. The first is compared.
WITNESS_EVERY = 100

_DIGEST_LIMIT = 1 << 52  # exact as a float64, as which digests travel


class MicroBatchReduction(GradientStep):
    """Progress of a step of micro-batches, in the place of a `ReductionStep`.

    ``parameter.grad`` is None between two micro-batches. After the last one of this rank it is what
    the last gradient was added to, so that a change by the user is found.
    """

    share: StepShare

    def __init__(self, layout: Layout, context: Context, parameters: list[torch.Tensor]) -> None:
        options, share = layout.options, context.share
        assert share is not None
        plain = options.op is Op.AVERAGE and options.compression is Compression.none
        if not plain or options.predivide != 1.0 or not options.of_all:
            raise ValueError(
                "an optimizer with op=, compression=, gradient_predivide_factor= or process_set= "
                "cannot be used with a Loader: the gradient of a step is the weighted mean of its "
                "micro-batches on all ranks. Leave these out, or use an ElasticSampler"
            )
        super().__init__(layout, context, parameters)
        announce(self.communicator, "a step over a Loader")
        self.share = share
        self._sums = {id(parameter): MicroBatchSum(share) for parameter in self.parameters}
        self._place: tuple[int, tuple[int, int]] | None = None  # micro-batch, and part of it

    @torch.no_grad()
    def arrive(self, parameter: torch.Tensor) -> None:
        number = self.share.number
        if self.share.over or number is None:
            raise RuntimeError(
                "backward() was called without a micro-batch of the step that has begun last; "
                "iterate over the step, and call it in that loop: `for x, y in step:`. To train on "
                "two loaders in one step, iterate over both steps together: `for (x, y), (u,) in "
                "zip(step, other_step):`, with one backward() for both losses. "
                "`next(iter(loader))` ends the loop over the loader at once; keep "
                "`steps = iter(loader)`, and call `next(steps)`"
            )
        if (number, self.share.part) != self._place:
            self._place, self.has_gradients = (number, self.share.part), True
            self._passes_left = {}
            self.share.at_end = (*self.share.at_end, self._check_seen)
        total = self._sums.get(id(parameter))
        if total is None:
            return  # not this optimizer's any more; or check() finds out
        left = self._passes_left.get(id(parameter), self._passes) - 1
        if left < 0 or parameter.grad is None:
            raise RuntimeError(
                f"a gradient of {self._arrived.name(parameter)} was computed more than "
                f"backward_passes_per_step={self._passes} times in one micro-batch; increase it, "
                "or freeze parameters in passes that are for another optimizer: "
                "parameter.requires_grad_(False)"
            )
        self._passes_left[id(parameter)] = left
        if not total and self._arrived.is_delivered(parameter):
            raise RuntimeError(
                f"the gradient of {self._arrived.name(parameter)} was added to that of the "
                "step before; call optimizer.zero_grad() before the loop over the step"
            )
        gradient = parameter.grad
        if gradient.requires_grad:  # create_graph=True
            gradient = gradient.detach().clone()
        if gradient.layout is not torch.strided:
            gradient = gradient.to_dense()
        parameter.grad = None  # the next micro-batch must not add to it
        weight = self.share.part_weight
        if weight == 0.0:
            return  # whatever its gradient: a mean over nothing is not a number
        if weight != 1.0:
            gradient.mul_(weight)
        gradient = total.add(number, gradient, whole=self.share.is_whole and left == 0)
        if self.share.is_last and left == 0:
            parameter.grad = gradient
            self._arrived.note(parameter, gradient)
            if self._arrived.sampled is None:
                self._arrived.take_sample(parameter, gradient)

    def _check_seen(self) -> None:
        """Refuse assigned gradients, which no hook sees, so that the sum would lack them."""
        for parameter in self.parameters:
            if parameter.grad is None or id(parameter) in self._arrived.noted:
                continue  # `ArrivedGradients` compares what it has noted
            if self._arrived.is_delivered(parameter):
                continue  # of the step before, without zero_grad()
            raise RuntimeError(
                f"{self._arrived.name(parameter)} has a gradient that was assigned and not "
                "computed by backward(), as with torch.autograd.grad or torch.func.grad. Over a "
                "Loader only what backward() accumulates is summed. Pass your gradients on by it, "
                "in the loop over the step: `torch.autograd.backward(parameters, gradients)`; or "
                "train without a Loader"
            )

    def finish(self, trained: list[torch.Tensor]) -> None:
        if self.share.missing:
            done, count = len(self.share.weights), len(self.share.expected)
            raise RuntimeError(
                f"the gradients of a step were asked for after {done} of this rank's {count} "
                "micro-batches; call optimizer.step() after the loop over the step"
            )
        self._arrived.check_untouched()
        self._arrived.check_sample()
        self._check_seen()
        self.share.finish()
        self._arrived.check_trained(trained, self.parameters)
        self.concerns_peers = self.communicator.size > 1  # from here on they wait for this rank
        counts, weight = self._exchange_trailer()
        for parameter in self.parameters:
            parameter.grad = None
        present = [p for p, count in zip(self.parameters, counts, strict=True) if count]
        sums = [self._sums[id(parameter)] for parameter in present]
        totals = sum_over_ranks(self.communicator, self.share, sums, present)
        if totals and weight != 1.0:
            torch._foreach_div_(totals, weight)
        for parameter, total in zip(present, totals, strict=True):
            parameter.grad = total
        self.concerns_peers = False

    def _exchange_trailer(self) -> tuple[Sequence[float], float]:
        """Return on how many ranks each gradient is, and the sum of all weights."""
        share, size, rank = self.share, self.communicator.size, self.communicator.rank
        change = change_of(self.context)
        weights = [share.weights.get(number, 0.0) for number in range(share.micro_batches)]
        there = [bool(self._sums[id(parameter)]) for parameter in self.parameters]
        if size == 1:
            agree(self.context, change)
            share.seen = share.taken
            return there, math.fsum(weights)
        steps = self._arrived.steps_before(self.generation)
        compares = share.exact and steps % WITNESS_EVERY == 0
        own = Trailer(
            change=[change],
            deviating=[share.deviates],
            rows=[share.taken],
            weights=weights,
            there=there,
            places=at_rank(rank, size, share.place),
            times=at_rank(rank, size, [share.seconds]),
            digests=at_rank(rank, size, [parameter_digest(self.parameters)] if compares else []),
        )
        of_all = own.summed(self.communicator)
        agree(self.context, *of_all.change)
        share.seen = int(of_all.rows[0])
        (deviating,) = of_all.deviating
        share.others_deviate = deviating > share.deviates
        places = of_all.places
        check_places(list(zip(places[::3], places[1::3], places[2::3], strict=True)))
        if compares and not deviating:
            check_witness(of_all.digests, rank)
        share.times = tuple(of_all.times)
        return of_all.there, math.fsum(of_all.weights)  # exact, in any order


@dataclasses.dataclass
class Trailer:
    """Numbers that ranks sum in each step of micro-batches, along with the gradients."""

    change: Sequence[float]  # see change_of()
    deviating: Sequence[float]  # whether the rank cannot promise the same bits
    rows: Sequence[float]  # taken so far, for the ledger
    weights: Sequence[float]  # of all micro-batches
    there: Sequence[float]  # for each parameter whether it has a gradient
    places: Sequence[float]  # of each rank three numbers: see check_places
    times: Sequence[float]  # seconds that each rank takes for a micro-batch
    digests: Sequence[float]  # of each rank's parameters, in some steps; else none

    def summed(self, communicator: Communicator) -> Trailer:
        """Return the sums over all ranks, whose trailers are equally long."""
        mine = [float(number) for values in vars(self).values() for number in values]
        numbers = torch.tensor(mine, dtype=torch.float64)  # counts and digests are exact in it
        communicator.allreduce(numbers, Op.SUM)
        left = iter(numbers.tolist())
        return Trailer(*(list(itertools.islice(left, len(v))) for v in vars(self).values()))


def at_rank(rank: int, size: int, numbers: Sequence[float]) -> list[float]:
    """Return this rank's numbers at its place, and zeros at the places of other ranks."""
    zeros = [0.0] * len(numbers)
    return [n for each in range(size) for n in (numbers if each == rank else zeros)]


def parameter_digest(parameters: Iterable[torch.Tensor]) -> int:
    """Return a number of 52 bits, changed by a single flipped bit in any parameter."""
    total = 0
    for number, parameter in enumerate(parameters):
        words = parameter.detach().contiguous().view(-1).view(torch.uint8)
        whole = words.numel() // 4 * 4
        value = int(words[:whole].view(torch.int32).sum(dtype=torch.int64))
        value += int(words[whole:].sum(dtype=torch.int64))
        total = (total * 31 + value + number) % _DIGEST_LIMIT
    return total


def check_places(places: Sequence[tuple[float, float, float]]) -> None:
    """Refuse to add up gradients of different steps; a place is epoch, step, and digest."""
    if len(set(places)) == 1:
        return
    if len({place[:2] for place in places}) == 1:
        raise RanksDisagree(
            "the loaders of ranks deal rows in different orders, or to different ranks; give all "
            "ranks the same dataset, seed and balance, make the loader part of the state, and "
            "commit on all ranks in the same steps"
        )
    said = ", ".join(
        f"rank {rank}: step {int(step)} of epoch {int(epoch)}"
        for rank, (epoch, step, _) in enumerate(places)
    )
    raise RanksDisagree(
        f"ranks are at different steps ({said}). All ranks call optimizer.step() in the same "
        "steps, and the loader must be part of the state"
    )


def check_witness(digests: Sequence[float], rank: int) -> None:
    """Refuse ranks whose parameters are not those of most ranks."""
    counts = collections.Counter(digests)
    if len(counts) == 1:
        return
    (common, count), *_ = counts.most_common()
    said = ", ".join(f"rank {r}: {int(digest):013x}" for r, digest in enumerate(digests))
    if 2 * count <= len(digests):
        raise RanksDisagree(
            f"ranks have different parameters, and none those of most ({said}). Something other "
            "than the optimizer has changed them, or a rank computes other bits; see "
            "Batch(exact=...)"
        )
    differing = [number for number, digest in enumerate(digests) if digest != common]
    text = f"the parameters of rank {', '.join(map(str, differing))} are not those of most ({said})"
    if rank in differing:
        raise NbelasticError(text)  # its memory or its processor may be at fault
    raise CollectiveError(text)  # goes on without it
