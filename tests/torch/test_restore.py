"""Restores: exact to the bit; as whole where commits are not copied and their pattern breaks."""

import copy
import gc
import random
import sys
import weakref
from collections import OrderedDict
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

import nbelastic.torch as hvd
from nbelastic.elastic.ranks.context import current
from nbelastic.torch.state import lazy_commit
from nbelastic.torch.state.lazy_commit import LEARNED
from nbelastic.torch.state.torch_state import TorchState
from tests.torch.nets import Net, adam, bits, generator_bits


@pytest.fixture(autouse=True, scope="module")
def _alone_with_its_random_numbers():
    """A world of one; Dask's thread (of another test's cluster) draws when it likes."""
    with pytest.MonkeyPatch.context() as patch:
        for name, module in list(sys.modules.items()):
            if name.startswith(("dask", "distributed")) and vars(module).get("random") is random:
                patch.setattr(module, "random", random.Random())
        hvd.init()
        yield
        hvd.shutdown()


DRAWS = [
    lambda _: np.random.rand(1000),
    lambda _: (random.gauss(0, 1), np.random.randn()),  # half of a pair: the next draws no bits
    lambda _: (random.seed(7), np.random.seed(7)),
    lambda s: (
        random.random(),
        np.random.rand(),
        torch.rand(1),
        torch.rand(1, generator=s.generator),
    ),
]
BUFFERS = [
    lambda net: setattr(net, "seen", torch.full((2,), 7.0)),
    lambda net: net.seen.resize_(4).fill_(1.5),
    lambda net: setattr(net, "nothing", torch.ones(2)),
    lambda net: setattr(net, "nothing", None),
    lambda net: net.register_buffer("late", torch.ones(3, dtype=torch.bfloat16)),
    lambda net: setattr(net, "stretched", torch.full((1,), 5.0).expand(3)),
]
PARAMETERS = [
    lambda net: net.frozen.add_(1),
    lambda net: setattr(net.first.weight, "data", net.first.weight.data.clone().t()),
    lambda net: setattr(net.frozen, "data", net.first.bias.data),  # both in the same memory
    lambda net: net.frozen.requires_grad_(not net.frozen.requires_grad),
    lambda net: setattr(net.first, "bias", nn.Parameter(torch.zeros(4))),
    lambda net: net.register_parameter("late_weight", nn.Parameter(torch.ones(2))),
]


class Training:
    """All that a state may hold, what can happen to it, and an independent account of a restore."""

    def __init__(self, kind, *, extra=False, copies=False):
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        self.net = net = Net()
        if not extra:  # then all of the model is parameters and buffers
            del net.extra
            net.extra = SimpleNamespace(calls=0)
        trained = [p for p in net.parameters() if p.requires_grad]
        self.optimizer = {
            "adam": lambda: adam(net, amsgrad=True),
            "tensor lr": lambda: adam(net, lr=torch.tensor(0.1), capturable=False, foreach=False),
            "lbfgs": lambda: torch.optim.LBFGS(trained, lr=0.01, history_size=2),
            "sgd": lambda: torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9),
        }[kind]()
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.5)
        self.warm = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1 / (1 + step))
        self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
        self.state = TorchState(
            net,
            self.optimizer,
            schedulers=[self.scheduler, {"warm": self.warm}],
            scaler=self.scaler,
            epoch=0,
            history=[{"loss": [1.0]}],
            table=OrderedDict(a=torch.zeros(2), b=(1, "x")),
            generator=torch.Generator().manual_seed(1),
        )
        self.state.always_copy = copies
        self.context = current()
        self.context.ahead = False
        self.account()

    def bits(self):
        return [bits(self.state._values()), *generator_bits()]

    def account(self):
        """Note what a restore must give."""
        self.expected = self.bits()
        self.identities = [id(p) for p in self.net.parameters()]
        self.copied = not self.uncopied
        self.stepped = self.touched = self.replaced = False
        self.after_step = None

    @property
    def uncopied(self):
        return self.state._lazy.uncopied

    def _break(self):
        """The commit's values are gone: what is there stands in, if anything has changed."""
        changed = self.stepped or self.touched
        if changed and not self.copied and not self.replaced:
            self.expected = self.bits() if self.touched else self.after_step
            self.replaced = True

    def happen(self, what, how):
        getattr(self, what)(how)

    def commit(self, how):
        self.state.commit()
        self.account()

    def restore(self, how):
        self._break()
        self.state.restore()
        assert self.bits() == self.expected
        assert [id(p) for p in self.net.parameters()] == self.identities
        assert self.context.ahead == self.replaced
        assert all(p.grad is None for p in self.net.parameters())
        self.stepped = self.touched = False

    def exchange(self, how):
        self._break()
        self.context.communicator()

    def step(self, how):
        def stepping(*_):
            if self.touched:
                self._break()

        def stepped(*_):
            self.stepped, self.touched = True, False
            self.after_step = self.bits()

        def loss():
            self.optimizer.zero_grad()
            return self.net(torch.randn(4, 4)).square().sum()

        def closure():
            found = loss()
            found.backward()
            return found

        hook = self.optimizer.register_step_pre_hook(stepping)
        self.optimizer._optimizer_step_pre_hooks.move_to_end(hook.id, last=False)
        done = self.optimizer.register_step_post_hook(stepped)
        if isinstance(self.optimizer, torch.optim.LBFGS):
            self.optimizer.step(closure)
        else:
            self.scaler.scale(loss()).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
        hook.remove()
        done.remove()
        if how % 2 and self.state.always_copy:
            self.scheduler.step()
            self.warm.step()

    def forward(self, how):
        self.net(torch.randn(4, 4))

    def touch(self, how):
        weight = self.net.first.weight
        self.touched = True
        with torch.no_grad():
            if how % 2:
                weight.add_(1)
            else:
                weight.data = weight.data.clone() + 1

    def values(self, how):
        state = self.state
        state.epoch += how
        state.history.append({"loss": [how]})
        state.history[0]["loss"].append(how)
        state.table["a"].add_(1)
        state.table["c"] = torch.ones(how)
        state.table.move_to_end("a")

    def draw(self, how):
        DRAWS[how % len(DRAWS)](self.state)

    def buffers(self, how):
        BUFFERS[how](self.net)

    def parameters(self, how):
        lbfgs = isinstance(self.optimizer, torch.optim.LBFGS)  # cannot do with strides
        with torch.no_grad():
            PARAMETERS[0 if how == 1 and lbfgs else how](self.net)

    def group(self, how):
        self.optimizer.param_groups[0]["lr"] *= 0.5
        self.optimizer.param_groups[0]["note"] = [how]


ANY = ["exchange", "step", "forward", "touch", "values", "draw", "commit", "restore"]
COPIED = ["buffers", "parameters", "group"]  # changes that only a copied commit takes back


@settings(deadline=None, max_examples=120)
@given(
    kind=st.sampled_from(["adam", "sgd", "tensor lr", "lbfgs"]),
    extra=st.booleans(),
    copies=st.booleans(),
    learned=st.integers(0, LEARNED + 2),
    actions=st.lists(
        st.tuples(st.sampled_from([*ANY, *COPIED]), st.integers(0, 5)),
        max_size=14,
    ),
)
@example("adam", False, False, 3, [("exchange", 0), ("touch", 0), ("exchange", 0), ("step", 0)])
@example(
    "sgd", True, True, 0, [("draw", 1), ("commit", 0), ("draw", 1), ("commit", 0), ("draw", 1)]
)
def test_N7_restore_gives_the_commit_or_what_stands_in_for_it(
    kind, extra, copies, learned, actions
):
    copies = copies or kind == "lbfgs"
    training = Training(kind, extra=extra, copies=copies)
    for _ in range(learned):
        for what in ("exchange", "forward", "step", "values", "commit"):
            training.happen(what, 1)
    assert training.uncopied == (learned >= LEARNED and not copies)
    for what, how in [*actions, ("restore", 0), ("restore", 0)]:
        if copies or what not in COPIED:
            training.happen(what, how)


STEP = ("exchange", "step")
EACH, FOURTH = (*STEP, "commit"), (*STEP * 4, "commit")


# What happens, and which commits are copied (c) or not (-).
PATTERNS = {
    "each fourth step of a large state": (FOURTH * 9, "ccccccccc"),
    "at first as if of each step": (EACH + FOURTH * 9, "cccccccccc"),
    "at first as if of each step of a large state": (EACH + FOURTH * 9, "-ccccccccc"),
    "after an operation": ((*STEP, "exchange", "commit") * 9, "ccccccccc"),
    "tensors are changed": (("exchange", "touch", "step", "commit") * 9, "ccccccccc"),
    "copies are wanted": (EACH * 9, "ccccccccc"),
    "each step": (EACH * 4, "cc--"),
    "trusted once in vain": (
        EACH * 4 + (*STEP, "exchange", "commit") + EACH * 15,
        "cc--cccccccccccccccc",
    ),
    "some without a step": (("exchange", "commit", "step", "commit") * 3, "ccccc-"),
}


@pytest.mark.parametrize("name", PATTERNS)
def test_which_commits_are_copied(name, monkeypatch):
    if "large" in name:
        monkeypatch.setattr(lazy_commit, "LARGE", 1)
    training = Training("adam")
    training.state.always_copy = name == "copies are wanted"
    actions, expected = PATTERNS[name]
    found = ""
    for what in actions:
        training.happen(what, 1)
        if what == "commit":
            found += "-" if training.uncopied else "c"
    assert found == expected


def test_a_state_is_not_kept_alive_by_its_optimizer_and_a_copied_optimizer_is_not_watched():
    net = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    state = TorchState(net, optimizer)
    other = copy.deepcopy(optimizer)
    state.save()
    other.step()
    assert not state._lazy.stepped
    optimizer.step()
    assert state._lazy.stepped
    alive = weakref.ref(state)
    del state
    gc.collect()
    assert alive() is None
    optimizer.step()


# -- changes through .data, which leave no mark ----------------------------------------------------


def _decay(net):
    for parameter in net.parameters():
        parameter.data.mul_(0.9)


def _row(net):
    net[0].weight.data[1] /= 2


def train_and_fail(steps, change, fail_at=-1):
    """Train and commit each step; fail once between the change and the step, and go back."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    state = TorchState(net, optimizer, step=0)
    state.save()
    failed = False
    while state.step < steps:
        optimizer.zero_grad()
        net(torch.full((2, 4), float(state.step))).sum().backward()
        change(net)
        if state.step == fail_at and not failed:
            failed = True
            state.restore()
            continue
        optimizer.step()
        state.step += 1
        state.commit()
    return bits(net), state._lazy.uncopied


@pytest.mark.parametrize("change", [_decay, _row])
@pytest.mark.parametrize(("fail_at", "large"), [(1, False), (3, False), (11, False), (5, True)])
def test_a_failure_does_not_apply_them_twice(change, fail_at, large, monkeypatch):
    monkeypatch.setattr(lazy_commit, "LARGE", 1 if large else lazy_commit.LARGE)
    assert train_and_fail(14, change, fail_at)[0] == train_and_fail(14, change)[0]


def test_changes_that_begin_later_are_noticed_sometime():
    calls = []

    def late(net):
        calls.append(1)
        if len(calls) > 6:
            _decay(net)

    assert not train_and_fail(12, late)[1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.complex64])
@pytest.mark.parametrize("value", [1.0, float("nan")])
def test_values_of_any_type_and_no_numbers_are_no_change(dtype, value):
    weight = nn.Parameter(torch.full((3,), value, dtype=dtype))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    state = TorchState(None, optimizer)
    for _ in range(6):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        state.commit()
    assert state._lazy.uncopied


def test_a_state_of_numpys_generator_is_taken_anew_once_another_one_is_put_back():
    one, other = TorchState(), TorchState()
    drawn = []
    for state in (one, other):  # the second number of a pair of normal ones leaves no mark
        np.random.randn()
        state.save()
    one.restore()
    for _ in range(2):
        one.save()
        drawn.append(np.random.randn())
        one.restore()
    assert drawn[0] == drawn[1]
