"""Batch of a step: its rows and micro-batches, and whether its bits are exact."""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass
from typing import Literal

import torch

from nbelastic.data.sources.row_source import is_count
from nbelastic.errors import OptionError


@dataclass(frozen=True)
class Batch:
    """Global batch of each step, the same for every number of ranks.

    A step consists of ``global_batch / micro`` micro-batches, which the ranks share out. The number
    is fixed for the whole training. Choose one with many divisors, such as 8, 12 or 24, and not
    below the largest number of ranks. Ranks that do not divide it have blocks that differ by one.

    Parameters
    ----------
    global_batch : int
        Rows of a step.
    micro : int, optional
        Rows of a micro-batch; divides `global_batch`. By default each of the job's ``max_np`` ranks
        has one micro-batch.
    exact : {"auto", True, False}, default "auto"
        Whether gradients are added in one order for every number of ranks, so that parameters have
        the same bits. With True, what would change bits is refused: ranks whose processors compute
        other bits, buffers that are no averages. With ``"auto"`` training goes on, and the history
        has a warning. With False, gradients are added in the order of ranks.

    Raises
    ------
    OptionError
        A value cannot be used.

    Examples
    --------
    >>> Batch(256, micro=32).micro_batches
    8
    """

    global_batch: int
    micro: int | None = None
    exact: bool | Literal["auto"] = "auto"

    def __post_init__(self) -> None:
        for name, value in (("global_batch", self.global_batch), ("micro", self.micro)):
            if name == "micro" and value is None:
                continue
            if not is_count(value):
                raise OptionError(f"Batch({name}={value!r}): must be a whole number, at least 1")
        if self.micro is not None and self.global_batch % self.micro:
            raise OptionError(
                f"Batch({self.global_batch}, micro={self.micro}): the micro-batch must divide the "
                "global batch"
            )
        if not isinstance(self.exact, bool) and self.exact != "auto":
            raise OptionError(f"Batch(exact={self.exact!r}): must be True, False or 'auto'")

    @property
    def micro_batches(self) -> int:
        """Number of micro-batches of a step; known if `micro` is."""
        return self.global_batch // (self.divided_by(None).micro or 1)

    def divided_by(self, max_np: int | None) -> Batch:
        """Return this batch with `micro` given: by default for `max_np` micro-batches.

        Raises
        ------
        OptionError
            It is not given, and `max_np` is not known or does not divide the batch.
        """
        if self.micro is not None:
            return self
        if max_np is None or self.global_batch % max_np:
            known = "no max_np" if max_np is None else f"max_np={max_np}, which does not divide it"
            raise OptionError(
                f"Batch({self.global_batch}): pass micro=, the rows of a micro-batch. Without it "
                f"there is one micro-batch for each of max_np ranks, and this job has {known}"
            )
        return Batch(self.global_batch, self.global_batch // max_np, self.exact)


@functools.cache
def kernel_fingerprint() -> str:
    """Return a digest of a small fixed program's results, with torch's version and the CPU's kind.

    Processors of different kinds (AVX2, AVX-512), and versions of torch, round differently in some
    operations. It takes ten milliseconds.
    """
    # On one thread, since results depend on the number of threads, which is compared by itself.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        digest = hashlib.blake2b(digest_size=8)
        for tensor in _program():
            digest.update(tensor.contiguous().numpy().tobytes())
    finally:
        torch.set_num_threads(threads)
    kind = torch.backends.cpu.get_cpu_capability().lower()
    return f"torch {torch.__version__} {kind} {digest.hexdigest()}"


def _program() -> list[torch.Tensor]:
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        generator = torch.Generator().manual_seed(7)
        noise = functools.partial(torch.randn, generator=generator, dtype=torch.float32)
        images, kernel = noise(4, 3, 17, 17), noise(8, 3, 3, 3).requires_grad_()
        rows, weight = noise(33, 801), noise(65, 801).requires_grad_()
        features = torch.nn.functional.conv2d(images, kernel, padding=1)
        scores = torch.nn.functional.linear(rows, weight)
        normed = torch.nn.functional.layer_norm(scores, (65,))
        loss = (
            features.square().mean()
            + torch.logsumexp(normed, 1).sum()
            + scores.exp().log1p().mean()
        )
        loss.backward()  # type: ignore[no-untyped-call]
        assert kernel.grad is not None
        assert weight.grad is not None
        values = [images, features, scores, normed, loss, kernel.grad, weight.grad]
        values += [rows @ rows.T, rows.sum(0), rows.double().exp().sum(1), torch.tanh(rows)]
        return [value.detach() for value in values]
