"""Accuracy of trainings whose number of ranks changes, by what is done about it, in one run.

A network learns handwritten digits with a cosine schedule, for several seeds. The number of ranks
changes 0, 4 or 32 times, at random steps, between 1 and 8. Candidates:

- *batch*: a ``Batch`` of 8 micro-batches of 16 rows, whatever the number of ranks;
- *linear*, *sqrt*: 16 rows per rank, with an ``LRScaler`` of that rule for 8 ranks, and a schedule
  by samples;
- *nothing*: 16 rows per rank, and nothing else.

All are compared with a world of 8 ranks that never changes, seed by seed: the accuracy on unseen
digits (mean, worst), and the largest difference from that of the fixed world. One process computes
the gradients of all ranks. Exits with 1 if *batch* differs from the fixed world.
"""

from __future__ import annotations

import argparse
import functools
import json
import random
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.figures import Target, machine, table
from nbelastic.collectives.reduction_tree import Blocks, cover, fold
from nbelastic.data.plan.dealing import Dealing
from nbelastic.elastic.ranks.context import Context, activate
from nbelastic.elastic.ranks.step_share import StepShare
from nbelastic.torch.elastic import LRScaler
from nbelastic.torch.gradients.micro_batches import MicroBatchSum

RANKS, MICRO = 8, 16
CANDIDATES = ("batch", "linear", "sqrt", "nothing")
OPTIMIZERS = {
    "SGD 0.1": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "SGD 0.4": functools.partial(torch.optim.SGD, lr=0.4, momentum=0.9),
    "Adam 0.01": functools.partial(torch.optim.Adam, lr=0.01),
}


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.resizing",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seeds", type=int, default=12, help="(12)")
    parser.add_argument("--epochs", type=int, default=12, help="(12)")
    parser.add_argument("--resets", type=int, nargs="+", default=[0, 4, 32], help="(0 4 32)")
    parser.add_argument("--quick", action="store_true", help="one seed, two epochs")
    parser.add_argument("--ranks", help="ignored: one process computes for all")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write all figures there, too")
    options = parser.parse_args()
    if options.quick:
        options.seeds, options.epochs, options.resets = 1, 2, [4]
    print(machine(), flush=True)
    torch.set_num_threads(1)
    figures: dict[str, Any] = {}
    targets: list[Target] = []
    for name in OPTIMIZERS:
        figures[name] = measure(name, options)
        show(name, figures[name], options.resets)
        targets += [
            Target(f"{name}, {resets} resets: batch / fixed world", ratio, 1.0, at_least=True)
            for resets, ratio in figures[name]["equal"].items()
        ]
    print("\nTargets")
    for target in targets:
        print(f"  {target.show()}")
    print(f"{sum(target.met for target in targets)} of {len(targets)} met")
    if options.json is not None:
        found = [{"name": t.name, "ratio": t.ratio, "met": t.met} for t in targets]
        text = {"machine": machine(), "worlds": {"2": figures}, "targets": found}
        options.json.write_text(json.dumps(text))
    return 0 if all(target.met for target in targets) else 1


def measure(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return accuracies by candidate and number of resets, of all seeds."""
    seeds = range(options.seeds)
    fixed = [train(name, "batch", options.epochs, 0, seed) for seed in seeds]
    found: dict[str, dict[str, list[float]]] = {}
    equal: dict[str, float] = {}
    for resets in options.resets:
        for candidate in CANDIDATES:
            runs = [train(name, candidate, options.epochs, resets, seed) for seed in seeds]
            found.setdefault(candidate, {})[str(resets)] = [accuracy for accuracy, _ in runs]
            if candidate == "batch":
                same = [a[1] == b[1] for a, b in zip(runs, fixed, strict=True)]
                equal[str(resets)] = sum(same) / len(same)
    return {"fixed": [accuracy for accuracy, _ in fixed], "found": found, "equal": equal}


def show(name: str, figures: dict[str, Any], resets: list[int]) -> None:
    """Print mean, worst, and largest difference from the fixed world."""
    fixed = figures["fixed"]
    print(f"\n{name}: fixed world {sum(fixed) / len(fixed):.3f}, worst {min(fixed):.3f}")
    rows = []
    for candidate in CANDIDATES:
        cells = []
        for count in resets:
            found = figures["found"][candidate][str(count)]
            apart = max(abs(a - b) for a, b in zip(found, fixed, strict=True))
            cells.append(f"{sum(found) / len(found):.3f}, {min(found):.3f}, {apart:.3f}")
        rows.append([candidate, *cells])
    heads = [f"{count} resets: mean, worst, apart" for count in resets]
    print(table(["", *heads], rows), flush=True)


@functools.cache
def digits() -> tuple[torch.Tensor, torch.Tensor]:
    from sklearn.datasets import load_digits

    found = load_digits()
    images = torch.tensor(found.images / 16.0, dtype=torch.float32).flatten(1)
    return images, torch.tensor(found.target)


def sizes_of(resets: int, steps: int, seed: int) -> list[int]:
    """Return the number of ranks in each step."""
    dice = random.Random(f"{resets}-{seed}")
    places = sorted(dice.sample(range(1, steps), resets))
    found, size = [], RANKS
    for step in range(steps):
        if step in places:
            size = dice.choice([n for n in range(1, RANKS + 1) if n != size])
        found.append(size)
    return found


def train(name: str, candidate: str, epochs: int, resets: int, seed: int) -> tuple[float, bytes]:
    """Train one network; return its accuracy on unseen digits, and its parameters."""
    images, labels = digits()
    data = torch.utils.data.TensorDataset(images[:1500], labels[:1500])
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = OPTIMIZERS[name](model.parameters())
    reference = epochs * -(-1500 // (RANKS * MICRO))
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, reference)
    sizes = sizes_of(resets, reference, seed)
    if candidate == "batch":
        in_micro_batches(model, optimizer, cosine, data, epochs, sizes, seed)
    else:
        per_rank(candidate, model, optimizer, cosine, data, epochs, sizes, seed)
    with torch.no_grad():
        right = (model(images[1500:]).argmax(1) == labels[1500:]).double().mean().item()
    return right, b"".join(p.detach().numpy().tobytes() for p in model.parameters())


def in_micro_batches(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    cosine: Any,
    data: torch.utils.data.TensorDataset,
    epochs: int,
    sizes: list[int],
    seed: int,
) -> None:
    """Train with steps of micro-batches, added as the ranks that there are would add them."""
    remaining = iter(sizes)
    for epoch in range(epochs):
        deal = Dealing(len(data), MICRO, RANKS, epoch, seed)
        for step in range(deal.steps):
            size = next(remaining)
            weights = [weight / MICRO for weight in deal.weights(step)]
            columns: list[list[torch.Tensor | None]] = [[] for _ in model.parameters()]
            for rank in range(size):
                block = Blocks.even(RANKS, size).block(rank)
                share = StepShare(RANKS, block, (), weights, exact=True)
                sums = [MicroBatchSum(share) for _ in columns]
                for number in (each for each in block if weights[each]):
                    x, y = data[deal.rows(step, number)]
                    optimizer.zero_grad()
                    nn.functional.cross_entropy(model(x), y).backward()
                    for total, parameter in zip(sums, model.parameters(), strict=True):
                        assert parameter.grad is not None
                        total.add(number, parameter.grad * weights[number])
                nodes = cover(block.start, block.stop, RANKS)
                for column, total in zip(columns, sums, strict=True):
                    column.extend(total.finish(nodes))
            order = Blocks.even(RANKS, size).order
            for column, parameter in zip(columns, model.parameters(), strict=True):
                (total,) = fold(column, order, _add)
                assert total is not None
                parameter.grad = total / sum(weights)
            optimizer.step()
            cosine.step()


def _add(left: torch.Tensor | None, right: torch.Tensor | None) -> torch.Tensor | None:
    return left if right is None else right if left is None else left + right


def per_rank(
    candidate: str,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    cosine: Any,
    data: torch.utils.data.TensorDataset,
    epochs: int,
    sizes: list[int],
    seed: int,
) -> None:
    """Train with a batch per rank: the mean over the ranks is one batch of all their rows."""
    context, remaining = Context(), iter(sizes)
    context.size = RANKS
    with activate(context):
        scales, due = candidate in ("linear", "sqrt"), 0.0
        if scales:
            LRScaler(optimizer, reference=RANKS, rule=candidate)
        order = torch.Generator().manual_seed(seed)
        for _ in range(epochs):
            rows = torch.randperm(len(data), generator=order).tolist()
            while rows:
                context.size = next(remaining, context.size)
                chosen, rows = rows[: context.size * MICRO], rows[context.size * MICRO :]
                x, y = data[chosen]
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
                due += context.size / RANKS if scales else 1.0
                while due > 0.999:
                    due -= 1.0
                    cosine.step()


if __name__ == "__main__":
    sys.exit(main())
