"""Gradients that are only noted when they arrive, once it is known in which order they do."""

from __future__ import annotations

import pytest
import torch

from nbelastic.elastic.ranks.context import activate
from nbelastic.torch.gradients import layout
from tests.torch.fakes import ChangingContext, TwinCommunicator
from tests.torch.training import distributed, loss_of

pytestmark = pytest.mark.usefixtures("small_buckets")


@pytest.fixture
def one_bucket(monkeypatch, small_buckets):
    monkeypatch.setattr(layout, "BUCKET_BYTES", 1 << 20)


def deferred_of(optimizer):
    """Return for how many parameters nothing but a note is made when their gradient arrives."""
    return sum(deferred for _, _, deferred in optimizer._reducer._hooks.values())


def trained(steps=3):
    """Return a model and its optimizer that have learned in which order gradients arrive."""
    model, optimizer = distributed()
    for step in range(steps):
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def test_most_gradients_are_only_noted_once_their_order_is_known():
    communicator = TwinCommunicator(generation=1)
    with activate(ChangingContext(communicator)):
        _, optimizer = trained(steps=1)
        assert deferred_of(optimizer) == 0
        _, optimizer = trained()
        assert deferred_of(optimizer) > 0


@pytest.mark.usefixtures("one_bucket")
@pytest.mark.parametrize("last", [False, True], ids=["but the last", "all"])
def test_misuse_is_noticed_although_gradients_are_only_noted(last):
    with activate(ChangingContext(TwinCommunicator(generation=1))):
        model, optimizer = trained()
        assert deferred_of(optimizer)
        if not last:  # the one after which they would be looked at
            model[0].requires_grad_(False)
        model(torch.ones(1, 6).double()).sum().backward()
        with pytest.raises(RuntimeError, match="before step"):
            optimizer.zero_grad()
        with pytest.raises(RuntimeError, match="computed more than"):  # noqa: PT012
            model(torch.ones(1, 6).double()).sum().backward()
            optimizer.step()
        assert all(parameter.grad is None for parameter in model[2:].parameters())


@pytest.mark.usefixtures("one_bucket")
def test_what_a_backward_that_failed_has_noted_is_forgotten():
    with activate(ChangingContext(TwinCommunicator(generation=1))):
        model, optimizer = trained()

        def fail(_gradient):
            raise ZeroDivisionError

        hook = model[0].bias.register_hook(fail)
        with pytest.raises(ZeroDivisionError):
            loss_of(model, 0).backward()
        hook.remove()
        optimizer.reset()
        optimizer.zero_grad()
        assert not optimizer._reducer.pending
