"""Steps of micro-batches: the gradient of the whole batch, with the same bits on any ranks."""

import contextlib
import functools
import math
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import TensorDataset

import nbelastic.torch as hvd
from nbelastic.collectives import connect
from nbelastic.collectives.reduction_tree import Blocks
from nbelastic.data import Batch, Loader
from nbelastic.elastic.ranks.context import current
from nbelastic.elastic.ranks.step_share import StepShare
from nbelastic.errors import CollectiveError, NbelasticError, OptionError, RanksDisagree
from nbelastic.torch.gradients.micro_batches import check_places, check_witness
from nbelastic.torch.gradients.tree_sums import MicroBatchSum, sum_over_ranks
from nbelastic.torch.state.torch_state import TorchState
from tests.collectives.worlds import MAKERS
from tests.support.exact_training import digest
from tests.support.world import run_ranks
from tests.torch.nets import bits
from tests.torch.ranks import on_ranks
from tests.torch.training import filled

ROWS = 44
loss_of = nn.functional.mse_loss


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)  # ranks are threads: they share torch's own


def data(dtype=torch.float32):
    x, y = torch.randn(ROWS, 6, generator=seeded(1)), torch.randn(ROWS, 3, generator=seeded(2))
    return TensorDataset(x.to(dtype), y.to(dtype))


def net(dtype=torch.float32):
    return filled(nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)).to(dtype), 3)


def trainee(model=None, **options):
    model = model or net()
    sgd = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.1)
    return model, hvd.DistributedOptimizer(sgd, **options)


def accumulate(model, step):
    for x, y in step:
        loss_of(model(x), y).backward()


def train_on(model, optimizer, step):
    optimizer.zero_grad()
    accumulate(model, step)
    optimizer.step()


def one_digest(train, sizes, make=connect):
    """Assert that all ranks of worlds of all sizes end with the same bits."""
    found = {size: set(run_ranks(size, train, make=make)) for size in (1, *sizes)}
    assert len(found[1]) == 1
    assert found == dict.fromkeys(found, found[1])


# -- the gradient ----------------------------------------------------------------------------------


@given(
    size=st.integers(1, 4),
    micro_batches=st.integers(1, 9),
    micro=st.integers(1, 3),
    exact=st.booleans(),
    by_tokens=st.booleans(),
)
@settings(max_examples=12, deadline=None)
def test_the_gradient_is_that_of_one_large_batch(size, micro_batches, micro, exact, by_tokens):
    def weight(batch):
        return batch[0][:, 0].gt(0).sum()

    def masked(model, x, y):
        chosen = x[:, 0].gt(0) if by_tokens else torch.ones(len(x), dtype=torch.bool)
        return loss_of(model(x[chosen]), y[chosen])  # not a number where none is chosen

    def main(_):
        source, model = data(torch.float64), net(torch.float64)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.0))
        loader = Loader(source, Batch(micro * micro_batches, micro=micro, exact=exact), seed=1)
        found = []
        for step in loader:
            optimizer.zero_grad()
            for x, y in step.weighted(weight) if by_tokens else step:
                masked(model, x, y).backward()
            optimizer.step()
            rows = [row for v in range(micro_batches) for row in step.dealing.rows(step.number, v)]
            whole = net(torch.float64)
            masked(whole, *source[rows]).backward()
            if not by_tokens or weight(source[rows]):
                for mine, right in zip(model.parameters(), whole.parameters(), strict=True):
                    assert mine.grad is not None
                    torch.testing.assert_close(mine.grad, right.grad, rtol=1e-12, atol=1e-14)
            else:
                assert all(parameter.grad is None for parameter in model.parameters())
            found.append([parameter.grad for parameter in model.parameters()])
        return bits(found)

    results = run_ranks(size, main)
    assert all(result == results[0] for result in results)


@on_ranks(1, 2, 3)
def test_a_value_that_others_lack_keeps_its_sign(context):
    block = Blocks.even(4, context.size).block(context.rank)
    share = StepShare(4, block, (), [1.0] * 4, exact=True)
    total = MicroBatchSum(share)
    if 3 in share.block:
        total.add(3, torch.tensor([-0.0, 0.0, 1.0]))
    (found,) = sum_over_ranks(context.communicator(), share, [total], [torch.empty(3)])
    assert [math.copysign(1.0, value) for value in found.tolist()] == [-1.0, 1.0, 1.0]


# -- the same bits ---------------------------------------------------------------------------------


class Odd(nn.Module):
    """Parameters used by some micro-batches, by none, frozen, in other types and memory orders."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.sometimes = nn.Linear(6, 8)
        self.never = nn.Linear(2, 2)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.narrow = nn.Linear(8, 8, dtype=torch.bfloat16)
        self.wide = nn.Linear(8, 3, dtype=torch.float64)
        self.image = nn.Conv2d(1, 4, 3, padding=1).to(memory_format=torch.channels_last)
        self.phase = nn.Parameter(torch.zeros(8, dtype=torch.complex64))

    def forward(self, x):
        z = self.frozen(torch.tanh(self.first(x)))
        if x[0, 0] > 0.5:
            z = z + self.sometimes(x)
        z = z + self.image(x.view(-1, 1, 2, 3)).mean((1, 2, 3))[:, None]
        z = self.narrow(z.bfloat16()).float() + (z * self.phase).real + (z * self.phase).imag
        return self.wide(z.double()).float()


class Observer(nn.Module):
    """Buffers of several kinds, as quantisation and spectral norms have them."""

    def __init__(self):
        super().__init__()
        self.register_buffer("least", torch.full((6,), torch.inf))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("any_large", torch.zeros(2, dtype=torch.bool))
        self.register_buffer("moving", torch.zeros(6, dtype=torch.bfloat16))

    def forward(self, x):
        if self.training:
            torch.minimum(self.least, x.detach().amin(0), out=self.least)
            self.seen += len(x)
            self.any_large |= x.detach().gt(2.5).any()
            self.moving.mul_(0.5).add_(x.detach().mean(0))
        return x


FUNCTIONS = {
    "*.least": lambda start, values: values.amin(0),
    "0.seen": lambda start, values: start + (values - start).sum(),
    "*.any_*": lambda start, values: values.any(0),
    "*.moving": lambda start, values: values.float().mean(0),
    "*.parametrizations.weight.0._*": lambda start, values: values[-1],
}


def observed(micro_batches=8, **options):
    model = nn.Sequential(
        *(Observer(), nn.utils.parametrizations.spectral_norm(nn.Linear(6, 8)), nn.BatchNorm1d(8)),
        *(nn.ReLU(), nn.BatchNorm1d(8, momentum=None), nn.Linear(8, 3)),
    )
    filled(model, 3)
    for name, buffer in model.named_buffers():
        if name.endswith(("._u", "._v")):  # torch draws these from the generator of all ranks
            buffer.copy_(nn.functional.normalize(torch.ones_like(buffer), dim=0))
    batch = Batch(2 * micro_batches, micro=2, exact=True)
    return *trainee(model), Loader(data(), batch, seed=2, **options)


@pytest.mark.parametrize("micro_batches", [8, 6])
def test_all_has_the_same_bits_on_any_number_of_ranks(micro_batches):
    """Odd parameters in several passes; buffers, moments, a scaler and clipping.

    Statistics are means over the step.
    """
    x = data().tensors[0]

    def train(_):
        model, (second, two, loader) = filled(Odd(), 3), observed(micro_batches, buffers=FUNCTIONS)
        never = digest(model.never.parameters())
        trained = [each for each in model.parameters() if each.requires_grad]
        adam = torch.optim.AdamW(trained, lr=0.01)
        one = hvd.DistributedOptimizer(adam, backward_passes_per_step=2)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=9)
        state = TorchState(second, [one, two], loader=loader, epoch=0)
        observer, norm, given = second[0], second[2], []
        norm.register_forward_pre_hook(lambda _, inputs: given.append(inputs[0].detach()))
        for step in loader:
            before = norm.running_mean.clone()
            one.zero_grad(set_to_none=False)
            two.zero_grad()
            given.clear()
            scaler.scale(torch.zeros(()))  # for ranks without micro-batches
            for number, (rows, y) in zip(step.numbers, step, strict=False):  # asks for no more
                loss_of(model(rows), y).backward()
                if number % 2:  # else there are fewer passes than announced
                    (model(rows).square().mean() / 3).backward()
                loss = loss_of(second(rows), model(rows).detach())
                if (step.number, number) == (1, 5):
                    loss = loss * float("inf")
                scaler.scale(loss).backward()
            one.step()
            two.synchronize()
            if sum(map(len, given)) == step.rows:  # on a rank alone
                expected = 0.9 * before + 0.1 * torch.cat(given).mean(0)
                torch.testing.assert_close(norm.running_mean, expected)
            assert norm.num_batches_tracked == step.number + 1
            scaler.unscale_(two)
            nn.utils.clip_grad_norm_(second.parameters(), 0.5)
            with two.skip_synchronize():
                scaler.step(two)
            scaler.update()
            state.commit()
        assert not loader.why_not_exact
        assert scaler.get_scale() == 2.0, "all ranks have skipped a step"
        assert model.never.weight.grad is None
        assert digest(model.never.parameters()) == never
        assert observer.seen == ROWS
        assert torch.equal(observer.least, x.amin(0))
        assert observer.any_large.tolist() == [bool(x.gt(2.5).any())] * 2
        states = [*one.state.values(), *two.state.values()]
        moments = [each for state in states for each in state.values()]
        kept = [*model.parameters(), *second.parameters(), *second.buffers(), *moments]
        return digest(kept)

    one_digest(train, (2, 3, 4, 5, 9))
    one_digest(train, (2, 3), MAKERS["cuda_ipc"])


# -- buffers and states ----------------------------------------------------------------------------


REFUSED = "expected torch 2 avx-1, came torch 2 avx-0"
TOLD = "this process computes other bits (torch 2 avx-1) than others (torch 2 avx-0)"


@pytest.mark.parametrize(
    ("what", "exact", "said"),
    [
        ("a buffer", True, "the buffer 0.parametrizations.weight.0._"),
        ("a buffer", "auto", "is no running mean"),
        ("a buffer", False, "Batch(exact=False)"),
        ("other kernels", True, REFUSED),
        ("other kernels", "auto", TOLD),
        ("other kernels", False, "Batch(exact=False)"),
    ],
)
def test_what_is_not_exact_is_refused_or_told_or_not_looked_at(what, exact, said, monkeypatch):
    def main(context):
        layer = nn.utils.parametrizations.spectral_norm(nn.Linear(6, 3))
        model, optimizer = trainee(filled(nn.Sequential(layer), 3))
        loader = Loader(data(), Batch(8, micro=4, exact=exact))
        state = TorchState(model, optimizer, loader=loader)
        state.align([1] if what == "other kernels" else [])
        for step in loader if what == "a buffer" else ():
            train_on(model, optimizer, step)
        return loader.why_not_exact

    if what == "other kernels":
        kernels = "nbelastic.data.loader.kernel_fingerprint"
        monkeypatch.setattr(kernels, lambda: f"torch 2 avx-{current().rank}")
    if exact is True:
        with pytest.raises(NbelasticError, match=re.escape(said)):
            run_ranks(2, main)
    else:
        assert said in run_ranks(2, main)[1]


@pytest.mark.parametrize(
    ("functions", "message"),
    [
        ({"*.lest": FUNCTIONS["*.least"]}, r"no buffer of .* '\*\.lest'; there are: 0\.least, "),
        ({"*.least": lambda start, values: values}, r"for 0\.least returned \(8, 6\)"),
        ({"*.least": lambda start, values: 3.0}, r"for 0\.least returned <class 'float'>"),
        ({"*.least": 3.0}, "must be a dict of functions by name"),
    ],
)
@pytest.mark.usefixtures("alone")
def test_functions_that_do_not_fit_are_named(functions, message):
    with pytest.raises(OptionError, match=message):  # noqa: PT012
        model, optimizer, loader = observed(buffers={**FUNCTIONS, **functions})
        _state = TorchState(model, optimizer, loader=loader)
        for x, _y in next(iter(loader)):
            model(x)


@on_ranks(1, 3)
def test_a_step_passed_over_and_a_model_in_evaluation_leave_buffers_alone(context):
    model, optimizer, loader = observed(buffers=FUNCTIONS)
    _state = TorchState(model, optimizer, loader=loader)
    before = digest(model.buffers())
    for step in loader:
        if step.number == 1:
            after_one = digest(model.buffers())
            continue
        model.train(step.number == 0)
        train_on(model, optimizer, step)
    assert digest(model.buffers()) == after_one != before


# -- mistakes --------------------------------------------------------------------------------------


def assign(model, x, y, first=1):
    assigned, others = [*model.parameters()][:first], [*model.parameters()][first:]
    gradients = torch.autograd.grad(loss_of(model(x), y), [*assigned, *others])
    torch.autograd.backward(others, gradients[first:])
    for parameter, gradient in zip(assigned, gradients, strict=False):
        parameter.grad = gradient


assign_all = functools.partial(assign, first=99)


def replace(model, x, y):
    loss_of(model(x), y).backward()
    first = next(model.parameters())
    first.grad = torch.zeros_like(first)


def act(word, model, optimizer, state, step, x, y):
    """Do what a word of a script says; the words between brackets, for each micro-batch."""
    if "[" in word:
        for x, y in step:  # noqa: PLR1704
            for each in word.strip("[]").split(","):
                act(each, model, optimizer, state, step, x, y)
    elif word == "backward":
        loss_of(model(x), y).backward()
    elif word == "again":
        with contextlib.suppress(RuntimeError):
            loss_of(model(x), y).backward()
    elif word == "clip":
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    elif word in ("assign", "assign_all", "replace"):
        globals()[word](model, x, y)
    elif word == "closure":
        optimizer.step(lambda: None)
    else:
        (getattr(optimizer, word, None) or getattr(state, word))()


OPTIONS = "process_set= cannot be used with a Loader"
IN_A_STEP = r"\(\) was called in a step of the loader"
ASSIGNED = r"has a gradient that was assigned.*autograd\.backward"


@pytest.mark.parametrize(
    ("script", "message", "options"),
    [
        ("[backward,step]", "after 1 of this rank's 4 micro-batches", {}),
        ("[backward,again] step", "gradients of this step were dropped", {}),
        ("closure", r"step\(closure\) cannot be used with a Loader", {}),
        ("[zero_grad,backward]", r"zero_grad\(\) was called after backward\(\)", {}),
        ("[backward] step", r"call optimizer\.zero_grad\(\) before the loop", {}),
        ("[backward]", "were not used before the next step began", {}),
        ("[backward] clip step", r"changed between backward\(\) and step\(\)", {}),
        ("[backward,backward]", "backward_passes_per_step=1 times in one micro-batch", {}),
        ("backward", "iterate over the step", {}),
        ("[zero_grad] backward", "iterate over the step, and call it in that loop", {}),
        ("zero_grad [assign] step", ASSIGNED, {}),
        ("zero_grad [assign_all] step", ASSIGNED, {}),
        ("zero_grad [replace] step", ASSIGNED, {}),
        ("commit", f"commit{IN_A_STEP}", {}),
        ("[backward] commit", f"commit{IN_A_STEP}", {}),
        ("check_host_updates", f"check_host_updates{IN_A_STEP}", {}),
        ("[backward] check_host_updates", f"check_host_updates{IN_A_STEP}", {}),
        ("[backward] step", OPTIONS, {"op": hvd.Sum}),
        ("[backward] step", OPTIONS, {"op": hvd.Adasum}),
        ("[backward] step", OPTIONS, {"compression": hvd.Compression.fp16}),
    ],
)
@pytest.mark.usefixtures("alone")
def test_mistakes_are_named(script, message, options):
    model, optimizer = trainee(**options)
    loader = Loader(data(), Batch(8, micro=2))
    state = TorchState(model, optimizer, loader=loader)
    rows = torch.ones(1, 6), torch.ones(1, 3)
    with pytest.raises(ValueError if options else RuntimeError, match=message):  # noqa: PT012
        for step in loader:
            for word in script.split():
                act(word, model, optimizer, state, step, *rows)


@pytest.mark.parametrize("how", ["validated", "passed on"])
def test_validation_and_gradients_passed_on_by_backward_change_no_bit(how):
    def train(how):
        model, optimizer = trainee()
        parameters = list(model.parameters())
        validation = Loader(data(), Batch(16, micro=8), shuffle=False)
        for step in Loader(data(), Batch(8, micro=2)):
            optimizer.zero_grad()
            for x, y in step:
                loss = loss_of(model(x), y)
                if how == "passed on":
                    torch.autograd.backward(parameters, torch.autograd.grad(loss, parameters))
                else:
                    loss.backward()
                if how == "validated" and step.number == 1:
                    list(map(list, validation))
            if how == "validated":
                for held_out in validation:
                    list(held_out)
                    break
            optimizer.step()
        return digest(model.parameters())

    (right,) = run_ranks(1, lambda _: train("plain"))
    assert run_ranks(2, lambda _: train(how)) == [right] * 2


@pytest.mark.usefixtures("alone")
def test_what_does_not_go_with_a_loader_is_refused():
    model, optimizer = trainee()
    loader = Loader(data(), Batch(8, micro=2))
    with pytest.raises(OptionError, match=r"wrap the SGD by hvd\.DistributedOptimizer"):
        TorchState(model, torch.optim.SGD(model.parameters(), lr=0.1), loader=loader)
    hvd.elastic.LRScaler(optimizer)
    with pytest.raises(OptionError, match="an LRScaler adjusts rates"):
        TorchState(model, optimizer, loader=loader)


def test_ranks_at_different_steps_or_in_other_orders_are_refused():
    with pytest.raises(RanksDisagree, match="deal rows in different orders"):
        check_places([(1, 2, 3), (1, 2, 4)])

    def main(context):
        model, optimizer = trainee()
        for step in Loader(data(), Batch(8, micro=2)):
            optimizer.zero_grad()
            accumulate(model, step)
            if (context.rank, step.number) not in ((0, 2), (1, 3)):
                optimizer.step()

    with pytest.raises(CollectiveError, match=r"rank 0: step 3 of .*, rank 1: step 2 of epoch 0"):
        run_ranks(2, main)


def two_loaders(how, fails=False):
    def main(_):
        model, optimizer = trainee()
        labelled = Loader(data(), Batch(8, micro=2), seed=1)
        other = Loader(data(), Batch(8, micro=2), seed=2)
        state = TorchState(model, optimizer, labelled=labelled, other=other)
        left, seen = int(fails), []
        while len(seen) < 3:
            for step, more in zip(labelled, other, strict=False):
                optimizer.zero_grad()
                if how == "one by one":
                    accumulate(model, step)
                    for u, _ in more:
                        model(u).square().mean().backward()
                else:
                    for (x, y), (u, _) in zip(step, more, strict=True):
                        (loss_of(model(x), y) + model(u).square().mean()).backward()
                if step.number == 1 and left:
                    left -= 1
                    state.restore()
                    break
                optimizer.step()
                seen.append((step.number, more.number))
                state.commit()
                if len(seen) == 3:
                    break
        assert seen == [(0, 0), (1, 1), (2, 2)]
        return digest(model.parameters())

    return main


def test_two_loaders_in_one_step_have_the_same_bits_on_any_number_of_ranks():
    one_digest(two_loaders("together"), (2, 3, 4))
    assert run_ranks(1, two_loaders("together", fails=True)) == run_ranks(
        1, two_loaders("together")
    )
    with pytest.raises(RuntimeError, match=r"iterate over both steps together: .*zip\(step, "):
        run_ranks(1, two_loaders("one by one"))


@on_ranks(2)
def test_ordinary_steps_around_those_of_a_loader_whose_loop_may_not_be_left(context):
    model, optimizer = trainee()
    loader = Loader(data(), Batch(8, micro=2))

    def ordinary():
        optimizer.zero_grad()
        model(torch.full((2, 6), float(context.rank))).sum().backward()
        optimizer.step()

    ordinary()
    for x, y in next(iter(loader)):
        loss = loss_of(model(x), y)
        with pytest.raises(RuntimeError, match=r"keep `steps = iter\(loader\)`"):
            loss.backward()
        break
    ordinary()
    steps = iter(loader)
    train_on(model, optimizer, next(steps))
    steps.close()
    ordinary()
    return digest(model.parameters())


# -- the witness -----------------------------------------------------------------------------------


@pytest.mark.parametrize("place", [0, -1])
@on_ranks(3)
def test_all_ranks_name_the_one_with_a_flipped_bit(context, all_met, place):
    kind = torch.bfloat16  # of which the last parameter has an odd number
    model, optimizer = trainee(net(kind))
    if context.rank == 1:
        model[place].bias.data.view(torch.uint8)[place] ^= 64
    with pytest.raises(NbelasticError, match="the parameters of rank 1 are not") as error:  # noqa: PT012
        for step in Loader(data(kind), Batch(8, micro=2)):
            train_on(model, optimizer, step)
    all_met.wait()  # a rank that has raised would break the operation of the others
    assert isinstance(error.value, CollectiveError) == (context.rank != 1)
    digests = re.findall(r"rank \d: ([0-9a-f]{13})", str(error.value))
    assert digests[0] == digests[2] != digests[1]
    return digests


def test_without_most_ranks_none_is_right():
    with pytest.raises(RanksDisagree, match="rank 0: 0000000000007, rank 1: 0000000000008"):
        check_witness([7.0, 8.0], 0)
