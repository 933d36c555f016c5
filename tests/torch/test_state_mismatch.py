"""A state takes over only what fits it: from another rank, and from a checkpoint."""

from __future__ import annotations

import contextlib
import re
from typing import Any

import pytest
import torch
from torch import nn

from nbelastic.elastic import ObjectState
from nbelastic.elastic.checkpoint.manager import CheckpointManager
from nbelastic.elastic.sampler import ShardSampler
from nbelastic.errors import CollectiveError, NbelasticError, StateMismatch
from nbelastic.torch.state.torch_state import TorchState
from tests.elastic.members import begin, make_member, written
from tests.support.world import StaticContext, run_ranks
from tests.torch.nets import bits, model_bits, optimizer_bits


class Averages:
    """An exponential moving average as people write it."""

    def __init__(self, model: nn.Module) -> None:
        self.shadow = {k: v.detach().clone() for k, v in model.named_parameters()}

    def state_dict(self) -> dict:
        return {"shadow": self.shadow}

    def load_state_dict(self, state: dict) -> None:
        self.shadow = state["shadow"]


class Counting(nn.Module):
    calls = 0

    def get_extra_state(self) -> int:
        return self.calls

    def set_extra_state(self, state: int) -> None:
        self.calls = state


class Net(nn.Module):
    def __init__(self, hidden: int = 8, context: int = 4) -> None:
        super().__init__()
        self.body = nn.Linear(3, hidden)
        self.head = nn.Linear(hidden, 1)
        self.register_buffer("mask", torch.ones(context, context).tril())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x).relu())


def state_of(net: nn.Module, optimizer: Any = None, **values: Any) -> TorchState:
    if optimizer is None:
        optimizer = torch.optim.Adam([p for p in net.parameters() if p.requires_grad], lr=0.1)
    return TorchState(net, optimizer, **{"epoch": 0, **values})


def usual() -> TorchState:
    return state_of(Net())


def renamed() -> TorchState:
    net = Net()
    net.tail = net.head
    del net.head
    net.forward = lambda x: net.tail(net.body(x).relu())
    return state_of(net)


def with_layer() -> TorchState:
    net = Net()
    net.head = nn.Sequential(net.head, nn.Linear(1, 1))
    return state_of(net)


def with_parameter() -> TorchState:
    net = Net()
    net.scale = nn.Parameter(torch.ones(1))
    return state_of(net)


def without_bias() -> TorchState:
    net = Net()
    net.head.bias = None
    return state_of(net)


def frozen() -> TorchState:
    net = Net()
    net.body.requires_grad_(False)
    return state_of(net, torch.optim.Adam(net.parameters()))


def counting() -> TorchState:
    net = Net()
    net.counting = Counting()
    return state_of(net)


def with_groups() -> TorchState:
    net = Net()
    groups = [{"params": net.body.parameters()}, {"params": net.head.parameters(), "lr": 0.5}]
    return state_of(net, torch.optim.Adam(groups, lr=0.1))


def with_half_the_parameters() -> TorchState:
    net = Net()
    return state_of(net, torch.optim.Adam(net.head.parameters()))


def averaged(hidden: int) -> TorchState:
    return state_of(Net(), averages=Averages(Net(hidden)))


def prompted(length: int) -> TorchState:
    prompt = torch.zeros(length, requires_grad=True)
    return TorchState(optimizer=torch.optim.Adam([prompt]), prompt=prompt)


def of_two(first: int, second: int) -> TorchState:
    return TorchState({"a": nn.Linear(1, first), "b": nn.Linear(1, second)})


MISFITS = {
    "a wider layer": (
        usual,
        lambda: state_of(Net(hidden=16)),
        "model.body.weight: expected float32 [16, 3], came float32 [8, 3]",
    ),
    "another name": (usual, renamed, "model.tail.weight: expected float32 [1, 8], came nothing"),
    "a layer more": (usual, with_layer, "model.head.0.weight: expected float32 [1, 8]"),
    "a layer less": (with_layer, usual, "model.head.0.weight: expected nothing, came float32"),
    "a parameter more": (usual, with_parameter, "model.scale: expected float32 [1], came nothing"),
    "a parameter less": (with_parameter, usual, "model.scale: expected nothing, came float32 [1]"),
    "no bias": (usual, without_bias, "model.head.bias: expected None, came float32 [1]"),
    "another type": (
        usual,
        lambda: state_of(Net().double()),
        "model.body.weight: expected float64 [8, 3], came float32 [8, 3]",
    ),
    "a larger buffer": (
        usual,
        lambda: state_of(Net(context=6)),
        "model.mask: expected float32 [6, 6], came float32 [4, 4]",
    ),
    "a frozen layer": (
        usual,
        frozen,
        "model.body.weight: expected float32 [8, 3] frozen, came float32 [8, 3]",
    ),
    "extra state": (usual, counting, "extra state of model.counting: expected one, came nothing"),
    "no extra state": (counting, usual, "extra state of model.counting: expected nothing"),
    "other groups": (
        usual,
        with_groups,
        "optimizer.param_groups[0]: expected 2 parameters, came 4 parameters "
        "(with model.head.bias, model.head.weight)",
    ),
    "fewer parameters": (usual, with_half_the_parameters, "expected 2 parameters, came 4"),
    "another optimizer": (
        usual,
        lambda: state_of(net := Net(), torch.optim.SGD(net.parameters(), lr=1)),
        "optimizer (SGD); came model (Net), optimizer (Adam)",
    ),
    "no model": (usual, lambda: TorchState(epoch=0), "expected the objects none; came model"),
    "a value more": (
        usual,
        lambda: state_of(Net(), batch=0),
        "expected the values model, optimizer, epoch, batch; came model, optimizer, epoch",
    ),
    "a value less": (
        lambda: state_of(Net(), batch=0),
        usual,
        "expected the values model, optimizer, epoch; came",
    ),
    "wider averages": (
        lambda: averaged(8),
        lambda: averaged(4),
        "tensor averages['shadow']['body.weight']: expected float32 [4, 3], came float32 [8, 3]",
    ),
    "a longer prompt": (
        lambda: prompted(3),
        lambda: prompted(4),
        "expected 1 parameter (with a tensor in no model: float32 [4])",
    ),
    "models that are exchanged": (
        lambda: of_two(1, 2),
        lambda: of_two(2, 1),
        "parameter model['a'].weight: expected float32 [2, 1], came float32 [1, 1]",
    ),
}


def train_step(state: TorchState) -> None:
    """Train so that all tensors of an optimizer exist."""
    for group in state.optimizer.param_groups if state.optimizer is not None else []:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    if state.optimizer is not None:
        state.optimizer.step()


def everything(state: TorchState) -> object:
    models = state.model if isinstance(state.model, dict) else {"": state.model}
    return (
        {name: model_bits(each) for name, each in models.items() if each is not None},
        optimizer_bits(state.optimizer) if state.optimizer is not None else None,
        bits({k: v for k, v in state._values().items() if k in ("epoch", "batch", "prompt")}),
        bits(state.averages.shadow) if "averages" in state._names else None,
    )


def align(context: StaticContext, state: ObjectState) -> None:
    """Bring rank 1 to the state of rank 0, which may see that rank 1 has failed."""
    with contextlib.suppress(*([CollectiveError] if context.rank == 0 else [])):
        state.align([1])


@pytest.mark.parametrize(("theirs", "mine", "message"), MISFITS.values(), ids=MISFITS.keys())
def test_a_newcomer_that_builds_another_state_is_refused_unchanged(
    theirs: Any, mine: Any, message: str
) -> None:
    newcomers = []

    def main(context: StaticContext) -> None:
        state = mine() if context.rank else theirs()
        if context.rank == 0:
            train_step(state)
        else:
            newcomers.append((state, everything(state)))
        align(context, state)

    with pytest.raises(StateMismatch, match=re.escape(message)) as caught:
        run_ranks(2, main)
    assert "the state of rank 0 does not fit the one that this rank has built" in str(caught.value)
    ((state, before),) = newcomers
    assert everything(state) == before


def save_to(url: object, state_of: Any, prepare: Any = train_step) -> None:
    def rank(context: StaticContext) -> None:
        plan = make_member(context, url)
        state = state_of()
        with CheckpointManager(context, state, 1) as checkpoints:
            begin(context, state, checkpoints, plan)
            prepare(state)
            state.commit()
            written(checkpoints)
            checkpoints.finish()

    run_ranks(1, rank)


def resume_from(url: object, state_of: Any) -> tuple[TorchState, object]:
    def rank(context: StaticContext) -> Any:
        plan = make_member(context, url, run="b", resume=True)
        state = state_of()
        before = everything(state) if isinstance(state, TorchState) else vars(state).copy()
        kept.append((state, before))
        with CheckpointManager(context, state, 1) as checkpoints:
            begin(context, state, checkpoints, plan)
        return state, before

    kept: list[Any] = []
    try:
        return run_ranks(1, rank)[0]
    except NbelasticError as error:
        error.kept = kept[0]
        raise


@pytest.mark.parametrize(("theirs", "mine", "message"), MISFITS.values(), ids=MISFITS.keys())
def test_a_checkpoint_of_another_state_is_refused_by_name(
    theirs: Any, mine: Any, message: str, tmp_path: Any
) -> None:
    save_to(tmp_path, theirs)
    with pytest.raises(StateMismatch, match=re.escape(message)) as caught:
        resume_from(tmp_path, mine)
    assert re.search(
        r"\.safetensors does not fit the state that the function has built", str(caught.value)
    )
    state, before = caught.value.kept
    assert everything(state) == before
    resume_from(tmp_path, theirs)


def test_plain_states_are_compared_by_the_names_of_their_values(tmp_path: Any) -> None:
    save_to(tmp_path, lambda: ObjectState(epoch=3), prepare=lambda state: None)
    with pytest.raises(StateMismatch, match="expected the values epoch, batch; came epoch"):
        resume_from(tmp_path, lambda: ObjectState(epoch=0, batch=0))
    state, _ = resume_from(tmp_path, lambda: ObjectState(epoch=0))
    assert state.epoch == 3


def test_a_newcomer_with_another_dataset_is_refused() -> None:
    def main(context: StaticContext) -> None:
        align(context, ObjectState(sampler=ShardSampler(range(10 + context.rank))))

    with pytest.raises(StateMismatch, match="dataset of 11 samples, that of the others 10"):
        run_ranks(2, main)


def test_a_newcomer_deals_samples_in_the_order_of_the_others() -> None:
    def main(context: StaticContext) -> list[list[int]]:
        sampler = ShardSampler(range(12), seed=context.rank, shuffle=context.rank == 0)
        ObjectState(sampler=sampler).align([1])
        first = list(sampler)
        sampler.set_epoch(1)
        return [first, list(sampler)]

    first, second = run_ranks(2, main)
    for mine, theirs in zip(first, second, strict=True):
        assert sorted(mine + theirs) == list(range(12))


# -- what has changed since the state was built ---------------------------------------------------


def grow_buffer(state: TorchState) -> None:
    state.model.mask = torch.ones(7, 7)


def add_buffer(state: TorchState) -> None:
    state.model.register_buffer("queue", torch.arange(3.0))


def remove_buffer(state: TorchState) -> None:
    del state.model.mask


def widen(state: TorchState) -> None:
    """Replace a parameter's values by more, as when a vocabulary grows."""
    body = state.model.body
    body.weight.data = torch.cat([body.weight.data, torch.ones(8, 1)], dim=1)
    state.optimizer.state.clear()


def freeze(state: TorchState) -> None:
    state.model.body.requires_grad_(False)


def make_a_bias(state: TorchState) -> None:
    state.model.head.bias = nn.Parameter(torch.full((1,), 7.0))
    state.optimizer.add_param_group({"params": [state.model.head.bias], "lr": 0.3})


def half(state: TorchState) -> None:
    state.model.bfloat16()
    state.optimizer.state.clear()


def reverse_groups(state: TorchState) -> None:
    state.optimizer.param_groups.reverse()


def exchange_parameters(state: TorchState) -> None:
    first, second = state.optimizer.param_groups
    first["params"], second["params"] = (
        second["params"][:1],
        [*first["params"], second["params"][1]],
    )


def unite_groups(state: TorchState) -> None:
    group = state.optimizer.param_groups.pop(0)
    state.optimizer.param_groups[0]["params"] += group["params"]


def split_group(state: TorchState) -> None:
    (group,) = state.optimizer.param_groups
    taken, group["params"] = group["params"][:2], group["params"][2:]
    state.optimizer.param_groups.insert(0, {**group, "params": taken, "lr": 0.3})


def drop_group(state: TorchState) -> None:
    group = state.optimizer.param_groups.pop(0)
    for parameter in group["params"]:
        state.optimizer.state.pop(parameter, None)


CHANGES = {
    "groups in another order": (with_groups, reverse_groups),
    "parameters in other groups": (with_groups, exchange_parameters),
    "two groups that are one": (with_groups, unite_groups),
    "a group that is two": (usual, split_group),
    "a group less": (with_groups, drop_group),
    "a larger buffer": (usual, grow_buffer),
    "a buffer more": (usual, add_buffer),
    "a buffer less": (usual, remove_buffer),
    "a wider parameter": (usual, widen),
    "a frozen layer": (usual, freeze),
    "a bias where there was none": (without_bias, make_a_bias),
    "another type": (usual, half),
}


@pytest.mark.parametrize(("build", "change"), CHANGES.values(), ids=CHANGES.keys())
@pytest.mark.parametrize("way", ["newcomer", "checkpoint"])
def test_what_training_has_changed_is_taken_over(
    build: Any, change: Any, way: str, tmp_path: Any
) -> None:
    def grow(state: TorchState) -> None:
        train_step(state)
        change(state)
        train_step(state)
        found.append(everything(state))

    def join(context: StaticContext) -> object:
        state = build()
        if context.rank == 0:
            grow(state)
        state.align([1])
        return after(state)

    def after(state: TorchState) -> object:
        assert everything(state) == found[0]
        parameters = {id(parameter) for parameter in state.model.parameters()}
        groups = state.optimizer.param_groups
        assert {id(p) for group in groups for p in group["params"]} <= parameters
        train_step(state)
        return everything(state)

    found: list[object] = []
    if way == "newcomer":
        first, second = run_ranks(2, join)
        assert first == second
    else:
        save_to(tmp_path, build, grow)
        state, _ = resume_from(tmp_path, build)
        after(state)


def add_layer(state: TorchState) -> None:
    state.model.late = nn.Linear(1, 1)


def prune(state: TorchState) -> None:
    head = state.model.head
    head.weight_orig = nn.Parameter(head.weight.detach())
    del head.weight


@pytest.mark.parametrize(
    ("change", "name"), [(add_layer, "model.late.weight"), (prune, "model.head.weight_orig")]
)
def test_layers_that_training_has_added_are_refused_with_advice(change: Any, name: str) -> None:
    def main(context: StaticContext) -> None:
        state = usual()
        if context.rank == 0:
            change(state)
        align(context, state)

    with pytest.raises(StateMismatch, match=f"{name}: expected nothing, came float32") as caught:
        run_ranks(2, main)
    assert "build all of it before the state is made" in str(caught.value)


def test_a_member_that_is_behind_takes_over_what_the_others_have_changed_since() -> None:
    def main(context: StaticContext) -> object:
        state = usual()
        state.align([1])
        state.model.body.requires_grad_(False)
        state.save()
        if context.rank == 0:
            state.model.body.requires_grad_(True)
            state.model.head.requires_grad_(False)
        state.align([1])
        return everything(state)

    first, second = run_ranks(2, main)
    assert first == second


# -- compiled models ------------------------------------------------------------------------------

compiles = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")


def whole_compiled() -> TorchState:
    net = Net()
    net.counting = Counting()
    compiled = torch.compile(net)
    return state_of(compiled, torch.optim.Adam(compiled.parameters(), lr=0.1))


def part_compiled() -> TorchState:
    net = Net()
    net.counting = Counting()
    net.body = torch.compile(net.body)
    return state_of(net)


def twice_compiled() -> TorchState:
    net = Net()
    net.counting = Counting()
    net.head = torch.compile(net.head)
    return state_of(torch.compile(net))


def in_dict_compiled(compiled: bool) -> TorchState:
    net = Net()
    return TorchState({"a": torch.compile(net) if compiled else net})


COMPILED = [counting, whole_compiled, part_compiled, twice_compiled]


def plain_bits(state: TorchState) -> object:
    models = state.model if isinstance(state.model, dict) else {"": state.model}
    return {
        f"{label}.{name}".replace("_orig_mod.", ""): bits(value)
        for label, model in models.items()
        for name, value in model.state_dict().items()
    }


def trained(state: TorchState) -> None:
    train_step(state)
    for model in state.model.values() if isinstance(state.model, dict) else [state.model]:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1)
        for module in model.modules():
            if isinstance(module, Counting):
                module.calls = 5


@compiles
@pytest.mark.parametrize("theirs", COMPILED)
@pytest.mark.parametrize("mine", COMPILED)
def test_compiled_and_plain_models_resume_each_other(theirs: Any, mine: Any, tmp_path: Any) -> None:
    def train(state: TorchState) -> None:
        trained(state)
        found.append((plain_bits(state), optimizer_bits(state.optimizer)))

    found: list[Any] = []
    save_to(tmp_path, theirs, train)
    state, _ = resume_from(tmp_path, mine)
    assert (plain_bits(state), optimizer_bits(state.optimizer)) == found[0]


@compiles
@pytest.mark.parametrize("compiled", [True, False])
def test_compiled_models_in_a_dict_resume_plain_ones(compiled: bool, tmp_path: Any) -> None:
    found: list[Any] = []

    def train(state: TorchState) -> None:
        trained(state)
        found.append(plain_bits(state))

    save_to(tmp_path, lambda: in_dict_compiled(compiled), train)
    state, _ = resume_from(tmp_path, lambda: in_dict_compiled(not compiled))
    assert plain_bits(state) == found[0]


@compiles
def test_a_compiled_model_that_does_not_fit_is_refused_by_plain_names(tmp_path: Any) -> None:
    save_to(tmp_path, usual)
    message = "parameter model.body.weight: expected float32 [16, 3], came float32 [8, 3]"
    with pytest.raises(StateMismatch, match=re.escape(message)):
        resume_from(tmp_path, lambda: state_of(torch.compile(Net(hidden=16))))
    with pytest.raises(StateMismatch, match=r"expected the objects model \(Linear\)"):
        resume_from(tmp_path, lambda: state_of(torch.compile(nn.Linear(1, 1))))
