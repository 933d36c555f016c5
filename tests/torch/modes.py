"""The ways in which gradients go to be reduced; by turns, small as the tests' models are."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from nbelastic.collectives import Capabilities, Communicator, Op
from nbelastic.collectives.buffers import Delivered
from nbelastic.elastic.ranks.context import Context
from nbelastic.torch.gradients import groups, layout
from tests.torch.fakes import NotedStaging

# early: buckets are launched while backward runs; late: when they are waited for; staged: as if
# gradients were on an accelerator; device: as if the communicator reduced there; in place: late, as
# large buckets go where the communicator reduces many tensors at once.
MODES = ["early", "late", "staged", "device", "in place"]


def set_mode(
    monkeypatch: pytest.MonkeyPatch, mode: str, first_bytes: int, bucket_bytes: int
) -> None:
    """Have buckets of so many bytes, and gradients go as `mode` says."""
    monkeypatch.setattr(layout, "FIRST_BUCKET_BYTES", first_bytes)
    monkeypatch.setattr(layout, "BUCKET_BYTES", bucket_bytes)
    changes: dict[str, Any] = {"overlaps": mode not in ("late", "in place")}
    if mode == "in place":
        monkeypatch.setattr(groups, "MOST_SHARED_BYTES", -1)
        monkeypatch.setattr(Communicator, "allreduce_coalesced_async", one_by_one)
        changes["coalesces"] = True
    if "staged" in mode:
        monkeypatch.setattr(groups, "Staging", NotedStaging)
    if "staged" in mode or "device" in mode:
        monkeypatch.setattr(groups, "is_accelerator", lambda device: True)
    if "device" in mode:
        changes["devices"] = frozenset({"cpu"})
    monkeypatch.setattr(Communicator, "capabilities", Capabilities(**changes))


def one_by_one(communicator: Communicator, tensors: list[torch.Tensor], op: Op) -> Delivered:
    *others, last = [communicator.allreduce_async(each, op) for each in tensors]
    return Delivered(last, lambda: [each.wait() for each in others])


def only(mode: str) -> pytest.MarkDecorator:
    """Return what has a test run in one way only."""
    return pytest.mark.parametrize("mode", [mode], indirect=True)


def set_overlaps(context: Context, overlaps: bool) -> None:
    """Have a rank's communicator sum during backward, or not."""
    communicator = context.communicator()
    communicator.capabilities = dataclasses.replace(communicator.capabilities, overlaps=overlaps)
