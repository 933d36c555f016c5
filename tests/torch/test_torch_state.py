"""What a state keeps, gives back and hands on, and what it refuses."""

import logging
import random
from collections import namedtuple
from dataclasses import dataclass
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import nbelastic.torch as hvd
from nbelastic.elastic.sampler import ShardSampler
from nbelastic.elastic.state import transfer
from nbelastic.errors import CollectiveError, NbelasticError
from nbelastic.torch.state.commit import make_commit
from nbelastic.torch.state.lazy_commit import LEARNED
from nbelastic.torch.state.torch_state import TorchState
from tests.collectives.worlds import SOME_KINDS
from tests.support.world import run_ranks
from tests.torch.fakes import TwinCommunicator
from tests.torch.nets import Net, adam, bits, generator_bits, new_net, train
from tests.torch.ranks import on_ranks
from tests.torch.training import distributed, loss_of, stepped


def test_restore_works_in_place():
    net = Net()
    optimizer = adam(net)
    train(net, optimizer)
    state = TorchState(net, optimizer)
    moments = [each["exp_avg"] for each in optimizer.state.values()]
    groups = [id(group) for group in optimizer.param_groups]
    addresses = [p.data_ptr() for p in net.parameters()]
    copies = [each.data_ptr() for each in state._copies.values]
    train(net, optimizer)
    state.restore()
    train(net, optimizer)
    state.save()
    assert all(a is b["exp_avg"] for a, b in zip(moments, optimizer.state.values(), strict=True))
    assert [p.data_ptr() for p in net.parameters()] == addresses
    assert [id(group) for group in optimizer.param_groups] == groups
    assert [each.data_ptr() for each in state._copies.values] == copies


def test_copies_go_to_the_host_once_a_device_is_full(monkeypatch):
    net = nn.Linear(2, 2)
    before = bits(net)

    def full(tensor):
        raise torch.OutOfMemoryError

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "clone", full)
        state = TorchState(net)
    for _ in range(2):
        state.save()
        net.weight.data.zero_()
        state.restore()
        assert bits(net) == before


def test_N7_a_step_of_a_scaler_that_was_under_way_is_forgotten():
    net = nn.Linear(4, 1)
    optimizer = adam(net)
    scaler = torch.amp.GradScaler("cpu")
    state = TorchState(net, optimizer, scaler=scaler)
    for _ in range(2):
        scaler.scale(net(torch.randn(3, 4)).sum()).backward()
        scaler.unscale_(optimizer)
        state.restore()
    off = torch.amp.GradScaler("cpu", enabled=False)
    TorchState(scaler=off).restore()


class Warmup:
    """A schedule that keeps the optimizer in its state dict, as some do."""

    def __init__(self, optimizer):
        self.after = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        self.steps, self.total = 0, torch.zeros(2)

    def state_dict(self):
        return vars(self).copy()

    def load_state_dict(self, state):
        self.__dict__.update(state, total=state["total"].clone())


def test_values_that_share_objects_share_them_after_a_restore():
    net = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    warmup, shared, loop = Warmup(optimizer), [1], []
    loop.append(loop)
    one, other = SimpleNamespace(a=shared), SimpleNamespace(a=shared)
    models = {"nets": (net, [net]), "held": [Bundle([net]), Holder(model=net)]}
    state = TorchState(
        net, optimizer, warmup=warmup, one=one, a=shared, other=other, loop=loop, **models
    )
    warmup.steps = 5
    warmup.total += 1
    state.a.append(2)
    state.restore()
    assert state.a == [1]
    assert state.a is state.one.a is state.other.a
    assert state.nets[0] is state.nets[1][0] is state.model is net
    assert state.held[0].models[0] is state.held[1]["model"] is net
    assert state.loop[0] is state.loop
    assert warmup.after.optimizer is optimizer
    assert (warmup.steps, warmup.total.tolist()) == (0, [0, 0])


def test_attributes_may_be_assigned_models_too():
    state = TorchState(nn.Linear(1, 1), scheduler=None)
    first = state.model
    state.model = nn.Linear(2, 2)
    second, bias = state.model, state.model.bias.clone()
    state.restore()
    assert state.model is first
    state.model = second
    state.save()
    with torch.no_grad():
        state.model.bias.add_(1)
    state.restore()
    assert state.model is second
    assert torch.equal(second.bias, bias)


def test_a_model_is_captured_anew_only_once_it_has_changed():
    net = nn.Sequential(nn.Linear(2, 1), nn.Dropout(0.5))
    commits = [make_commit({"model": net})]
    changes = [lambda: None, net.eval, lambda: net[0].bias.requires_grad_(False), net[1].double]
    for change in changes:
        change()
        commits.append(make_commit({"model": net}, commits[-1]))
    contents = [commit.parts[0].content for commit in commits]
    same = [one is other for one, other in pairwise(contents)]
    assert same == [True, False, False, True]
    other = nn.Linear(1, 1)
    swapped = make_commit({"a": net, "b": other}, make_commit({"a": other, "b": net}))
    assert [(part.label, part.obj) for part in swapped.parts] == [("a", net), ("b", other)]


@pytest.mark.parametrize("call", ["commit", "save", "check_host_updates"])
@pytest.mark.usefixtures("twin")
def test_a_commit_between_the_backward_passes_of_a_step_is_refused(call):
    model, optimizer = distributed(backward_passes_per_step=2)
    state = TorchState(model, held={"optimizer": optimizer})
    for _ in range(2):
        loss_of(model, 0).backward()
        with pytest.raises(RuntimeError, match="between the backward passes of one step"):
            getattr(state, call)()
        loss_of(model, 0).backward()
        optimizer.step()
        optimizer.zero_grad()
        getattr(state, call)()


# -- models within values --------------------------------------------------------------------------


Pair = namedtuple("Pair", ["model", "ema"])


@dataclass
class Bundle:
    models: list[nn.Module]


class Holder(dict):
    pass


HOLDERS = {
    "SimpleNamespace": (lambda model: SimpleNamespace(model=model), r"\.model"),
    "Bundle": (lambda model: Bundle([model]), r"\.models"),
    "Pair": (lambda model: Pair(model, 1), r"\[0\]"),
    "Holder": (lambda model: Holder(model=model), r"\['model'\]"),
}


@pytest.mark.parametrize("name", HOLDERS)
@pytest.mark.parametrize("place", [lambda each: each, lambda each: {"inner": [each]}])
def test_a_model_in_an_object_is_refused_at_construction(name, place):
    make, where = HOLDERS[name]
    text = rf"a {name} in the state holds a Linear, at {where}, that the state does not"
    with pytest.raises(NbelasticError, match=text):
        TorchState(bundle=place(make(nn.Linear(1, 1))))


# -- optimizers whose state cannot be kept exactly -------------------------------------------------


def sgd(net):
    return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)


class ZeroRedundancyOptimizer(torch.optim.SGD):
    pass


class Kept:
    def __init__(self, value):
        self.value = value


def with_attribute(value):
    def make(net):
        class Hiding(torch.optim.SGD):
            rho, note, called = 0.5, ("a", 1), staticmethod(abs)

        optimizer = Hiding(net.parameters(), lr=0.1)
        optimizer.first = next(net.parameters())
        optimizer.kept = value
        return optimizer

    return make


def without_state_dict(net):
    class Bare:
        def __init__(self):
            self.inner = sgd(net)

    return Bare()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (with_attribute([0.5]), r"Hiding.kept \(a list\) holds values that a state cannot see"),
        (with_attribute({"m": torch.ones(1)}), r"Hiding.kept \(a dict\) holds values"),
        (with_attribute(torch.ones(1)), r"Hiding.kept \(a Tensor\) holds values"),
        (with_attribute(random.Random(1)), r"Hiding.kept \(a Random\) holds values"),
        (with_attribute(Kept(1)), r"Hiding.kept \(a Kept\) holds values .* give the class state_"),
        (
            lambda net: ZeroRedundancyOptimizer(net.parameters(), lr=0.1),
            "a ZeroRedundancyOptimizer keeps of the optimizer's state only this rank's share",
        ),
        (without_state_dict, r"Bare in the state holds a SGD, at \.inner, that the state does"),
    ],
)
def test_what_cannot_be_exact_is_refused_by_name(make, message):
    net = nn.Linear(2, 1)
    with pytest.raises(NbelasticError, match=message):
        TorchState(net, make(net))


@pytest.mark.parametrize("value", [0.5, "a", None, (1, 2)])
@pytest.mark.parametrize("other", [{}, abs, logging.getLogger()])
def test_plain_attributes_are_kept_and_what_cannot_change_is_not(value, other):
    net = nn.Linear(2, 1)
    optimizer = with_attribute(value)(net)
    optimizer.other = other
    state = TorchState(net, optimizer)
    optimizer.kept, optimizer.late = 7, 1
    state.restore()
    assert optimizer.kept == value
    assert not hasattr(optimizer, "late")


def test_a_wrapper_whose_optimizer_is_named_as_well_needs_no_state_dict():
    net = nn.Linear(2, 1)
    optimizer = sgd(net)

    class Bare:
        def __init__(self):
            self.inner = optimizer

    state = TorchState(net, optimizer, wrapper=Bare())
    state.restore()
    assert state.wrapper.inner is optimizer


# -- with other ranks ------------------------------------------------------------------------------


def trained(state):
    return bits([state.model, state.optimizer])


@pytest.mark.parametrize("behind", [[2], [0, 3], [3, 1, 0]])
@on_ranks(4, kinds=SOME_KINDS)
def test_N5_newcomers_are_equal_bit_for_bit_without_a_dummy_step(context, behind):
    context.source = 2 if 2 not in behind else 0
    net = new_net(100 + context.rank if context.rank in behind else 0)
    optimizer = adam(net)
    state = TorchState(net, optimizer, epoch=0, losses=[], tensor=torch.zeros(0))
    if context.rank not in behind:
        train(net, optimizer, 3, seed=1)
        state.epoch, state.losses, state.tensor = 3, [0.5], torch.arange(3)
        optimizer.param_groups[0]["lr"] = 0.7  # as a reset callback does: live, not saved
    weight = net.first.weight
    state.align(behind)
    communicator = context.communicator()
    if context.rank not in [*behind, context.source] and communicator.name in ("gloo", "shm"):
        assert communicator.completed == 0, "it takes no part"
    assert net.first.weight is net.tied.weight is weight
    assert (state.epoch, state.losses, state.tensor.tolist()) == (3, [0.5], [0, 1, 2])
    assert optimizer.param_groups[0]["lr"] == 0.7
    found = bits(state._values())
    train(net, optimizer, 2, seed=2)
    return found, bits(state._values())


def test_generators_stay_each_ranks_own():
    before = generator_bits()
    run_ranks(2, lambda context: TorchState(epoch=context.rank).sync())
    assert generator_bits() == before


@pytest.mark.parametrize("good", [0, 1, 2, 5])
def test_a_failure_on_the_way_leaves_the_receiver_as_it_was(good, monkeypatch):
    """After so many good messages."""
    monkeypatch.setattr(transfer, "CHUNK_BYTES", 256)
    states = []
    for rank in range(2):
        net = new_net(rank)
        optimizer = adam(net)
        states.append(TorchState(net, optimizer, epoch=rank, sampler=ShardSampler(range(10))))
    train(states[0].model, states[0].optimizer)
    before = [trained(state) for state in states]

    def fail(context):
        communicator = context.communicator()
        begin, left = communicator.begin_receive, iter(range(good))

        def begin_receive(*arguments):
            if next(left, None) is None:
                raise CollectiveError("a peer is gone")
            return begin(*arguments)

        if context.rank == 1:
            communicator.begin_receive = begin_receive
        with pytest.raises(CollectiveError) as error:  # noqa: PT012
            states[context.rank].align([1])
            communicator.barrier()
        communicator.abort(str(error.value))

    run_ranks(2, fail)
    assert [trained(state) for state in states] == before
    assert (states[1].epoch, states[1].sampler.num_replicas) == (1, 1)

    run_ranks(2, lambda context: states[context.rank].align([1]))
    assert trained(states[0]) == trained(states[1]) == before[0]
    assert states[1].epoch == 0


@on_ranks(4)
def test_N6_after_a_failure_everything_is_at_one_cut(context):
    net = new_net(context.rank)
    optimizer = adam(net)
    sampler = ShardSampler(range(100), seed=2)
    state = TorchState(net, optimizer, batch=0, sampler=sampler)
    state.align([1, 2, 3])
    state.save()

    def step():
        train(net, optimizer, seed=state.batch)
        sampler.record_batch(state.batch, 5)
        state.batch += 1

    step()
    state.save()
    step()
    if context.rank != 3:
        state.save()  # rank 3 did not come to it
    step()
    state.restore()
    assert state.batch == (1 if context.rank == 3 else 2)
    state.align([3])
    assert sampler.processed_num == 40
    assert state.batch == 2
    return trained(state), sorted(sampler.processed_indices)


def test_a_step_that_was_left_half_way_is_dropped_by_a_restore(twin):
    model, optimizer = distributed()
    state = TorchState(model, optimizer)
    loss_of(model, 0).backward()
    state.restore()
    assert all(parameter.grad is None for parameter in model.parameters())
    optimizer.zero_grad()  # refuses while others count on the gradients
    twin.enter(TwinCommunicator(generation=2))
    stepped(optimizer, model)


@on_ranks(3)
def test_at_a_planned_leave_what_all_have_done_counts(context):
    first, second = ShardSampler(range(30)), ShardSampler(range(9))
    state = TorchState(samplers=[first, second])
    first.record_batch(0, 2 + context.rank)
    second.record_batch(0, 1)
    state.leave()
    assert (first.processed_num, second.processed_num) == (6, 3)


@pytest.mark.parametrize("copies", [False, True])
@on_ranks(2)
def test_a_newcomer_copies_no_more_than_the_others_and_goes_back_as_far(context, copies):
    generation, context.generation = context.generation, 0
    net = new_net(context.rank)
    optimizer = adam(net)
    state = TorchState(net, optimizer, steps=0)
    for _ in range(LEARNED + 1 if context.rank == 0 else 0):
        train(net, optimizer, seed=state.steps)
        state.steps += 1
        state.commit()
    context.generation = generation
    state.always_copy = copies and context.rank == 1
    state.align([1])
    state.save()
    received = bits(state._values())
    uncopied = state._lazy.uncopied
    assert uncopied == (not state.always_copy)
    train(net, optimizer)
    hvd.allreduce(torch.zeros(1))  # where a rank may fail, so the step replaces the commit
    state.restore()
    assert context.ahead == uncopied
    assert (bits(state._values()) == received) == state.always_copy
    context.ahead = False
    state.align([1])
    return received, bits(state._values())
