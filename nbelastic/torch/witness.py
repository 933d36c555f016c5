"""A gradient of which some values are kept, to see whether somebody has worked on it.

Not everything counts as a change in place (``GradScaler`` does not).
"""

from __future__ import annotations

import torch

__all__ = ["Witness"]

VALUES = 16


class Witness:
    """The first values of a parameter's gradient, as backward has made them.

    Parameters
    ----------
    parameter : Tensor
        Whose.
    gradient : Tensor
        What is its gradient now.
    """

    def __init__(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        self.parameter = parameter
        self._sample = gradient.detach().flatten()[:VALUES].clone()
        self._verdict: torch.Tensor | bool | None = None

    def compare(self, gradient: torch.Tensor) -> bool:
        """Compare with what the gradient is by now; return whether the answer is known at once."""
        some, now = self._sample, gradient.detach().flatten()[:VALUES]
        if some.is_cpu:
            self._verdict = torch.equal(some, now) or bool(((some == now) | now.isnan()).all())
        else:
            self._verdict = torch.isclose(some, now, rtol=0, atol=0, equal_nan=True).all()
        return some.is_cpu

    def contradicts(self) -> bool:
        """Return whether the last comparison found a change; an accelerator is waited for."""
        verdict, self._verdict = self._verdict, None
        return verdict is not None and not verdict
