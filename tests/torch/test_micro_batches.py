"""Steps of micro-batches: the gradient of the whole batch, with the same bits on any ranks."""

from __future__ import annotations

import contextlib
import hashlib
import math
import re
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import TensorDataset

import nbelastic.torch as hvd
from nbelastic.collectives import connect
from nbelastic.collectives.reduction_tree import Node, cover
from nbelastic.data import Batch, Loader, balancer
from nbelastic.data.plan.dealing import block_of
from nbelastic.elastic.ranks.context import current
from nbelastic.elastic.ranks.step_share import StepShare
from nbelastic.errors import CollectiveError, NbelasticError, OptionError, RanksDisagree
from nbelastic.torch.gradients.micro_batches import (
    check_places,
    check_witness,
    parameter_digest,
)
from nbelastic.torch.gradients.tree_sums import MicroBatchSum, sum_over_ranks
from nbelastic.torch.state.torch_state import TorchState
from tests.collectives.worlds import MAKERS
from tests.support.world import StaticContext, run_ranks

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.collectives.worlds import Maker

ROWS = 44
loss_of = nn.functional.mse_loss


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)  # ranks are threads: they share torch's own


def data(dtype: torch.dtype = torch.float32) -> TensorDataset:
    x, y = torch.randn(ROWS, 6, generator=seeded(1)), torch.randn(ROWS, 3, generator=seeded(2))
    return TensorDataset(x.to(dtype), y.to(dtype))


def fill(model: nn.Module) -> None:
    generator = seeded(3)
    for parameter in model.parameters():
        nn.init.uniform_(parameter, -0.5, 0.5, generator=generator)


def net(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)).to(dtype)
    fill(model)
    return model


def trainee() -> tuple[nn.Sequential, Any]:
    model = net()
    return model, hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))


def accumulate(model: nn.Module, step: Any) -> None:
    for x, y in step:
        loss_of(model(x), y).backward()


def train_on(model: nn.Module, optimizer: Any, step: Any) -> None:
    optimizer.zero_grad()
    accumulate(model, step)
    optimizer.step()


def digest(tensors: Any) -> str:
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def one_digest(
    train: Callable[[StaticContext], str], sizes: tuple[int, ...], make: Maker = connect
) -> None:
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
def test_the_gradient_is_that_of_one_large_batch(
    size: int, micro_batches: int, micro: int, exact: bool, by_tokens: bool
) -> None:
    def weight(batch: Any) -> torch.Tensor:
        return batch[0][:, 0].gt(0).sum()

    def masked(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        chosen = x[:, 0].gt(0) if by_tokens else torch.ones(len(x), dtype=torch.bool)
        return loss_of(model(x[chosen]), y[chosen])  # not a number where none is chosen

    def main(_: StaticContext) -> list[list[torch.Tensor | None]]:
        source, model = data(torch.float64), net(torch.float64)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.0))
        loader = Loader(source, Batch(micro * micro_batches, micro=micro, exact=exact), seed=1)
        found = []
        for step in loader:
            optimizer.zero_grad()
            for x, y in step.weighted(weight) if by_tokens else step:
                masked(model, x, y).backward()
            optimizer.step()
            rows = [row for v in range(micro_batches) for row in loader.rows(step.number, v)]
            whole = net(torch.float64)
            masked(whole, *source[rows]).backward()
            if not by_tokens or weight(source[rows]):
                for mine, right in zip(model.parameters(), whole.parameters(), strict=True):
                    assert mine.grad is not None
                    torch.testing.assert_close(mine.grad, right.grad, rtol=1e-12, atol=1e-14)
            else:
                assert all(parameter.grad is None for parameter in model.parameters())
            found.append([parameter.grad for parameter in model.parameters()])
        return found

    results = run_ranks(size, main)
    for result in results:
        for mine, others in zip(result, results[0], strict=True):
            assert digest(g for g in mine if g is not None) == digest(
                g for g in others if g is not None
            )


@given(
    present=st.lists(st.booleans(), min_size=1, max_size=17),
    bounds=st.tuples(st.integers(0, 17), st.integers(0, 17)),
)
@settings(deadline=None)
def test_a_rank_forms_the_sums_of_the_tree(present: list[bool], bounds: tuple[int, int]) -> None:
    leaves = len(present)
    begin, end = sorted(min(bound, leaves) for bound in bounds)
    values = [torch.randn(50, generator=seeded(leaf)) for leaf in range(leaves)]

    def right(node: Node) -> torch.Tensor | None:
        if node.end - node.begin == 1:
            return values[node.begin].clone() if present[node.begin] else None
        left = right(Node(node.begin, node.middle))
        other = right(Node(node.middle, node.end))
        return left if other is None else other if left is None else left + other

    share = StepShare(leaves, range(begin, end), (), [1.0] * leaves, exact=True)
    total = MicroBatchSum(share)
    for leaf in range(begin, end):
        if present[leaf]:
            total.add(leaf, values[leaf].clone())
    nodes = cover(begin, end, leaves)
    for node, found in zip(nodes, total.finish(nodes), strict=True):
        expected = right(node)
        assert (found is None) == (expected is None)
        assert found is None or torch.equal(found, expected)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_value_that_others_lack_keeps_its_sign(size: int) -> None:
    def main(context: StaticContext) -> list[float]:
        share = StepShare(4, block_of(context.rank, size, 4), (), [1.0] * 4, exact=True)
        total = MicroBatchSum(share)
        if 3 in share.block:
            total.add(3, torch.tensor([-0.0, 0.0, 1.0]))
        like = torch.empty(3)
        (found,) = sum_over_ranks(context.communicator(), share, [total], [like])
        return [math.copysign(1.0, value) for value in found.tolist()]

    assert run_ranks(size, main) == [[-1.0, 1.0, 1.0]] * size


# -- the same bits ---------------------------------------------------------------------------------


@pytest.mark.parametrize("micro_batches", [8, 6])
def test_parameters_and_moments_have_the_same_bits_on_any_number_of_ranks(
    micro_batches: int,
) -> None:
    def train(_: StaticContext) -> str:
        model = net()
        optimizer = hvd.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
        loader = Loader(data(), Batch(2 * micro_batches, micro=2, exact=True), seed=2)
        for _ in range(2):
            for step in loader:
                optimizer.zero_grad()
                accumulate(model, step)
                optimizer.synchronize()
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                with optimizer.skip_synchronize():
                    optimizer.step()
        moments = [each for state in optimizer.state.values() for each in state.values()]
        return digest([*model.parameters(), *moments])

    one_digest(train, (2, 3, 4, 5, 9))
    one_digest(train, (2, 3), MAKERS["cuda_ipc"])


def test_ordinary_sums_have_other_bits() -> None:
    def train(_: StaticContext) -> str:
        model, optimizer = trainee()
        for step in Loader(data(), Batch(16, micro=2, exact=False)):
            train_on(model, optimizer, step)
        return digest(model.parameters())

    assert len({run_ranks(size, train)[0] for size in (1, 2, 4)}) > 1


class Odd(nn.Module):
    """Parameters used by some micro-batches, by none, frozen, in other types and memory orders."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.sometimes = nn.Linear(6, 8)
        self.never = nn.Linear(2, 2)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.narrow = nn.Linear(8, 8, dtype=torch.bfloat16)
        self.wide = nn.Linear(8, 3, dtype=torch.float64)
        self.image = nn.Conv2d(1, 4, 3, padding=1).to(memory_format=torch.channels_last)
        self.phase = nn.Parameter(torch.zeros(8, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = self.frozen(torch.tanh(self.first(x)))
        if x[0, 0] > 0.5:
            z = z + self.sometimes(x)
        z = z + self.image(x.view(-1, 1, 2, 3)).mean((1, 2, 3))[:, None]
        z = self.narrow(z.bfloat16()).float() + (z * self.phase).real + (z * self.phase).imag
        return self.wide(z.double()).float()


def test_odd_parameters_have_the_same_bits_too() -> None:
    def train(_: StaticContext) -> str:
        model = Odd()
        fill(model)
        before = [parameter.clone() for parameter in model.never.parameters()]
        parameters = [each for each in model.parameters() if each.requires_grad]
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.1)
        )
        for step in Loader(data(), Batch(16, micro=2)):
            optimizer.zero_grad(set_to_none=False)
            accumulate(model, step)
            optimizer.step()
            assert model.never.weight.grad is None
        assert digest(before) == digest(model.never.parameters())
        return digest(model.parameters())

    one_digest(train, (2, 3, 4))


def test_two_optimizers_and_several_passes() -> None:
    def train(_: StaticContext) -> str:
        first, second = net(), net()
        one = hvd.DistributedOptimizer(
            torch.optim.Adam(first.parameters(), lr=0.01), backward_passes_per_step=2
        )
        two = hvd.DistributedOptimizer(torch.optim.SGD(second.parameters(), lr=0.1))
        for step in Loader(data(), Batch(16, micro=2)):
            one.zero_grad()
            two.zero_grad()
            for number, (x, y) in zip(step.numbers, step, strict=False):
                loss_of(first(x), y).backward()
                if number % 2:  # else there are fewer passes than announced
                    (first(x).square().mean() / 3).backward()
                loss_of(second(x), first(x).detach()).backward()
            one.step()
            two.step()
        return digest([*first.parameters(), *second.parameters()])

    one_digest(train, (2, 3, 4))


def test_a_scaler_skips_the_same_steps_on_all_ranks() -> None:
    def train(_: StaticContext) -> tuple[str, float]:
        model, optimizer = trainee()
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
        for step in Loader(data(), Batch(16, micro=2), shuffle=False):
            optimizer.zero_grad()
            for number, (x, y) in zip(step.numbers, step, strict=True):
                loss = loss_of(model(x), y)
                if (step.number, number) == (1, 5):
                    loss = loss * float("inf")
                scaler.scale(loss).backward()
            optimizer.synchronize()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            with optimizer.skip_synchronize():
                scaler.step(optimizer)
            scaler.update()
        assert scaler.get_scale() == 2.0
        return digest(model.parameters())

    one_digest(train, (2, 3))


# -- quotas ----------------------------------------------------------------------------------------


class Ticks:
    """Clock of ranks that are threads; a micro-batch takes three times as long on one of them."""

    def __init__(self, slow: str) -> None:
        self._slow = slow
        self._now = threading.local()

    def __call__(self) -> float:
        slow = threading.current_thread().name == self._slow
        self._now.time = getattr(self._now, "time", 0.0) + (3.0 if slow else 1.0)
        return float(self._now.time)


def test_quotas_change_who_computes_and_not_what_comes_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(balancer, "clock", Ticks("rank-1"))

    def train(context: StaticContext) -> tuple[str, list[int]]:
        model = normed()
        optimizer = hvd.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
        loader = Loader(data(), Batch(16, micro=2, exact=True), seed=2, balance="speed")
        state = TorchState(model, optimizer, loader=loader, epoch=0)
        lengths = []
        for state.epoch in range(4):
            for step in loader:
                train_on(model, optimizer, step)
                state.commit()
                lengths.append(len(loader.block))
        return digest([*model.parameters(), *model.buffers()]), lengths

    alone = run_ranks(1, train)[0][0]
    for size, slow in ((2, 2), (4, 1)):
        results = run_ranks(size, train)
        assert {found for found, _ in results} == {alone}
        lengths = [each for _, each in results]
        assert [sum(quotas) for quotas in zip(*lengths, strict=True)] == [8] * 12
        assert (lengths[1][0], lengths[1][-1]) == (8 // size, slow)


def test_ranks_that_balance_and_ranks_that_do_not_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(balancer, "clock", Ticks("rank-1"))

    def train(context: StaticContext) -> None:
        model = net()
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01))
        balance: Any = "speed" if context.rank else "even"
        loader = Loader(data(), Batch(8, micro=1), balance=balance)
        state = TorchState(model, optimizer, loader=loader, epoch=0)
        for step in loader:
            train_on(model, optimizer, step)
            state.commit()

    with pytest.raises(RanksDisagree, match="the same dataset, seed and balance"):
        run_ranks(2, train)


# -- buffers and states ----------------------------------------------------------------------------


def normed() -> nn.Sequential:
    model = nn.Sequential(
        nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.BatchNorm1d(8, momentum=None)
    )
    model.append(nn.Linear(8, 3))
    fill(model)
    return model


def test_statistics_of_batch_norm_are_means_over_the_step() -> None:
    def train(_: StaticContext) -> str:
        model = normed()
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        loader = Loader(data(), Batch(32, micro=4, exact=True))
        state = TorchState(model, optimizer, loader=loader, epoch=0)
        for step in loader:
            before = model[1].running_mean.clone()
            means = [
                model[0](data()[loader.rows(step.number, v)][0]).mean(0) * len(rows)
                for v in range(8)
                if (rows := loader.rows(step.number, v))
            ]
            optimizer.zero_grad()
            for _, (x, y) in zip(step.numbers, step, strict=False):  # never asks for one more
                loss_of(model(x), y).backward()
            optimizer.synchronize()
            expected = 0.9 * before + 0.1 * torch.stack(means).sum(0) / step.rows
            torch.testing.assert_close(model[1].running_mean, expected.detach())
            assert model[1].num_batches_tracked == step.number + 1
            with optimizer.skip_synchronize():
                optimizer.step()
            state.commit()
        assert loader.exact
        return digest([*model.parameters(), *model.buffers()])

    one_digest(train, (2, 3, 8, 9))


def test_a_model_in_evaluation_keeps_its_statistics() -> None:
    def train(_: StaticContext) -> None:
        model = normed()
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        loader = Loader(data(), Batch(32, micro=4))
        _state = TorchState(model, optimizer, loader=loader)
        before = digest(model.buffers())
        for step in loader:
            model.eval()
            accumulate(model, step)
            optimizer.step()
            optimizer.zero_grad()
        assert digest(model.buffers()) == before

    run_ranks(3, train)


@pytest.mark.parametrize("exact", [True, "auto", False])
def test_a_buffer_that_is_no_mean_is_refused_or_told(exact: Any) -> None:
    def train(_: StaticContext) -> str:
        model = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(6, 3)))
        fill(model)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        loader = Loader(data(), Batch(8, micro=4, exact=exact))
        _state = TorchState(model, optimizer, loader=loader)
        for step in loader:
            train_on(model, optimizer, step)
        return loader.why_not_exact

    if exact is True:
        with pytest.raises(OptionError, match=r"0\.parametrizations\.weight\.0\._[uv]"):
            run_ranks(1, train)
    else:
        said = "Batch(exact=False)" if exact is False else "is no running mean"
        assert all(said in why for why in run_ranks(2, train))


class Observer(nn.Module):
    """Buffers of several kinds, as quantisation and spectral norms have them."""

    def __init__(self) -> None:
        super().__init__()
        self.least: torch.Tensor
        self.register_buffer("least", torch.full((6,), torch.inf))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("any_large", torch.zeros(2, dtype=torch.bool))
        self.register_buffer("moving", torch.zeros(6, dtype=torch.bfloat16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
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


def observed(micro: int = 2, **options: Any) -> tuple[nn.Module, Any, Loader]:
    model = nn.Sequential(Observer(), nn.utils.parametrizations.spectral_norm(nn.Linear(6, 3)))
    fill(model)
    for name, buffer in model.named_buffers():
        if name.endswith(("._u", "._v")):  # torch draws these from the generator of all ranks
            buffer.copy_(nn.functional.normalize(torch.ones_like(buffer), dim=0))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    return model, optimizer, Loader(data(), Batch(16, micro=micro, exact=True), **options)


def test_buffers_with_functions_have_the_same_bits() -> None:
    x = data().tensors[0]

    def train(_: StaticContext) -> str:
        model, optimizer, loader = observed(buffers=FUNCTIONS)
        state = TorchState(model, optimizer, loader=loader, epoch=0)
        for step in loader:
            optimizer.zero_grad()
            for rows, y in step:
                loss_of(model(rows), y).backward()
            optimizer.step()
            state.commit()
        assert loader.exact
        observer = model[0]
        assert observer.seen == ROWS
        assert torch.equal(observer.least, x.amin(0))
        assert observer.any_large.tolist() == [bool(x.gt(2.5).any())] * 2
        return digest([*model.parameters(), *model.buffers()])

    one_digest(train, (2, 3, 9))


@pytest.mark.parametrize("micro", [2, 16])
def test_a_function_gets_the_values_of_all_micro_batches_in_order(micro: int) -> None:
    def train(_: StaticContext) -> None:
        given = []

        def least(start: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
            given.append((start, values))
            return values.amin(0)

        functions = {**FUNCTIONS, "*.least": least}
        model, _optimizer, loader = observed(micro, buffers=functions)
        _state = TorchState(model, _optimizer, loader=loader)
        for step in loader:
            rows = [loader.rows(step.number, v) for v in range(16 // micro)]
            for batch, _ in step:
                model(batch)
            start, values = given[-1]
            wanted = [data()[r][0].amin(0).minimum(start) for r in rows if r]
            assert torch.equal(values, torch.stack(wanted))

    run_ranks(3, train)


@pytest.mark.parametrize(
    ("functions", "message"),
    [
        (
            {"*.lest": FUNCTIONS["*.least"]},
            r"no buffer of .* '\*\.lest'; there are: 0\.least, ",
        ),
        ({"*.least": lambda start, values: values}, r"for 0\.least returned \(8, 6\)"),
        ({"*.least": lambda start, values: 3.0}, r"for 0\.least returned <class 'float'>"),
        ({"*.least": 3.0}, r"buffers=\{'\*\.least': 3\.0\}\): must be a function"),
        ({"": FUNCTIONS["*.least"]}, "by the name of a buffer"),
    ],
)
def test_functions_that_do_not_fit_are_named(functions: dict[str, Any], message: str) -> None:
    def train(_: StaticContext) -> None:
        model, optimizer, loader = observed(buffers={**FUNCTIONS, **functions})
        _state = TorchState(model, optimizer, loader=loader)
        for x, _y in next(iter(loader)):
            model(x)

    with pytest.raises(OptionError, match=message):
        run_ranks(1, train)


@pytest.mark.parametrize("size", [1, 3])
def test_a_step_that_is_passed_over_leaves_buffers_as_they_are(size: int) -> None:
    def train(_: StaticContext) -> None:
        model = nn.Sequential(Observer(), normed())
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        functions = {name: FUNCTIONS[name] for name in ("*.least", "0.seen", "*.any_*", "*.moving")}
        loader = Loader(data(), Batch(16, micro=2), buffers=functions)
        _state = TorchState(model, optimizer, loader=loader)
        before = ""
        for step in loader:
            if step.number == 1:
                before = digest(model.buffers())
                continue
            if step.number == 2:
                assert digest(model.buffers()) == before
            train_on(model, optimizer, step)
        assert digest(model.buffers()) != before

    run_ranks(size, train)


def test_a_rollback_repeats_the_steps_since_the_commit() -> None:
    def train(_: StaticContext) -> str:
        model = normed()
        optimizer = hvd.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
        loader = Loader(data(), Batch(8, micro=2))
        state = TorchState(model, optimizer, loader=loader, epoch=0, steps=0)
        failures = {1, 4}
        while state.epoch < 2:
            for step in loader:
                train_on(model, optimizer, step)
                state.steps += 1
                if state.steps in failures:
                    failures.discard(state.steps)
                    break
                if step.number % 2:
                    state.commit()
            else:
                state.epoch += 1
                state.commit()
                continue
            state.restore()
        assert (state.steps, loader.epoch, loader.step) == (12, 1, 6)
        return digest([*model.parameters(), *model.buffers()])

    one_digest(train, (3,))


def test_a_newcomer_goes_on_where_the_others_are() -> None:
    def main(context: StaticContext) -> tuple[Any, ...]:
        model, optimizer = trainee()
        loader = Loader(data(), Batch(8, micro=2), seed=context.rank)
        state = TorchState(model, optimizer, loader=loader, epoch=0)
        if context.rank == 0:
            state.epoch = 2
            loader.set_epoch(2)
            loader.step = 3
        state.align([1, 2])
        step = next(iter(loader))
        return state.epoch, step.epoch, step.number, loader.seed, loader.rows(3, 0)

    results = run_ranks(3, main)
    assert results[0][:4] == (2, 2, 3, 0)
    assert results == [results[0]] * 3


def test_a_newcomer_with_another_batch_is_refused_by_name() -> None:
    def main(context: StaticContext) -> None:
        model, optimizer = trainee()
        loader = Loader(data(), Batch(8, micro=2 + 2 * context.rank))
        TorchState(model, optimizer, loader=loader).align([1])

    with pytest.raises(NbelasticError, match="batch of loader: expected 8 rows in 2 micro-batches"):
        run_ranks(2, main)


@pytest.mark.parametrize("exact", [True, "auto", False])
def test_a_newcomer_that_computes_other_bits(exact: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is refused by its processor's kind, or counted in with a warning, or not looked at."""
    monkeypatch.setattr(
        "nbelastic.data.loader.kernel_fingerprint", lambda: f"torch 2 avx-{current().rank}"
    )

    def main(context: StaticContext) -> str:
        model, optimizer = trainee()
        loader = Loader(data(), Batch(8, micro=2, exact=exact))
        TorchState(model, optimizer, loader=loader).align([1])
        return loader.why_not_exact

    if exact is True:
        said = "kernels of loader: expected torch 2 avx-1, came torch 2 avx-0"
        with pytest.raises(NbelasticError, match=said):
            run_ranks(2, main)
    elif exact == "auto":
        others, newcomer = run_ranks(2, main)
        assert others == ""
        said = "this process computes other bits (torch 2 avx-1) than others (torch 2 avx-0)"
        assert newcomer == said
    else:
        assert run_ranks(2, main) == ["Batch(exact=False)"] * 2


def test_a_state_with_a_loader_needs_a_distributed_optimizer() -> None:
    model = net()
    with pytest.raises(OptionError, match=r"wrap the SGD by hvd\.DistributedOptimizer"):
        TorchState(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            loader=Loader(data(), Batch(8, micro=2)),
        )


# -- mistakes --------------------------------------------------------------------------------------


def step_within_the_loop(optimizer: Any, step: Any, model: nn.Module) -> None:
    for x, y in step:
        loss_of(model(x), y).backward()
        optimizer.step()


def go_on_after_an_error(optimizer: Any, step: Any, model: nn.Module) -> None:
    for x, y in step:
        loss_of(model(x), y).backward()
        with contextlib.suppress(RuntimeError):
            loss_of(model(x), y).backward()
    optimizer.step()


def step_with_a_closure(optimizer: Any, step: Any, model: nn.Module) -> None:
    optimizer.step(lambda: None)


def zero_within_the_loop(optimizer: Any, step: Any, model: nn.Module) -> None:
    for x, y in step:
        optimizer.zero_grad()
        loss_of(model(x), y).backward()


def never_zero(optimizer: Any, step: Any, model: nn.Module) -> None:
    accumulate(model, step)
    optimizer.step()


def clip_before_synchronize(optimizer: Any, step: Any, model: nn.Module) -> None:
    accumulate(model, step)
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    optimizer.step()


def two_passes(optimizer: Any, step: Any, model: nn.Module) -> None:
    for x, y in step:
        loss_of(model(x), y).backward()
        loss_of(model(x), y).backward()


def backward_before_the_first(optimizer: Any, step: Any, model: nn.Module) -> None:
    loss_of(model(torch.ones(1, 6)), torch.ones(1, 3)).backward()


def backward_after_the_last(optimizer: Any, step: Any, model: nn.Module) -> None:
    for x, y in step:
        loss = loss_of(model(x), y)
    loss.backward()


def gradients(how: Callable[..., None]) -> Callable[[Any, Any, nn.Module], None]:
    def act(optimizer: Any, step: Any, model: nn.Module) -> None:
        optimizer.zero_grad()
        for x, y in step:
            how(model, x, y)
        optimizer.step()

    return act


def assigned(parameters: list[Any], loss: torch.Tensor) -> None:
    for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
        parameter.grad = gradient


def all_assigned(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
    assigned(list(model.parameters()), loss_of(model(x), y))


def some_assigned(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
    first, *others = model.parameters()
    loss = loss_of(model(x), y)
    gradient = torch.autograd.grad(loss, [first], retain_graph=True)[0]
    loss.backward(inputs=others)
    first.grad = gradient


def functional(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
    values = dict(model.named_parameters())

    def loss(values: dict[str, torch.Tensor]) -> torch.Tensor:
        return loss_of(torch.func.functional_call(model, values, (x,)), y)

    for name, gradient in torch.func.grad(loss)(values).items():
        values[name].grad = gradient.detach()


def surgery(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
    first = next(model.parameters())
    loss_of(model(x), y).backward()
    first.grad = torch.zeros_like(first)


ASSIGNED = r"has a gradient that was assigned.*autograd\.backward"


@pytest.mark.parametrize(
    ("act", "message", "options"),
    [
        (step_within_the_loop, "after 1 of this rank's 4 micro-batches", {}),
        (go_on_after_an_error, "gradients of this step were dropped", {}),
        (step_with_a_closure, r"step\(closure\) cannot be used with a Loader", {}),
        (zero_within_the_loop, r"zero_grad\(\) was called after backward\(\)", {}),
        (never_zero, r"call optimizer\.zero_grad\(\) before the loop", {}),
        (clip_before_synchronize, r"changed between backward\(\) and step\(\)", {}),
        (two_passes, "backward_passes_per_step=1 times in one micro-batch", {}),
        (backward_before_the_first, "iterate over the step", {}),
        (backward_after_the_last, "iterate over the step, and call it in that loop", {}),
        (gradients(all_assigned), ASSIGNED, {}),
        (gradients(some_assigned), ASSIGNED, {}),
        (gradients(functional), ASSIGNED, {}),
        (gradients(surgery), ASSIGNED, {}),
        (never_zero, r"op=…\) cannot be used", {"op": hvd.Sum}),
        (never_zero, r"op=…\) cannot be used", {"op": hvd.Adasum}),
        (never_zero, r"compression=…\) cannot be used", {"compression": hvd.Compression.fp16}),
    ],
)
def test_mistakes_are_named(act: Any, message: str, options: dict[str, Any]) -> None:
    def main(_: StaticContext) -> None:
        model = net()
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), **options)
        for step in Loader(data(), Batch(8, micro=2)):
            act(optimizer, step, model)

    with pytest.raises(ValueError if options else RuntimeError, match=message):
        run_ranks(1, main)


def test_validation_in_a_step_leaves_its_gradients_alone() -> None:
    def train(validates: bool) -> str:
        model, optimizer = trainee()
        validation = Loader(data(), Batch(16, micro=8), shuffle=False)
        for step in Loader(data(), Batch(8, micro=2)):
            optimizer.zero_grad()
            for x, y in step:
                loss_of(model(x), y).backward()
                if validates and step.number == 1:
                    list(map(list, validation))
            if validates:
                for held_out in validation:
                    list(held_out)
                    break
            optimizer.step()
        return digest(model.parameters())

    (right,) = run_ranks(1, lambda _: train(False))
    assert run_ranks(2, lambda _: train(True)) == [right] * 2


@pytest.mark.parametrize("after_the_loader", [False, True])
def test_gradients_of_several_steps_are_not_accumulated(after_the_loader: bool) -> None:
    def main(_: StaticContext) -> None:
        model, optimizer = trainee()
        for step in Loader(data(), Batch(44 if after_the_loader else 16, micro=4)):
            accumulate(model, step)
        optimizer.step()

    with pytest.raises(RuntimeError, match="were not used before the next step began"):
        run_ranks(1, main)


def test_buffers_that_are_not_initialised_are_named() -> None:
    model = nn.Sequential(nn.Linear(6, 3), nn.LazyBatchNorm1d())
    hvd.init()
    try:
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model[0].parameters(), lr=0.1))
        loader = Loader(data(), Batch(8, micro=4))
        _state = TorchState(model, optimizer, loader=loader)
        with pytest.raises(RuntimeError, match=r"the buffer 1\.running_mean .* not initialised"):
            next(iter(next(iter(loader))))
    finally:
        hvd.shutdown()


@pytest.mark.parametrize("begins", [False, True])
@pytest.mark.parametrize("call", ["commit", "check_host_updates"])
def test_ranks_may_not_leave_or_roll_back_in_a_step(call: str, begins: bool) -> None:
    def main(_: StaticContext) -> None:
        model, optimizer = trainee()
        loader = Loader(data(), Batch(8, micro=2))
        state = TorchState(model, optimizer, loader=loader, epoch=0)
        for step in loader:
            for x, y in step if begins else ():
                loss_of(model(x), y).backward()
            getattr(state, call)()

    with pytest.raises(RuntimeError, match=rf"{call}\(\) was called in a step of the loader"):
        run_ranks(1, main)


def test_ranks_may_leave_after_a_step() -> None:
    def main(_: StaticContext) -> list[int]:
        model, optimizer = trainee()
        loader = Loader(data(), Batch(8, micro=2))
        state = TorchState(model, optimizer, loader=loader, epoch=0)
        seen = []
        for step in loader:
            accumulate(model, step)
            optimizer.step()
            optimizer.zero_grad()
            state.check_host_updates()
            seen.append(loader.step)
        return seen

    (alone,) = run_ranks(1, main)
    assert alone == [*range(1, len(alone) + 1)]


@pytest.mark.parametrize("how", ["scaler", "elsewhere", "by_samples"])
def test_rates_that_follow_the_number_of_ranks_are_refused(how: str) -> None:
    def main(_: StaticContext) -> None:
        model, optimizer = trainee()
        values: dict[str, Any] = {"loader": Loader(data(), Batch(8, micro=2))}
        if how == "by_samples":
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
            values["schedule"] = hvd.elastic.by_samples(schedule)
        else:
            scaler = hvd.elastic.LRScaler(optimizer)
            values |= {"scaler": scaler} if how == "scaler" else {}
        TorchState(model, optimizer, **values)

    with pytest.raises(OptionError, match="an LRScaler or by_samples"):
        run_ranks(1, main)


def test_ranks_at_different_steps_or_in_other_orders_are_refused() -> None:
    check_places([(1, 2, 3)] * 3)
    with pytest.raises(RanksDisagree, match="rank 0: step 2 of epoch 1, rank 1: step 3 of epoch 1"):
        check_places([(1, 2, 3), (1, 3, 3)])
    with pytest.raises(RanksDisagree, match="deal rows in different orders"):
        check_places([(1, 2, 3), (1, 2, 4)])

    def main(context: StaticContext) -> None:
        model, optimizer = trainee()
        for step in Loader(data(), Batch(8, micro=2)):
            optimizer.zero_grad()
            accumulate(model, step)
            if (context.rank, step.number) not in ((0, 2), (1, 3)):
                optimizer.step()

    with pytest.raises(CollectiveError, match="ranks are at different steps"):
        run_ranks(2, main)


def test_gradients_passed_on_by_backward_train_to_the_same_bits() -> None:
    def train(passes_on: bool) -> str:
        model, optimizer = trainee()
        parameters = list(model.parameters())
        for step in Loader(data(), Batch(8, micro=2)):
            optimizer.zero_grad()
            for x, y in step:
                loss = loss_of(model(x), y)
                if passes_on:
                    torch.autograd.backward(parameters, torch.autograd.grad(loss, parameters))
                else:
                    loss.backward()
            optimizer.step()
        return digest(model.parameters())

    (right,) = run_ranks(1, lambda _: train(False))
    assert run_ranks(2, lambda _: train(True)) == [right] * 2


def two_loaders(how: str, fails: bool = False) -> Callable[[StaticContext], str]:
    def main(_: StaticContext) -> str:
        model, optimizer = trainee()
        labelled = Loader(data(), Batch(8, micro=2), seed=1)
        other = Loader(data(), Batch(8, micro=2), seed=2)
        state = TorchState(model, optimizer, labelled=labelled, other=other)
        left = 1 if fails else 0
        seen: list[tuple[int, int]] = []
        while len(seen) < 3:
            for step, more in zip(labelled, other, strict=False):
                optimizer.zero_grad()
                if how == "together":
                    for (x, y), (u, _) in zip(step, more, strict=True):
                        (loss_of(model(x), y) + model(u).square().mean()).backward()
                elif how == "the other first":
                    for (u, _), (x, y) in zip(more, step, strict=True):
                        (loss_of(model(x), y) + model(u).square().mean()).backward()
                else:
                    accumulate(model, step)
                    for u, _ in more:
                        model(u).square().mean().backward()
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


@pytest.mark.parametrize("how", ["together", "the other first"])
def test_two_loaders_in_one_step_have_the_same_bits_on_any_number_of_ranks(how: str) -> None:
    (right,) = run_ranks(1, two_loaders("together"))
    assert run_ranks(1, two_loaders(how, fails=True)) == [right]
    for size in (2, 3, 4):
        assert run_ranks(size, two_loaders(how)) == [right] * size


def test_two_loaders_one_after_the_other_are_refused_with_the_way() -> None:
    with pytest.raises(RuntimeError, match=r"iterate over both steps together: .*zip\(step, "):
        run_ranks(1, two_loaders("one by one"))


def test_backward_in_a_step_whose_loop_is_over_is_an_error() -> None:
    def main(_: StaticContext) -> None:
        model, optimizer = trainee()
        loader = Loader(data(), Batch(8, micro=2))
        for x, y in next(iter(loader)):
            loss = loss_of(model(x), y)
            with pytest.raises(RuntimeError, match=r"keep `steps = iter\(loader\)`"):
                loss.backward()
            break
        loss_of(model(x), y).backward()  # an ordinary one
        optimizer.step()
        optimizer.zero_grad()
        steps = iter(loader)
        for x, y in next(steps):
            loss_of(model(x), y).backward()
        optimizer.step()

    run_ranks(1, main)


def test_ordinary_steps_before_and_after_a_loader_are_reduced_as_ever() -> None:
    def main(context: StaticContext) -> torch.Tensor:
        model, optimizer = trainee()

        def ordinary() -> None:
            optimizer.zero_grad()
            x = torch.full((2, 6), float(context.rank))
            model(x).sum().backward()
            optimizer.synchronize()
            gradient = model[2].weight.grad
            assert gradient is not None
            context.seen = [*getattr(context, "seen", []), gradient.clone()]
            with optimizer.skip_synchronize():
                optimizer.step()

        for _ in range(3):
            ordinary()
        for step in Loader(data(), Batch(8, micro=2)):
            train_on(model, optimizer, step)
        for _ in range(3):
            ordinary()
        return torch.stack(context.seen)

    first, second = run_ranks(2, main)
    assert torch.equal(first, second)
    assert first.abs().sum() > 0


# -- the witness -----------------------------------------------------------------------------------


def test_one_flipped_bit_changes_the_digest() -> None:
    parameters = [torch.randn(33), torch.randn(7, dtype=torch.float64), torch.ones(5).bfloat16()]
    before = parameter_digest(parameters)
    assert 0 <= before < 2**52
    for parameter in parameters:
        bits = parameter.view(torch.uint8)
        for place in (0, len(bits) - 1):
            bits[place] ^= 64
            assert parameter_digest(parameters) != before
            bits[place] ^= 64
    assert parameter_digest(parameters) == before
    assert parameter_digest(parameters[::-1]) != before


def test_ranks_with_other_parameters_are_named() -> None:
    check_witness([7.0, 7.0], 0)
    with pytest.raises(NbelasticError, match="the parameters of rank 1 are not those of most"):
        check_witness([7.0, 8.0, 7.0], 1)
    with pytest.raises(CollectiveError, match="rank 1: 0000000000008"):
        check_witness([7.0, 8.0, 7.0], 2)
    with pytest.raises(RanksDisagree, match="rank 0: 0000000000007, rank 1: 0000000000008"):
        check_witness([7.0, 8.0], 0)


def test_all_ranks_name_the_one_that_differs() -> None:
    done = threading.Barrier(3)  # a rank that has raised would break the operation of the others

    def main(context: StaticContext) -> BaseException | None:
        model = net()
        if context.rank == 1:
            model[2].weight.data.view(torch.int32)[1, 1] ^= 1
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        try:
            for step in Loader(data(), Batch(8, micro=2)):
                train_on(model, optimizer, step)
        except NbelasticError as error:
            return error
        finally:
            done.wait(30)
        return None

    errors = run_ranks(3, main)
    assert [type(error) for error in errors] == [CollectiveError, NbelasticError, CollectiveError]
    (text,) = {
        str(error)[str(error).index("the parameters of rank 1 are not") :] for error in errors
    }
    found = re.findall(r"rank (\d): ([0-9a-f]{13})", text)
    assert [rank for rank, _ in found] == ["0", "1", "2"]
    assert found[0][1] == found[2][1] != found[1][1]


def test_ranks_that_differ_find_out_in_their_first_step() -> None:
    def main(context: StaticContext) -> None:
        model = net()
        if context.rank == 1:
            model[0].bias.data.view(torch.int32)[3] ^= 1
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        for step in Loader(data(), Batch(8, micro=2)):
            train_on(model, optimizer, step)

    # The first rank to raise may break the operation of the other.
    with pytest.raises(CollectiveError, match="ranks have different parameters"):
        run_ranks(2, main)
