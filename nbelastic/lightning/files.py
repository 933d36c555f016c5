"""Files that callbacks and loggers of Lightning wrote in a step that has failed."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

from lightning.fabric.utilities.cloud_io import get_filesystem
from lightning.pytorch.callbacks import ModelCheckpoint


class ModelFiles:
    """Files of ``ModelCheckpoint``, written in a failed step.

    Where the step is repeated, they are written again, under the same names. Those that are not are
    removed at the next commit.
    """

    def __init__(self, trainer: Any) -> None:
        callbacks = trainer.checkpoint_callbacks
        self._trainer = trainer
        self._callbacks = [each for each in callbacks if isinstance(each, ModelCheckpoint)]
        self.taken_back: set[str] = set()
        for each in self._callbacks:
            vars(each)["file_exists"] = self._exists

    def known(self) -> set[str]:
        """Return the paths that callbacks know of."""
        found: set[str] = set()
        for each in self._callbacks:
            found.update((each.last_model_path, each.best_model_path, *each.best_k_models))
        return found - {""}

    def _exists(self, path: str, trainer: Any) -> bool:
        known = trainer.is_global_zero and path not in self.taken_back
        mine = known and get_filesystem(path).exists(path)
        return bool(trainer.strategy.reduce_boolean_decision(mine, all=False))

    def committed(self) -> None:
        """Remove files written in a failed step, and not written again."""
        for path in self.taken_back - self.known() if self.taken_back else ():
            self._trainer.strategy.remove_checkpoint(path)
        self.taken_back = set()

    def close(self) -> None:
        """Give callbacks their own methods back."""
        for each in self._callbacks:
            vars(each).pop("file_exists", None)


def go_on_with_rows(logger: Any, step: int) -> None:
    """Continue a file of metrics on rank 0, without rows of steps that a failure has taken back."""
    path = Path(logger.log_dir) / "metrics.csv"
    rows: list[dict[str, Any]] = []
    if path.exists():
        with path.open(newline="") as file:
            rows = list(csv.DictReader(file))
    writer = logger.experiment  # it may remove the file
    names = list(rows[0]) if rows else []
    for each in (writer.metrics, rows):
        while each and str(each[-1]["step"]).isdigit() and int(each[-1]["step"]) >= step:
            each.pop()
        if each:
            break
    path.unlink(missing_ok=True)
    if rows:
        writer.metrics_keys = names
        with path.open("w", newline="") as file:
            out = csv.DictWriter(file, names)
            out.writeheader()
            out.writerows(rows)
