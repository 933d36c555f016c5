"""Fingerprint of the bits that this process computes."""

from __future__ import annotations

import functools
import hashlib

import torch


@functools.cache
def kernel_fingerprint() -> str:
    """Return a digest of a small fixed program, with the versions that it depends on.

    Processors of different kinds (AVX2, AVX-512), and versions of torch, round differently in some
    operations. Ranks with equal fingerprints compute equal bits, as far as ten milliseconds of
    common operations on the CPU can tell. They run on one thread, since results depend on the
    number of threads, which is compared by itself.
    """
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
