"""Metrics of all ranks, summed while an epoch goes on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from nbelastic.collectives import Op
from nbelastic.elastic.context import current

if TYPE_CHECKING:
    from nbelastic.keras.backends import Backend

__all__ = ["MetricSums"]


class MetricSums:
    """Sums over all ranks of the variables of a model's metrics.

    Metrics of Keras are made of sums (``total`` and ``count``), as their variables declare. Each
    rank adds what it has added since the last exchange. So an epoch's metrics are those of all
    samples, whichever ranks have seen them, and are lost with none of them. Variables that declare
    no sum stay a rank's own.

    Parameters
    ----------
    model : keras.Model
        The model.
    backend : Backend
        Reads and writes its variables.
    """

    def __init__(self, model: Any, backend: Backend) -> None:
        self._model = model
        self._backend = backend
        self._base: torch.Tensor | None = None

    def _variables(self) -> list[Any]:
        variables = self._model.metrics_variables
        return [each for each in variables if getattr(each, "aggregation", "sum") == "sum"]

    def _present(self, variables: list[Any]) -> torch.Tensor:
        values = self._backend.read(variables)
        flat = [each.detach().reshape(-1).to("cpu", torch.float64) for each in values]
        return torch.cat(flat) if flat else torch.zeros(0, dtype=torch.float64)

    def _write(self, variables: list[Any], flat: torch.Tensor) -> None:
        values = self._backend.read(variables)
        parts = flat.split([each.numel() for each in values])
        pairs = zip(parts, values, strict=True)
        self._backend.write(variables, [p.reshape(v.shape).to(v.dtype) for p, v in pairs])

    def start(self, known: list[np.ndarray[Any, Any]]) -> None:
        """Begin with sums that all ranks have; without any, with those of a new epoch."""
        variables = self._variables()
        if known:
            flat = torch.from_numpy(np.concatenate([each.ravel() for each in known]))
            present = self._present(variables)
            if flat.numel() == present.numel():
                self._write(variables, flat)
        self._base = self._present(variables)

    def start_at_zero(self) -> None:
        """Begin with what this rank has by itself, of which others know nothing."""
        self._base = None

    def exchange(self, stop: bool) -> tuple[list[np.ndarray[Any, Any]], bool]:
        """Add up over all ranks, which call this together.

        Returns the sums, and whether `stop` was set on any rank. A word on coming changes of the
        membership travels with them.
        """
        self._backend.settle(self._model)
        context = current()
        variables = self._variables()
        present = self._present(variables)
        base = self._base
        if base is None or base.numel() != present.numel():  # metrics that were built meanwhile
            base = torch.zeros_like(present)
        flags = torch.tensor([float(stop), float(context.change_flag())], dtype=torch.float64)
        flat = torch.cat([present - base, flags])
        communicator = context.communicator()
        if communicator.size > 1:
            communicator.current_operation = "the sum of Keras' metrics"
            communicator.allreduce(flat, Op.SUM)
        total = base + flat[:-2]
        if communicator.size > 1 and total.numel():
            self._write(variables, total)
            total = self._present(variables)  # rounded as the variables are
        self._base = total
        context.agree(bool(flat[-1]))
        return [total.numpy()], bool(flat[-2])
