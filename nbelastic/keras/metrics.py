"""Metrics of all ranks, summed while an epoch goes on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from nbelastic.collectives import Op
from nbelastic.elastic.ranks.context import current

if TYPE_CHECKING:
    from nbelastic.keras.backends import Backend


class MetricSums:
    """Sums over all ranks of the variables of a model's metrics.

    Metrics of Keras are made of sums (``total`` and ``count``), as their variables declare. Each
    rank adds what it has added since the last exchange. So an epoch's metrics are those of all
    samples, whichever ranks have seen them, and are lost with none of them. Variables that declare
    no sum stay a rank's own.
    """

    def __init__(self, model: Any, backend: Backend) -> None:
        self._model = model
        self._backend = backend
        self._base: torch.Tensor | None = None
        self._variables: list[Any] = []

    def _look(self) -> None:
        """Look for the variables, which exist once the model has seen a batch."""
        variables = self._model.metrics_variables
        self._variables = [e for e in variables if getattr(e, "aggregation", "sum") == "sum"]

    def _present(self) -> torch.Tensor:
        values = self._backend.read(self._variables)
        flat = [each.detach().reshape(-1).to("cpu", torch.float64) for each in values]
        return torch.cat(flat) if flat else torch.zeros(0, dtype=torch.float64)

    def _write(self, flat: torch.Tensor) -> None:
        values = self._backend.read(self._variables)
        parts = torch.split(flat, [each.numel() for each in values])
        pairs = zip(parts, values, strict=True)
        self._backend.write(self._variables, [p.reshape(v.shape).to(v.dtype) for p, v in pairs])

    def start(self, known: list[np.ndarray[Any, Any]]) -> None:
        """Begin with sums that all ranks have; without any, with those of a new epoch."""
        self._look()
        if known:
            flat = torch.from_numpy(np.concatenate([each.ravel() for each in known]))
            if flat.numel() == self._present().numel():
                self._write(flat)
        self._base = self._present()

    def start_at_zero(self) -> None:
        """Begin with what this rank has by itself, of which others know nothing."""
        self._look()
        self._base = torch.zeros_like(self._present())

    def exchange(self, stop: bool) -> tuple[list[np.ndarray[Any, Any]], bool]:
        """Add up over all ranks, which call this together.

        Returns the sums, and whether `stop` was set on any rank. A word on coming changes of the
        membership travels with them.
        """
        self._backend.settle(self._model)
        context, base = current(), self._base
        assert base is not None
        present = self._present()
        flags = torch.tensor([float(stop), float(context.change_flag())], dtype=torch.float64)
        flat = torch.cat([present - base, flags])
        communicator = context.communicator()
        total = present
        if communicator.size > 1:
            communicator.current_operation = "the sum of Keras' metrics"
            communicator.allreduce(flat, Op.SUM)
            self._write(base + flat[:-2])
            total = self._present()  # rounded as the variables are
        self._base = total
        stops, changes = flat[-2:].tolist()
        context.agree(bool(changes))
        return [total.numpy()], bool(stops)
