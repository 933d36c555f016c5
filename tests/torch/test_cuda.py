"""Gradients on a GPU, where there is one: two ranks and more share it."""

from __future__ import annotations

import pytest
import torch

import nbelastic.torch as hvd
from nbelastic.collectives import Op
from tests.collectives.worlds import KINDS
from tests.torch.modes import set_mode
from tests.torch.training import (
    SGD,
    STEPS,
    assert_close,
    batch,
    make_model,
    parameters_of,
    train_alone,
)

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")


@pytest.fixture(params=[*KINDS, "gpu"])
def kind(request):
    """Return what CUDA IPC is, which this machine has, as well as the kinds that all have."""
    return request.param


def loss_of(model, step, context):
    inputs, targets = batch(step, context.rank, context.size)
    return torch.nn.functional.mse_loss(model(inputs.cuda()), targets.cuda())


def train(context, **options):
    model = make_model().cuda()
    optimizer = hvd.DistributedOptimizer(SGD(model.parameters()), **options)
    for step in range(STEPS):
        loss_of(model, step, context).backward()
        optimizer.step()
        optimizer.zero_grad()
    return on_host(parameters_of(model))


def on_host(tensors):
    assert all(tensor.is_cuda for tensor in tensors)
    return [tensor.cpu() for tensor in tensors]


@pytest.mark.parametrize("several", [False, True], ids=["one bucket", "several"])
@pytest.mark.parametrize("size", [2, 3])
def test_ranks_on_a_gpu_train_as_one_process_would(ranks, kind, size, several):
    def rank_main(context):
        with pytest.MonkeyPatch.context() as monkeypatch:
            if several:
                set_mode(monkeypatch, "as it is", 200, 800)
            return train(context)

    results = ranks.run(size, rank_main, kind)
    for result in results:
        assert_close(result, train_alone(SGD))
        assert all(torch.equal(a, b) for a, b in zip(result, results[0], strict=True))


@pytest.mark.parametrize(
    "options",
    [
        {"compression": hvd.Compression.fp16},
        {"compression": hvd.Compression.bf16},
        {"op": hvd.Sum},
        {"op": hvd.Adasum},
        {"gradient_predivide_factor": 2.0},
        {"num_groups": 2},
    ],
    ids=str,
)
def test_options_mean_what_they_do_on_the_host(ranks, options):
    on_gpu = ranks.run(2, lambda context: train(context, **options))

    def rank_main(context):
        model = make_model()
        optimizer = hvd.DistributedOptimizer(SGD(model.parameters()), **options)
        for step in range(STEPS):
            inputs, targets = batch(step, context.rank, context.size)
            torch.nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
        return parameters_of(model)

    for got, want in zip(on_gpu, ranks.run(2, rank_main), strict=True):
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-3)


def test_gradients_computed_on_several_streams_are_whole(ranks):
    """The sooner it is computed the later it is there, on streams that only autograd waits for."""

    def rank_main(context):
        weights = [torch.nn.Parameter(torch.zeros(1 << 20, device="cuda")) for _ in range(4)]
        streams, accumulators = [torch.cuda.Stream() for _ in weights], []
        for weight, stream in zip(weights, streams, strict=True):
            with torch.cuda.stream(stream):  # where it is made, gradients are accumulated
                edge = torch.autograd.graph.get_gradient_edge(weight)
                accumulators.append(edge.node)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(weights, 1.0))
        present = torch.cuda.current_stream()
        for _ in range(4):
            parts = []
            for number, weight in enumerate(weights):
                streams[number].wait_stream(present)
                with torch.cuda.stream(streams[number]):
                    late = Late.apply(weight, number * 10_000_000)
                    parts.append(late.sum() * (1 + context.rank))
            for stream in streams:
                present.wait_stream(stream)
            sum(parts).backward()
            optimizer.step()
            optimizer.zero_grad()
        return [weight.detach().cpu() for weight in weights]

    for weights in ranks.run(2, rank_main):
        assert all(weight.eq(-4 * 1.5).all() for weight in weights)


def test_what_has_been_reduced_is_waited_for(ranks):
    """It takes milliseconds to come back."""

    def rank_main(context):
        weight = torch.nn.Parameter(torch.zeros(1 << 25, device="cuda"))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], 1.0))
        for _ in range(4):
            (weight.sum() * (1 + context.rank)).backward()
            optimizer.step()
            optimizer.zero_grad()
        return weight.detach().eq(-4 * 1.5).all().item()

    assert ranks.run(2, rank_main) == [True, True]


def test_the_memory_of_copies_is_pinned(ranks):
    def rank_main(context):
        weight = torch.nn.Parameter(torch.zeros(1 << 20, device="cuda"))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], 1.0))
        weight.sum().backward()
        optimizer.step()
        (bucket,) = optimizer._reducer._agreement.layout.groups
        return bucket._staging.host.is_pinned()

    assert ranks.run(2, rank_main, "shm") == [True] * 2


class Late(torch.autograd.Function):
    """What it is given; its gradient takes a while."""

    @staticmethod
    def forward(ctx, values, cycles):
        ctx.cycles = cycles
        return values.clone()

    @staticmethod
    def backward(ctx, gradient):
        torch.cuda._sleep(ctx.cycles)
        return gradient.clone(), None


def test_gradients_stay_where_they_were_reduced(ranks):
    def rank_main(context):
        model = make_model().cuda()
        optimizer = hvd.DistributedOptimizer(SGD(model.parameters()))
        places = []
        for step in range(4):
            loss_of(model, step, context).backward()
            optimizer.step()
            places.append([parameter.grad.data_ptr() for parameter in model.parameters()])
            optimizer.zero_grad(set_to_none=False)
        return places

    for places in ranks.run(2, rank_main):
        assert places[2] == places[3]  # the first two rounds learn the order


def test_mixed_precision_with_a_scaler_and_clipping(ranks):
    def rank_main(context):
        model = make_model().float().cuda()
        optimizer = hvd.DistributedOptimizer(SGD(model.parameters()))
        scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10)
        for step in range(STEPS):
            inputs, targets = batch(step, context.rank, context.size)
            with torch.autocast("cuda", dtype=torch.float16):
                outputs = model(inputs.float().cuda())
            loss = torch.nn.functional.mse_loss(outputs.float(), targets.float().cuda())
            scaler.scale(loss).backward()
            optimizer.synchronize()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 10.0)
            with optimizer.skip_synchronize():
                scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return on_host(parameters_of(model))

    alone = train_alone(SGD)
    for result in ranks.run(2, rank_main):
        for got, want in zip(result, alone, strict=True):
            torch.testing.assert_close(got.double(), want, rtol=2e-2, atol=5e-3)


def test_unscaling_gradients_under_way_is_noticed(ranks):
    def rank_main(context):
        model = make_model().float().cuda()
        optimizer = hvd.DistributedOptimizer(SGD(model.parameters()))
        scaler = torch.amp.GradScaler("cuda", init_scale=8.0)
        scaler.scale(model(torch.ones(1, 6, device="cuda")).sum()).backward()
        scaler.unscale_(optimizer)
        with pytest.raises(RuntimeError, match="unscale gradients"):
            optimizer.step()
        return [parameter.grad for parameter in model.parameters()]

    assert ranks.run(2, rank_main) == [[None] * 6] * 2


def test_a_model_on_both_host_and_gpu_trains(ranks):
    def rank_main(context):
        first, second = torch.nn.Linear(6, 300).double(), torch.nn.Linear(300, 3).double()
        for number, parameter in enumerate([*first.parameters(), *second.parameters()]):
            torch.nn.init.constant_(parameter, 0.01 * (number + 1))
        second.cuda()
        parameters = [*first.parameters(), *second.parameters()]
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(parameters, 0.1))
        for step in range(STEPS):
            inputs, targets = batch(step, context.rank, context.size)
            outputs = second(first(inputs).cuda())
            torch.nn.functional.mse_loss(outputs, targets.cuda()).backward()
            optimizer.step()
            optimizer.zero_grad()
        return [parameter.detach().cpu() for parameter in parameters]

    (alone,) = ranks.run(1, rank_main)
    for result in ranks.run(2, rank_main):
        assert_close(result, alone)


def compute_exactly():
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.allow_tf32 = False


def test_gradients_of_convolutions_are_averaged(ranks, kind):
    def rank_main(context):
        compute_exactly()
        torch.manual_seed(0)
        layers = [torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU()]
        layers += [torch.nn.Conv2d(8, 16, 3, 2), torch.nn.BatchNorm2d(16), torch.nn.ReLU()]
        model = torch.nn.Sequential(*layers).cuda().to(memory_format=torch.channels_last)
        parameters = list(model.parameters())
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(parameters, 0.1))
        furthest = 0.0
        for step in range(4):
            images = torch.randn(4, 3, 12, 12, device="cuda") * (1 + context.rank + step)
            wanted = torch.autograd.grad(model(images).square().mean(), parameters)
            for gradient in wanted:
                dense = gradient.contiguous()
                context.communicator().allreduce(dense, Op.SUM)
                gradient.copy_(dense / context.size)
            model(images).square().mean().backward()
            optimizer.synchronize()
            for parameter, gradient in zip(parameters, wanted, strict=True):
                away = (parameter.grad - gradient).norm() / (gradient.norm() + 1e-3)
                furthest = max(furthest, away.item())
            with optimizer.skip_synchronize():
                optimizer.step()
            optimizer.zero_grad()
        return furthest

    assert max(ranks.run(2, rank_main, kind)) < 1e-4
