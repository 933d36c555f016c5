"""Horovod's registry of handlers, and what a state tells about a coming change."""

import pytest
import torch

import nbelastic.torch as hvd
from nbelastic.elastic import ObjectState, State
from nbelastic.errors import HostsUpdatedInterrupt, OptionError
from nbelastic.torch.elastic import state as registry
from tests.torch.nets import bits
from tests.torch.ranks import on_ranks
from tests.torch.training import filled


class Ledger:
    """A type of a user's, without ``state_dict``; deep copies of it are refused."""

    def __init__(self, entries):
        self.entries = entries

    def __deepcopy__(self, memo):
        raise TypeError("a ledger is not copied")


class LedgerHandler(registry.StateHandler):
    def __init__(self, ledger):
        super().__init__(ledger)
        self.kept = list(ledger.entries)

    def save(self):
        self.kept = list(self.value.entries)

    def restore(self):
        self.value.entries = list(self.kept)

    def sync(self):
        self.value.entries = hvd.broadcast_object(self.value.entries, root_rank=0)


@pytest.fixture(autouse=True)
def _registered():
    before = registry.get_handler_registry()
    registry.set_handler_registry([(Ledger, LedgerHandler), *before])
    yield
    registry.set_handler_registry(before)


@on_ranks(1)
def test_a_state_keeps_a_value_by_the_handler_of_its_type(context):
    ledger = Ledger([0])
    state = hvd.elastic.TorchState(torch.nn.Linear(1, 1), ledger=ledger, epoch=0)
    ledger.entries, state.epoch = [1], 1
    state.commit()
    ledger.entries, state.epoch = [2], 2
    state.restore()
    assert (state.ledger, ledger.entries, state.epoch) == (ledger, [1], 1)
    other = state.ledger = Ledger([3])  # not committed
    state.restore()
    assert (state.ledger, ledger.entries) == (ledger, [1])
    state.ledger = other
    state.commit()
    other.entries = [4]
    state.restore()
    assert (state.ledger, other.entries) == (other, [3])


@pytest.mark.parametrize("source", [0, 1])
@pytest.mark.parametrize("how", ["sync", "align", "same"])
@on_ranks(3)
def test_handlers_synchronise_from_the_rank_with_the_newest_state(context, source, how):
    """Also where a handler names rank 0, as Horovod's do, and another rank is ahead of it."""
    context.source = source
    state = hvd.elastic.TorchState(ledger=Ledger([context.rank]), epoch=context.rank)
    if how == "sync":
        state.sync()
    else:
        behind = [rank for rank in range(3) if rank != source]
        state.align(behind if how == "align" else [])
        state.save()
    state.ledger.entries.append("lost")
    state.restore()
    assert hvd.broadcast_object(context.rank, root_rank=0) == 0
    expected = context.rank if how == "same" else source
    assert (state.ledger.entries, state.epoch) == ([expected], expected)


def test_a_value_with_a_handler_cannot_have_a_name_of_the_state():
    with pytest.raises(OptionError, match="'commit'"):
        hvd.elastic.TorchState(commit=Ledger([]))


@on_ranks(2)
def test_the_handlers_of_horovod_save_restore_and_synchronise(context):
    net = filled(torch.nn.Linear(2, 1), context.rank)
    optimizer = torch.optim.SGD(net.parameters(), lr=context.rank + 1.0, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, context.rank + 1)
    sampler = hvd.elastic.ElasticSampler(range(8), shuffle=False)
    handlers = [
        next(
            handler for kind, handler in registry.get_handler_registry() if isinstance(value, kind)
        )(value)
        for value in (net, optimizer, schedule, sampler)
    ]
    assert [type(handler) for handler in handlers] == [
        registry.ModelStateHandler,
        registry.OptimizerStateHandler,
        registry.LRSchedulerStateHandler,
        registry.SamplerStateHandler,
    ]
    sampler.record_batch(0, 2 + context.rank)
    for handler in handlers:
        handler.save()
    kept = str([handler.value.state_dict() for handler in handlers[:3]])
    net(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    schedule.step()
    sampler.set_epoch(3)
    for handler in handlers:
        handler.restore()
    assert str([handler.value.state_dict() for handler in handlers[:3]]) == kept
    assert (sampler.epoch, sampler.processed_indices) == (0, {0, 1, 2, 3})
    for handler in handlers:
        handler.sync()
    assert (optimizer.param_groups[0]["lr"], schedule.step_size) == (1.0, 1)
    return bits([*net.parameters()])


class Told(ObjectState):
    """A state that notes what it is told, and calls no base class."""

    told = ()

    def on_hosts_updated(self, timestamp, update_res):
        self.told = (*self.told, (type(timestamp), update_res))


@on_ranks(1)
def test_a_state_is_told_of_a_coming_change(context):
    """The interrupt comes all the same."""

    def change():
        raise HostsUpdatedInterrupt

    state = Told(epoch=0)
    state.check_host_updates()
    assert state.told == ()
    context.check_membership = change
    for call in (state.commit, ObjectState(epoch=0).check_host_updates):
        with pytest.raises(HostsUpdatedInterrupt):
            call()
    assert state.told == ((float, 3),)


class Own(State):
    def __init__(self, value):
        super().__init__()
        self.value, self.synced = value, 0

    def sync(self):
        self.synced += 1
        self.value = hvd.broadcast(torch.tensor(self.value), root_rank=0).item()


@on_ranks(2)
def test_a_state_of_ones_own_synchronises_from_rank_0_as_horovods(context):
    context.source = 1
    state = Own(context.rank)
    state.align([0])
    state.leave()
    assert (state.value, state.synced) == (1, 1)
