"""What a state takes over, from another rank and from a checkpoint, and what does not fit it."""

import contextlib
import functools
import re
import weakref
from itertools import chain

import pytest
import torch
from torch import nn

from nbelastic.data import Batch, Loader
from nbelastic.elastic import ObjectState
from nbelastic.elastic.sampler import ShardSampler
from nbelastic.errors import CollectiveError, OptionError, StateMismatch
from nbelastic.torch import allgather_object
from nbelastic.torch.state.torch_state import TorchState
from tests.elastic.members import job, nothing, resumed
from tests.support.world import run_ranks
from tests.torch.nets import Extra, bits
from tests.torch.ranks import on_ranks


class Averages:
    """An exponential moving average as people write it."""

    def __init__(self, model):
        self.shadow = {k: v.detach().clone() for k, v in model.named_parameters()}

    def state_dict(self):
        return {"shadow": self.shadow}

    def load_state_dict(self, state):
        self.shadow = state["shadow"]


def _double(x):
    return x * 2


def _triple(x):
    return x * 3


class Block(nn.Module):
    """A module with plain attributes."""

    calls = 0

    def __init__(self):
        super().__init__()
        self.temperature = 1.0
        self.rank = 0
        self.window = (1, 2)
        self.act = torch.relu
        self.score = _double
        self.cache = None


class Net(nn.Module):
    def __init__(self, hidden=8):
        super().__init__()
        self.body = nn.Linear(3, hidden)
        self.head = nn.Linear(hidden, 1)
        self.layers = nn.Sequential(
            nn.BatchNorm1d(2, affine=False, track_running_stats=False), nn.ReLU(), nn.Dropout(0.5)
        )
        self.block = Block()
        self.register_buffer("mask", torch.ones(4, 4).tril())


def state_of(net, optimizer=None, **values):
    if optimizer is None:
        optimizer = torch.optim.Adam([p for p in net.parameters() if p.requires_grad], lr=0.1)
    return TorchState(net, optimizer, **{"epoch": 0, **values})


def usual():
    return state_of(Net())


def with_parts(**parts):
    net = Net()
    for name, part in parts.items():
        setattr(net, name, part)
    return state_of(net)


def without_bias():
    return with_parts(head=nn.Linear(8, 1, bias=False))


def with_counter():
    return with_parts(counting=Extra())


def frozen():
    net = Net()
    net.body.requires_grad_(False)
    return state_of(net, torch.optim.Adam(net.parameters()))


def with_groups():
    net = Net()
    groups = [{"params": net.body.parameters()}, {"params": net.head.parameters(), "lr": 0.5}]
    return state_of(net, torch.optim.Adam(groups, lr=0.1))


def prompted(length):
    prompt = torch.zeros(length, requires_grad=True)
    return TorchState(optimizer=torch.optim.Adam([prompt]), prompt=prompt)


def setting(path, name, value):
    """Return what gives a module an attribute."""
    return lambda state: setattr(state.model.get_submodule(path), name, value)


def late(*change):
    """Return what builds a state, and then sets an attribute of a module."""

    def build():
        setting(*change)(state := usual())
        return state

    return build


# What is said, of what the first builds and the second expects.
MISFITS = {
    "model.body.weight: expected float32 [16, 3], came float32 [8, 3]": (
        usual,
        lambda: state_of(Net(hidden=16)),
    ),
    "model.body.weight: expected float64 [8, 3], came": (usual, lambda: state_of(Net().double())),
    "model.head.bias: expected None, came float32 [1]": (usual, without_bias),
    "model.body.weight: expected float32 [8, 3] frozen, came float32 [8, 3]": (usual, frozen),
    "extra state of model.counting: expected one, came nothing": (usual, with_counter),
    "extra state of model.counting: expected nothing": (with_counter, usual),
    "optimizer.param_groups[0]: expected 2 parameters, came 4 parameters "
    "(with model.head.bias, model.head.weight)": (usual, with_groups),
    "optimizer (SGD); came model (Net), optimizer (Adam)": (
        usual,
        lambda: state_of(net := Net(), torch.optim.SGD(net.parameters(), lr=1)),
    ),
    "expected the objects none; came model": (usual, lambda: TorchState(epoch=0)),
    "expected the values model, optimizer, epoch, batch; came model, optimizer, epoch": (
        usual,
        lambda: state_of(Net(), batch=0),
    ),
    "tensor averages.shadow.body.weight: expected float32 [4, 3], came float32 [8, 3]": (
        lambda: state_of(Net(), averages=Averages(Net(8))),
        lambda: state_of(Net(), averages=Averages(Net(4))),
    ),
    "batch of loader: expected 8 rows in 2 micro-batches": (
        lambda: TorchState(loader=Loader(range(40), Batch(8, micro=2))),
        lambda: TorchState(loader=Loader(range(40), Batch(8, micro=4))),
    ),
    "expected 1 parameter (with a tensor in no model: float32 [4])": (
        lambda: prompted(3),
        lambda: prompted(4),
    ),
    "parameter model.a.weight: expected float32 [2, 1], came float32 [1, 1]": (
        lambda: TorchState({"a": nn.Linear(1, 1), "b": nn.Linear(1, 2)}),
        lambda: TorchState({"a": nn.Linear(1, 2), "b": nn.Linear(1, 1)}),
    ),
    "model.late.weight: expected nothing, came float32": (
        late("", "late", nn.Linear(1, 1)),
        usual,
    ),
    "extra state of model.late: expected nothing": (late("", "late", Extra()), usual),
    "class of model.layers.1: expected ReLU, came GELU": (late("layers", "1", nn.GELU()), usual),
    "block.score: expected _double, came _triple": (late("block", "score", _triple), usual),
    "came <lambda> (line": (late("block", "score", lambda x: x), usual),
    "function model.block.act: expected _VariableFunctionsClass.relu, came": (
        late("block", "act", functools.partial(torch.clamp)),
        usual,
    ),
}


def train_step(state):
    """Train so that all tensors of an optimizer exist."""
    if state.optimizer is not None:
        for group in state.optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.ones_like(parameter)
        state.optimizer.step()


REFUSED = {
    "newcomer": "the state of rank 0 does not fit the one that this rank has built",
    "checkpoint": ".safetensors does not fit the state that the function has built",
}


@pytest.mark.parametrize("way", REFUSED)
@pytest.mark.parametrize("message", MISFITS)
def test_another_state_is_refused_by_name_and_changes_nothing(message, way, tmp_path):
    theirs, mine = MISFITS[message]
    kept = []

    def build():
        kept[:] = [state := mine(), bits(state._values())]
        return state

    def main(context):
        if context.rank:
            build().align([1])
        train_step(state := theirs())
        with contextlib.suppress(CollectiveError):  # it may see that rank 1 has failed
            state.align([1])

    if way == "checkpoint":
        job(tmp_path, theirs, train_step)
    with pytest.raises(StateMismatch, match=re.escape(message)) as caught:
        run_ranks(2, main) if way == "newcomer" else resumed(tmp_path, build)
    assert REFUSED[way] in str(caught.value)
    advice = "build all of it before the state is made, .* switch functions by a flag"
    assert bool(re.search(advice, str(caught.value))) == (theirs.__qualname__[:5] == "late.")
    state, before = kept
    assert bits(state._values()) == before
    if way == "checkpoint":
        resumed(tmp_path, theirs)


def test_plain_states_are_compared_by_the_names_of_their_values(tmp_path):
    job(tmp_path, lambda: ObjectState(epoch=3), nothing)
    with pytest.raises(StateMismatch, match="expected the values epoch, batch; came epoch"):
        resumed(tmp_path, lambda: ObjectState(epoch=0, batch=0))
    assert resumed(tmp_path, lambda: ObjectState(epoch=0))[0].epoch == 3


@on_ranks(2)
def test_a_newcomer_deals_samples_in_the_order_of_the_others(context):
    sampler = ShardSampler(range(12), seed=context.rank, shuffle=context.rank == 0)
    ObjectState(sampler=sampler).align([1])
    sampler.set_epoch(1)
    assert sorted(chain(*allgather_object(list(sampler)))) == list(range(12))


@on_ranks(2)
def test_settings_and_functions_that_ranks_have_built_differently_stay(context):
    net = Net()
    net.block.rank = context.rank
    if context.rank:
        net.layers[1] = nn.Identity()
        net.block.score = _triple
    state = state_of(net)
    if context.rank == 0:
        net.block.temperature = 0.5
    state.align([1])
    assert (net.block.rank, net.block.temperature) == (context.rank, 0.5)


@on_ranks(2)
def test_a_member_that_is_behind_takes_over_what_the_others_have_changed_since(context):
    state = usual()
    state.align([1])
    state.model.body.requires_grad_(False)
    state.save()
    if context.rank == 0:
        state.model.body.requires_grad_(True)
        state.model.head.requires_grad_(False)
    state.align([1])
    return bits(state._values())


def test_what_is_no_setting_is_left_alone():
    state = usual()
    state.model.block.cache = cache = torch.zeros(2)
    state.model.block.log = log = [1]
    state.restore()
    assert state.model.block.cache is cache
    assert state.model.block.log is log


@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_a_lazy_module_without_its_tensors_is_refused():
    net = nn.Sequential(nn.LazyBatchNorm1d())
    net[0].weight = net[0].bias = None
    for model in (nn.LazyLinear(2), net):
        with pytest.raises(OptionError, match="of a lazy module is not initialised; call the"):
            TorchState(model)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_scripted_models():
    model = torch.jit.script(nn.Sequential(nn.Linear(1, 1), nn.Dropout(0.5)))
    state = TorchState(model)
    state.save()
    model.eval()
    state.save()
    state._pack()


def test_tensors_of_a_step_are_not_kept_by_commits():
    state = usual()
    state.save()
    for _ in range(2):
        state.model.block.cache = hidden = torch.zeros(3)
        state.save()
    kept = weakref.ref(hidden)
    state.model.block.cache = None
    del hidden
    assert kept() is None
