"""On a GPU that ranks share they compute what they compute on the host; where there is a GPU.

Each program of a table runs over every kind of communicator with its tensors on the GPU, and once
with these on the host. ``gpu`` sums by CUDA IPC, and ``gpu_nccl`` by NCCL, which wants a GPU for
each rank of a host. So each rank is a host of its own (``NBELASTIC_NCCL_SHARED_GPU``), and what
travels between them goes over sockets.
"""

import functools
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import distributed as dist
from torch._C._distributed_c10d import AllreduceOptions, BroadcastOptions, ReduceOptions
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import nbelastic.torch as hvd
from nbelastic.collectives import Op
from nbelastic.collectives.nccl.library import SHARED_GPU_VARIABLE
from nbelastic.collectives.reduction_tree import Blocks
from nbelastic.data import Batch, Loader
from nbelastic.torch.process_group import ElasticProcessGroup
from tests.collectives.test_operations import REDUCED, ops_of, reduced, same, values
from tests.collectives.worlds import KINDS
from tests.support.clusters import sizes
from tests.support.exact_training import digest
from tests.support.processes import Ranks
from tests.torch.modes import set_mode
from tests.torch.test_process_group import options
from tests.torch.training import (
    SGD,
    STEPS,
    assert_close,
    assert_equal,
    batch,
    make_model,
    train_alone,
)

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")

GPU = "cuda"
ON_GPU = {"gpu": "cuda_ipc", "gpu_nccl": "nccl"}  # kinds that sum there, and their names
on_gpu = pytest.mark.parametrize("kind", ON_GPU)
ROOT = Path(__file__).parents[2]


def use_gpu(_context=None):
    """Use the GPU: a rank that has not done so when a generation is formed does not reduce there.

    Processes are kept from test to test.
    """
    torch.zeros(1, device=GPU)


@pytest.fixture(scope="module")
def ranks():
    """Ranks in processes: backward has one thread for a GPU in each, so they cannot be threads."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv(SHARED_GPU_VARIABLE, "1")
        processes = Ranks(4)
    with processes as ranks:
        ranks.run(4, use_gpu)
        yield ranks


def there(ranks, size, function, kind):
    """Run a function on ranks that are seen to reduce on the GPU, if this kind does."""

    def rank_main(context):
        communicator = context.communicator()
        if size > 1 and kind in ON_GPU:
            assert communicator.name == ON_GPU[kind], communicator.fallback_reason
        return function(context)

    return ranks.run(size, rank_main, kind)


# -- programs --------------------------------------------------------------------------------------


def train(context, device, several=False, scaled=False, **options):
    """Train; `scaled` with mixed precision and clipping."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        if several:
            set_mode(monkeypatch, "as it is", 200, 800)
        model = make_model().to(device, torch.float32 if scaled else torch.float64)
        optimizer = hvd.DistributedOptimizer(SGD(model.parameters()), **options)
        scaler = torch.amp.GradScaler(device, init_scale=2.0**10, enabled=scaled)
        for step in range(STEPS):
            inputs, targets = (each.to(device) for each in batch(step, context.rank, context.size))
            with torch.autocast(device, dtype=torch.float16, enabled=scaled):
                outputs = model(inputs.to(model[0].weight.dtype))
            loss = torch.nn.functional.mse_loss(outputs.to(targets.dtype), targets)
            scaler.scale(loss).backward()
            optimizer.synchronize()
            if scaled:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 10.0)
            with optimizer.skip_synchronize():
                scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return [*model.parameters()]


def follow(context, device, optimizer, forward):
    """Train on the batches of a rank."""
    for step in range(STEPS):
        optimizer.zero_grad()
        inputs, targets = (each.to(device) for each in batch(step, context.rank, context.size))
        torch.nn.functional.mse_loss(forward(inputs), targets).backward()
        optimizer.step()


def train_ddp(context, device, bucket_mb):
    model = make_model().to(device)
    group = ElasticProcessGroup(context)
    ddp = DistributedDataParallel(model, process_group=group, bucket_cap_mb=bucket_mb)
    follow(context, device, SGD(model.parameters()), ddp)
    return [*model.parameters()]


def train_on_both(context, device):
    """Half of the model stays on the host."""
    model = make_model()
    model[2:].to(device)
    optimizer = hvd.DistributedOptimizer(SGD(model.parameters()))
    follow(context, device, optimizer, lambda inputs: model[2:](model[:2](inputs.cpu()).to(device)))
    return [each.to(device) for each in model.parameters()]


def train_much(context, device):
    """Gradients that take milliseconds to come back."""
    weight = torch.nn.Parameter(torch.zeros(1 << 25, device=device))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], 1.0))
    for _ in range(4):
        (weight.sum() * (1 + context.rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [weight.unique()]


def moments_of(optimizer):
    return [each["exp_avg"] for each in optimizer.state.values()]


def broadcast_states(context, device):
    torch.manual_seed(context.rank)
    model = torch.nn.Linear(3, 2).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1 * (1 + context.rank))
    model(torch.full((4, 3), 0.3, device=device)).sum().backward()
    optimizer.step()
    hvd.broadcast_parameters(model.state_dict(), 0)
    hvd.broadcast_optimizer_state(optimizer, 0)
    return [*model.parameters(), *moments_of(optimizer)]


def reduce_all_types(context, device):
    communicator, found = context.communicator(), []
    for dtype in REDUCED:
        for count in (1, 1000, 1_000_003):
            for op in ops_of(dtype):
                if op is Op.AVERAGE and context.size == 3:
                    continue  # thirds are rounded
                tensor = values(context.rank, (count,), dtype).to(device)
                communicator.allreduce(tensor, op)
                theirs = [values(rank, (count,), dtype) for rank in range(context.size)]
                same(tensor.cpu(), reduced(op, theirs))
                found.append(tensor[:1])
    truths = torch.tensor([context.rank == 1, False, True], device=device)
    communicator.allreduce(truths)
    return [*found, truths]


def move(context, device):
    communicator, rank, size = context.communicator(), context.rank, context.size

    def full(count, value=0.0):
        return torch.full((count,), float(value), device=device)

    root = full(1_000_001, rank)
    communicator.broadcast(root, size - 1)
    gathered = [full(7) for _ in range(size)]
    communicator.allgather(gathered, full(7, rank))
    share, uneven = full(9), full(rank + 1)
    communicator.reduce_scatter(share, [full(9, to) for to in range(size)])
    communicator.reduce_scatter(uneven, [full(to + 1, to) for to in range(size)], Op.AVERAGE)
    received = [full(rank + 1) for _ in range(size)]
    communicator.all_to_all(received, [full(to + 1, 10 * rank + to) for to in range(size)])
    return [root.unique(), *gathered, share, uneven, *received]


def drop_handles(context, device):
    for _ in range(20):
        context.communicator().allreduce_async(torch.ones(1_000_000, device=device))
        torch.full((1_000_000,), 7.0, device=device)
    tensor = torch.ones(1_000_000, device=device)
    context.communicator().allreduce(tensor)
    return [tensor.unique()]


def noise(rank, count):
    """Numbers whose sum depends on the order in which they are added."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(count, generator=generator) * 10 ** (rank % 3)


def sum_along_trees(context, device):
    found = []
    for blocks in (Blocks.even(7, context.size), Blocks((6, *[0] * (context.size - 2), 1))):
        nodes = [[noise(sum(n), 3_000_001).to(device)] for n in blocks.covers[context.rank]]
        output = torch.zeros(3_000_001, device=device)
        context.communicator().allreduce_tree(nodes, blocks, [output])
        found.append(output)
    return found


def call_the_process_group(context, device):
    group, rank, size = ElasticProcessGroup(context), context.rank, context.size
    plain = (torch.arange(15, device=device).view(3, 5) + rank).float()
    found = []

    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.int16, torch.complex64):
        found.append(plain.to(dtype))
        group.allreduce([found[-1]]).wait()
    mean, single, copy = plain.clone(), plain.clone().t(), plain.clone()  # one not contiguous
    group.allreduce([mean], options(AllreduceOptions, reduceOp=dist.ReduceOp.AVG)).wait()
    group.reduce([single], options(ReduceOptions, rootRank=1)).wait()
    group.broadcast([copy], options(BroadcastOptions, rootRank=1)).wait()
    part, whole = torch.empty_like(plain), torch.empty(3 * size, 5, device=device)
    group.reduce_scatter([part], [[plain + each for each in range(size)]]).wait()
    group.all_gather_single(whole, plain).wait()
    outputs = [torch.empty_like(plain) for _ in range(size)]
    group.alltoall(outputs, [plain * 10 + each for each in range(size)]).wait()
    received = torch.empty_like(plain)
    sent = group.send([plain], (rank + 1) % size)
    group.recv([received], (rank - 1) % size).wait()
    sent.wait()
    sparse = torch.eye(3, device=device).to_sparse()
    group.allreduce([sparse]).wait()
    (future,) = group.allreduce([plain.clone()]).get_future().wait()
    late = torch.ones(1000, 1000, device=device)
    for _ in range(5):
        late = late @ late / 1000  # under way as the operation is called
    group.allreduce([late]).wait()
    found += [mean, single, copy, part, whole, *outputs, received, sparse.to_dense(), future]
    return [*found, (late * 2).mean().view(1)]  # in the order of the stream


# Programs, and how far results on the GPU may be from those on the host. After those that train all
# ranks have the same bits.
EXACT, CLOSE = (0.0, 0.0), (1e-6, 1e-6)
ROUNDED, COARSE = (1e-11, 1e-13), (2e-2, 5e-3)
PROGRAMS = {
    "one bucket": (train, ROUNDED),
    "several buckets": (functools.partial(train, several=True), ROUNDED),
    "float16": (functools.partial(train, compression=hvd.Compression.fp16), COARSE),
    "bfloat16": (functools.partial(train, compression=hvd.Compression.bf16), COARSE),
    "sum": (functools.partial(train, op=hvd.Sum), ROUNDED),
    "adasum": (functools.partial(train, op=hvd.Adasum), ROUNDED),
    "predivided": (functools.partial(train, gradient_predivide_factor=2.0), ROUNDED),
    "groups": (functools.partial(train, num_groups=2), ROUNDED),
    "ddp": (functools.partial(train_ddp, bucket_mb=25), ROUNDED),
    "ddp in several buckets": (functools.partial(train_ddp, bucket_mb=0.0001), ROUNDED),
    "mixed precision": (functools.partial(train, scaled=True), COARSE),
    "host and GPU": (train_on_both, ROUNDED),
    "much": (train_much, EXACT),
    "broadcast of states": (broadcast_states, COARSE),
    "all types": (reduce_all_types, EXACT),
    "moves": (move, CLOSE),
    "dropped handles": (drop_handles, EXACT),
    "trees": (sum_along_trees, EXACT),
    "process group": (call_the_process_group, CLOSE),
}


BY_COMMUNICATORS = {reduce_all_types, move, drop_handles, sum_along_trees}


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("kind", [*KINDS, *ON_GPU])
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_gpu_computes_what_the_host_does(ranks, name, kind, size):
    program, tolerance = PROGRAMS[name]
    if kind not in ON_GPU and (size != 3 or program in BY_COMMUNICATORS):
        pytest.skip("what the host reduces is tested there")

    def rank_main(context, device):
        found = program(context, device)
        assert {each.device.type for each in found} == {device}
        return [each.detach().cpu() for each in found]

    found = there(ranks, size, functools.partial(rank_main, device=GPU), kind)
    wanted = ranks.run(size, functools.partial(rank_main, device="cpu"), "gloo")
    for mine, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=tolerance[0], atol=tolerance[1])
        if tolerance in (ROUNDED, COARSE):
            assert_equal(mine, found[0])
        if name in ("one bucket", "several buckets", "ddp"):
            assert_close(mine, train_alone(SGD))


# -- what is not on the host -----------------------------------------------------------------------


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


def test_gradients_computed_on_several_streams_are_whole(ranks):
    """The sooner it is computed the later it is there, on streams that only autograd waits for."""

    def rank_main(context):
        weights = [torch.nn.Parameter(torch.zeros(1 << 20, device=GPU)) for _ in range(4)]
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


@on_gpu
@pytest.mark.parametrize("size", [2, 3, 4])
def test_sums_have_the_same_bits_on_all_ranks_in_any_number_of_rounds(ranks, size, kind):
    def rank_main(context):
        digests = []
        for _ in range(3):
            tensors = [noise(context.rank, count).to(GPU) for count in (30_000_000, 5, 70_001)]
            torch.cuda._sleep(1_000_000 * context.rank)
            torch._foreach_add_(tensors, 0.0)  # what has been computed last is waited for
            handles = [context.communicator().allreduce_async(tensor) for tensor in tensors]
            for handle in handles:
                handle.wait()
            digests.append(digest(each.cpu() for each in tensors))
        if kind == "gpu":  # NCCL chooses an order of its own
            same(tensors[2].cpu(), sum(noise(rank, 70_001) for rank in range(size)))
        return digests

    results = there(ranks, size, rank_main, kind)
    assert all(result == results[0] for result in results)
    assert results[0][0] == results[0][1] == results[0][2]


def test_exact_steps_have_one_digest_on_one_two_and_four_ranks(ranks):
    def rank_main(_context):
        """Train with sums along a tree; return a digest of the parameters and the moments."""
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        torch.use_deterministic_algorithms(True)
        try:
            rows = TensorDataset(noise(0, 44 * 6).view(44, 6), noise(1, 44 * 3).view(44, 3))
            model = make_model().float().to(GPU)
            optimizer = hvd.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
            for step in Loader(rows, Batch(14, micro=2, exact=True), seed=2):
                optimizer.zero_grad()
                for x, y in step:
                    torch.nn.functional.mse_loss(model(x.to(GPU)), y.to(GPU)).backward()
                optimizer.step()
        finally:
            torch.use_deterministic_algorithms(False)
        moments = [each for state in optimizer.state.values() for each in state.values()]
        return digest(each.detach().cpu() for each in (*model.parameters(), *moments))

    (right,) = ranks.run(1, rank_main)
    for size in (2, 4):
        assert there(ranks, size, rank_main, "gpu") == [right] * size


# -- over many generations -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "what",
    [
        ("kills", "--kills", "20", "--over", "nccl"),
        ("resets", "--resets", "10", "--over", "nccl"),
        ("resets", "--resets", "50", "--over", "cuda_ipc"),
    ],
)
def test_ranks_that_are_killed_or_reset_leave_right_sums_and_no_memory(what):
    """At random moments, in the middle of sums. How long it takes is in the output.

    In a process of its own: its ranks are forks of one that has not used CUDA.
    """
    command = [sys.executable, "-m", "benchmarks.gpu", *what, "--ranks", "4"]
    outcome = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    print(outcome.stdout)
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    assert what[0] == "resets" or "all sums right: True" in outcome.stdout, outcome.stderr


def work(marks, steps, kill_at):
    hvd.init()
    device = hvd.device()
    assert device.type == "cuda"
    torch.manual_seed(hvd.rank())
    model = torch.nn.Linear(64, 8).to(device)
    optimizer = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters()))
    state = hvd.elastic.TorchState(model, optimizer, step=0)

    @hvd.elastic.run
    def loop(state):
        while state.step < steps:
            optimizer.zero_grad()
            model(torch.ones(3, 64, device=device) + state.step).square().sum().backward()
            optimizer.step()
            if state.step == kill_at and hvd.rank() == 1 and not (marks / "done").exists():
                (marks / "done").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            state.step += 1
            state.commit()

    loop(state)
    assert all(each.device == device for each in (*model.parameters(), *moments_of(optimizer)))
    return state.step, [each.detach().cpu().tolist() for each in model.parameters()]


def work_apart(*arguments):
    """Train as a host of one's own, of which NCCL wants no more than one rank for each GPU."""
    os.environ[SHARED_GPU_VARIABLE] = "1"
    return work(*arguments)


@pytest.mark.parametrize(
    ("backend", "kind", "function"),
    [
        ("shm", "shm", work),
        ("auto", "cuda_ipc", work),
        ("cuda_ipc", "cuda_ipc", work),
        ("auto", "nccl", work_apart),
        ("nccl", "nccl", work_apart),
    ],
)
def test_a_job_on_a_gpu_outlives_its_workers(crew, tmp_path, backend, kind, function):
    job = crew.fit(function, np=3, min_np=2, max_np=3, args=[tmp_path, 40, 12], backend=backend)
    results = job.results()
    assert job.status.backend == kind
    assert sizes(job)[0] == 3
    assert len(sizes(job)) > 1
    assert all(result == results[0] for result in results)
    assert results[0][0] == 40
