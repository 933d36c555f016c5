"""Exchange of numbers in each step of micro-batches, and checks of them."""

from __future__ import annotations

import collections
import dataclasses
import itertools
from typing import TYPE_CHECKING

import torch

from nbelastic.collectives import Op
from nbelastic.errors import CollectiveError, NbelasticError, RanksDisagree

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from nbelastic.collectives import Communicator

_DIGEST_LIMIT = 1 << 52


@dataclasses.dataclass
class Trailer:
    """Numbers that ranks sum in each step of micro-batches, along with the gradients.

    Each number of one rank alone has a place of its own, with zeros from the other ranks. So its
    sum is exact for every number of ranks.
    """

    flags: Sequence[float]
    deviating: Sequence[float]  # whether the rank cannot promise the same bits
    rows: Sequence[float]  # taken so far, for the ledger
    weights: Sequence[float]  # of all micro-batches
    there: Sequence[float]  # for each parameter whether it has a gradient; SPARSE for a sparse one
    places: Sequence[float]  # of each rank three numbers: see check_places
    times: Sequence[float]  # seconds that each rank takes for a micro-batch
    digests: Sequence[float]  # of each rank's parameters, in some steps; else none

    def summed(self, communicator: Communicator) -> Trailer:
        """Return the sums over all ranks, whose trailers are equally long."""
        mine = [float(number) for values in vars(self).values() for number in values]
        numbers = torch.tensor(mine, dtype=torch.float64)
        communicator.allreduce(numbers, Op.SUM)
        left = iter(numbers.tolist())
        return Trailer(*(list(itertools.islice(left, len(v))) for v in vars(self).values()))


def at_rank(rank: int, size: int, numbers: Sequence[float]) -> list[float]:
    """Return numbers of this rank at its place, and zeros at those of the others."""
    zeros = [0.0] * len(numbers)
    return [n for each in range(size) for n in (numbers if each == rank else zeros)]


def parameter_digest(parameters: Iterable[torch.Tensor]) -> int:
    """Return a number of 52 bits that one flipped bit in any parameter changes."""
    total = 0
    for number, parameter in enumerate(parameters):
        words = parameter.detach().contiguous().view(-1).view(torch.uint8)
        whole = words.numel() // 4 * 4
        value = int(words[:whole].view(torch.int32).sum(dtype=torch.int64))
        value += int(words[whole:].sum(dtype=torch.int64))
        total = (total * 31 + value + number) % _DIGEST_LIMIT
    return total


def check_places(places: Sequence[tuple[float, float, float]]) -> None:
    """Refuse to add up the gradients of different steps.

    Each rank has epoch, step, and a digest of the order of rows and of the blocks of all ranks.
    """
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
    """Refuse ranks whose parameters are not those of most ranks.

    A rank that differs has an NbelasticError, because its memory or its processor may be at fault.
    The others have a CollectiveError, and go on without it. If no digest is that of most ranks, all
    have RanksDisagree.
    """
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
        raise NbelasticError(text)
    raise CollectiveError(text)
