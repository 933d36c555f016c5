"""One law for all trainings: ranks together train like one process, and stay equal to the bit."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils.checkpoint import checkpoint

import nbelastic.torch as hvd
from tests.collectives.worlds import MAKERS, SOME_KINDS
from tests.support.world import run_ranks
from tests.torch.training import SGD, STEPS, assert_equal, batch, filled, loss_of, make_model


class Usual:
    """Training on a loss for each rank; alone, on their mean."""

    ranks, steps, passes = 2, STEPS, 1
    make: Callable[..., torch.optim.Optimizer] = SGD
    options: ClassVar[dict[str, Any]] = {}
    tolerance: tuple[float, float] | None = None

    def __init__(self):
        self.model = make_model()

    def wrapped(self, optimizer, alone, **options):
        return optimizer if alone else hvd.DistributedOptimizer(optimizer, **options)

    def optimizers(self, alone):
        made = type(self).make(self.model.parameters())
        options = {"backward_passes_per_step": self.passes, **self.options}
        return [self.wrapped(made, alone, **options)]

    def loss(self, step, rank):
        return loss_of(self.model, step, rank, self.ranks)

    def backward(self, step, ranks):
        for rank in ranks:
            for _ in range(self.passes):
                loss = self.loss(step, rank)
                if loss is not None:
                    (loss / len(ranks)).backward()

    def before(self, step, optimizers):
        for optimizer in optimizers:
            optimizer.zero_grad()

    def step(self, step, ranks, optimizers):
        self.backward(step, ranks)
        for optimizer in optimizers:
            optimizer.step()

    def train(self, ranks, alone):
        optimizers = self.optimizers(alone)
        for step in range(self.steps):
            self.before(step, optimizers)
            self.step(step, ranks, optimizers)
        return [parameter.detach() for parameter in self.model.parameters()]


class Doubled:
    """Compression that changes shapes: every number travels as two halves."""

    def compress(self, tensor):
        return torch.cat([tensor.flatten() / 2, tensor.flatten() / 2]), tensor.shape

    def decompress(self, tensor, shape):
        return tensor.view(2, -1).sum(0).view(shape)


class CompressedByTheUser(Usual):
    """A parameter that no rank uses has no gradient, so no weight decay acts on it."""

    options: ClassVar = {"compression": Doubled()}

    def __init__(self):
        super().__init__()
        self.model.idle = nn.Parameter(torch.ones(2))

    def loss(self, step, rank):
        return self.model[:5](batch(step, rank, 2)[0]).square().sum()


class Scaled(Usual):
    """Where the loss of one rank is infinite, all ranks skip the step."""

    def train(self, ranks, alone):
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        found = super().train(ranks, alone)
        assert self.scaler.get_scale() == 4.0
        return found

    def loss(self, step, rank):
        found = loss_of(self.model, step, rank, self.ranks)
        return self.scaler.scale(found * torch.inf if (step, rank) == (1, 1) else found)

    def step(self, step, ranks, optimizers):
        self.backward(step, ranks)
        getattr(optimizers[0], "synchronize", lambda: None)()
        self.scaler.unscale_(optimizers[0])
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.05)
        with getattr(optimizers[0], "skip_synchronize", torch.enable_grad)():
            self.scaler.step(optimizers[0])
        self.scaler.update()


class ByClosure(Usual):
    """Gradients and losses of a search along a line are reduced."""

    steps, tolerance = 1, (1e-6, 1e-8)
    make = functools.partial(torch.optim.LBFGS, line_search_fn="strong_wolfe")

    def step(self, step, ranks, optimizers):
        def closure():
            optimizers[0].zero_grad()
            loss = sum(loss_of(self.model, 0, rank, 2) for rank in ranks) / len(ranks)
            loss.backward()
            return loss

        optimizers[0].step(closure)


class InPasses(Usual):
    passes = 3

    def before(self, step, optimizers):
        optimizers[0].zero_grad(set_to_none=step % 2 == 0)


class NotUsedAnyMore(Usual):
    """A kept gradient of what is not used counts as ever."""

    make = functools.partial(torch.optim.SGD, lr=0.1)

    def before(self, step, optimizers):
        if step:
            self.model[0].zero_grad()

    def loss(self, step, rank):
        if step == 0:
            return loss_of(self.model, 0, rank, 2)
        return self.model[0](batch(step, rank, 2)[0]).sum()


class Halves(Usual):
    """Two optimizers share a backward; a rank has gradients of one, of parts, or none.

    What some ranks use counts as zero on others. What none uses has no gradient, and no decay.
    """

    ranks, every = 3, False

    def __init__(self):
        super().__init__()
        self.model.idle = nn.Parameter(torch.ones(2).double())

    def optimizers(self, alone):
        its = list(self.model.parameters())
        parts = [its[n::2] for n in (0, 1)] if self.every else [its[:3], its[3:]]
        return [self.wrapped(type(self).make(part), alone) for part in parts]

    def loss(self, step, rank):
        used = ([0, 1, 2], [4], [0, 1, 2, 3, 4], [])[(rank + step) % 4]
        inputs = batch(step, rank, 3)[0].repeat(1, 3)[:, : 6 if 0 in used else 16]
        layers = nn.Sequential(*(self.model[each] for each in used))
        return layers(inputs).square().mean() if used else None


class FrozenAndAdded(Usual):
    """Parameters are frozen, unfrozen and added between steps."""

    steps = 6

    def optimizers(self, alone):
        self.model.extra = nn.Linear(3, 1).double()
        nn.init.ones_(filled(self.model.extra, 1).bias)
        self.model[0].requires_grad_(False)
        made = SGD(self.model[:5].parameters())
        return [self.wrapped(made, alone)]

    def before(self, step, optimizers):
        if step == 2:
            self.model[0].requires_grad_(True)
            self.model[4].requires_grad_(False)
        if step == 4:
            optimizers[0].add_param_group({"params": self.model.extra.parameters()})
        super().before(step, optimizers)

    def loss(self, step, rank):
        inputs, _ = batch(step, rank, 2)
        outputs = self.model[:5](inputs)
        return (self.model.extra(outputs) if step >= 4 else outputs).square().mean()


class OfManyTypes(Usual):
    """Of several types and memory orders, of which some gradients are whole numbers."""

    make = functools.partial(torch.optim.SGD, lr=0.25)

    def __init__(self):
        self.model = filled(nn.Conv2d(2, 2, 3).to(memory_format=torch.channels_last), 1)
        types = [torch.float64, torch.float32, torch.bfloat16, torch.complex128]
        weights = [nn.Parameter(torch.ones(3, 2, dtype=dtype)) for dtype in types]
        self.model.weights = nn.ParameterList([*weights, nn.Parameter(torch.tensor(1.0))])

    def before(self, step, optimizers):
        if step:
            assert self.model.weight.grad.is_contiguous(memory_format=torch.channels_last)
        super().before(step, optimizers)

    def loss(self, step, rank):
        image = torch.arange(32.0).view(1, 2, 4, 4).to(memory_format=torch.channels_last)
        *weights, single = self.model.weights
        vectors = [torch.tensor([1.0, 1.0 + 2 * rank], dtype=each.dtype) for each in weights]
        sums = [(w @ v).sum() for w, v in zip(weights, vectors, strict=True)]
        total = sum(each.real if each.is_complex() else each for each in sums)
        return self.model(image * (1 + rank)).sum() + total + single * 3 * rank


class Checkpointed(Usual):
    """Layers are shared, and parts of the graph are computed again."""

    reentrant = False

    def loss(self, step, rank):
        inputs = batch(step, rank, 2)[0].requires_grad_()
        hidden = checkpoint(self.model[:2], inputs, use_reentrant=self.reentrant)
        again = self.model[2](self.model[2](hidden))
        return self.model[4](checkpoint(self.model[3], again, use_reentrant=False)).square().sum()


class Gan(Usual):
    """Two optimizers, as in DCGAN: one's loss leaves gradients in the other's parameters."""

    critic_passes, freezes, zeroes = 2, False, "model"

    def __init__(self):
        pairs = ((6, 1), (4, 6))
        nets = [nn.Sequential(nn.Linear(a, 16), nn.Tanh(), nn.Linear(16, b)) for a, b in pairs]
        self.model = filled(nn.ModuleList(nets).double(), 1)

    def optimizers(self, alone):
        passes = (self.critic_passes, 1)
        made = [SGD(net.parameters()) for net in self.model]
        pairs = zip(made, passes, strict=True)
        return [self.wrapped(each, alone, backward_passes_per_step=n) for each, n in pairs]

    def before(self, step, optimizers):
        pass

    def zero(self, net, optimizer):
        if self.zeroes == "optimizer":
            optimizer.zero_grad()
        else:
            net.zero_grad(set_to_none=self.zeroes == "model")

    def step(self, step, ranks, optimizers):
        (critic, generator), (of_critic, of_generator) = self.model, optimizers

        def loss(outputs, target):
            targets = torch.full_like(outputs, target)
            return binary_cross_entropy_with_logits(outputs, targets) / len(ranks)

        self.zero(critic, of_critic)
        fakes = [generator(batch(step, rank, 2)[0][:, :4]) for rank in ranks]
        for rank, fake in zip(ranks, fakes, strict=True):
            real = loss(critic(batch(step, rank, 2)[0]), 1.0)
            unreal = loss(critic(fake.detach()), 0.0)
            for each in [real, unreal] if self.critic_passes == 2 else [real + unreal]:
                each.backward()
        of_critic.step()
        self.zero(generator, of_generator)
        critic.requires_grad_(not self.freezes)
        for fake in fakes:
            loss(critic(fake), 1.0).backward()
        critic.requires_grad_(True)
        of_generator.step()


class Embedded(Usual):
    """A table with sparse gradients; some ranks have none, and know nothing of it."""

    ranks, passes, tolerance = 3, 2, (1e-5, 1e-6)
    make = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.5)
    options: ClassVar = {"sparse_as_dense": False}
    rows = ((1, 2, 2), (), (2, 7))

    def __init__(self):
        self.model = nn.Sequential(nn.Embedding(10, 3, sparse=True), nn.Linear(3, 2))
        filled(self.model, 1)

    def loss(self, step, rank):
        rows = self.rows[(rank + step) % 3]
        return self.model(torch.tensor(rows)).square().sum() if rows else None


class EmbeddedApart(Embedded):
    """Of two optimizers the first sees no gradient arrive."""

    rows = ((1, 2, 2), (3,), (2, 7))

    def optimizers(self, alone):
        made = [
            torch.optim.SparseAdam([self.model[0].weight], lr=0.01),
            torch.optim.SGD(self.model[1].parameters(), lr=0.01),
        ]
        options = {"backward_passes_per_step": self.passes, **self.options}
        return [self.wrapped(each, alone, **options) for each in made]


DENSE = {"options": {"sparse_as_dense": True}}
VARIANTS = [
    (Usual, {"make": functools.partial(torch.optim.AdamW, lr=0.01)}),
    (Usual, {"ranks": 3}),
    (Usual, {"options": {"gradient_predivide_factor": 4.0}}),
    (Usual, {"options": {"groups": 2, "process_set": hvd.global_process_set}}),
    (Usual, {"options": {"groups": 100}}),
    (Usual, {"options": {"compression": hvd.Compression.fp16}, "tolerance": (0.0, 2e-3)}),
    (Usual, {"options": {"compression": hvd.Compression.bf16}, "tolerance": (0.0, 2e-2)}),
    (Checkpointed, {"reentrant": True}),
    (Halves, {"every": True}),
    (Gan, {"zeroes": "model in place"}),
    (Gan, {"zeroes": "optimizer"}),
    (Gan, {"critic_passes": 1, "freezes": True}),
    (Gan, {"critic_passes": 1, "freezes": True, "zeroes": "model in place"}),
    (Embedded, DENSE),
    (EmbeddedApart, DENSE),
]
MADE = [type(f"{base.__name__} {differing}", (base,), differing) for base, differing in VARIANTS]


def all_of(kind):
    return [kind, *(each for derived in kind.__subclasses__() for each in all_of(derived))]


def check(kind, make=MAKERS["gloo"]):
    results = run_ranks(
        kind.ranks,
        lambda context: kind().train(range(context.rank, context.rank + 1), alone=False),
        make=make,
    )
    for result in results[1:]:
        assert_equal(results[0], result)
    for mine, whole in zip(results[0], kind().train(range(kind.ranks), alone=True), strict=True):
        double = (1e-11, 1e-13) if mine.dtype.itemsize >= 8 else (None, None)
        rtol, atol = kind.tolerance or double
        torch.testing.assert_close(mine, whole, rtol=rtol, atol=atol)


@pytest.mark.usefixtures("small_buckets")
@pytest.mark.parametrize("kind", all_of(Usual))
def test_ranks_together_train_like_one_process(kind):
    check(kind)


@pytest.mark.parametrize("kind", all_of(Embedded))
@pytest.mark.parametrize("transport", SOME_KINDS)
def test_sparse_gradients_go_over_any_transport(kind, transport):
    check(kind, MAKERS[transport])


@pytest.mark.usefixtures("small_buckets")
def test_one_pass_too_many_says_how_to_freeze():
    class Unfrozen(Gan):
        critic_passes = 1

    with pytest.raises(RuntimeError, match=r"another optimizer's step .*requires_grad_\(False\)"):
        check(Unfrozen)


def test_an_operation_takes_a_compression_of_the_users():
    found = run_ranks(2, lambda _: hvd.allreduce(torch.ones(2, 3), compression=Doubled()).tolist())
    assert found == [[[1.0] * 3] * 2] * 2
