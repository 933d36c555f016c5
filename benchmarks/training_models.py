"""Models of four kinds, with generated data, for benchmarks/training_step.py."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional

CLASSES = 100
TOKENS = 1000
LENGTH = 32


@dataclass(frozen=True)
class Task:
    """A model, its optimizer, and a batch for it."""

    model: Callable[[], nn.Module]
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
    batch: Callable[[torch.Generator], tuple[torch.Tensor, torch.Tensor]]


def perceptron(*widths: int) -> nn.Module:
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(widths[-1], CLASSES))


class Residual(nn.Module):
    """Two convolutions with a residual connection."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.first_norm = nn.BatchNorm2d(outputs)
        self.second = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.second_norm = nn.BatchNorm2d(outputs)
        self.around = nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = functional.relu(self.first_norm(self.first(x)))
        return functional.relu(self.second_norm(self.second(y)) + self.around(x))


def convolutional(width: int = 32) -> nn.Module:
    stages = [
        (width, 1),
        (width, 1),
        (2 * width, 2),
        (2 * width, 1),
        (4 * width, 2),
        (8 * width, 2),
    ]
    layers: list[nn.Module] = [nn.Conv2d(3, width, 3, 1, 1)]
    channels = width
    for outputs, stride in stages:
        layers.append(Residual(channels, outputs, stride))
        channels = outputs
    return nn.Sequential(
        *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, CLASSES)
    )


class Block(nn.Module):
    """Attention and a perceptron, each with a residual connection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.mix_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.projections = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mix = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.projections(self.attention_norm(x)).chunk(3, dim=-1)
        query, key, value = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.mix(self.mix_norm(x))


class Transformer(nn.Module):
    """A small language model."""

    def __init__(self, width: int = 192, depth: int = 4, heads: int = 4) -> None:
        super().__init__()
        self.tokens = nn.Embedding(TOKENS, width)
        self.places = nn.Parameter(0.02 * torch.randn(LENGTH, width))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, TOKENS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.blocks(self.tokens(tokens) + self.places)
        return self.head(self.norm(x)).transpose(1, 2)


def momentum(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


def adam(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=1e-3)


def labelled(*shape: int) -> Callable[[torch.Generator], tuple[torch.Tensor, torch.Tensor]]:
    def batch(dice: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        labels = torch.randint(CLASSES, shape[:1], generator=dice)
        return torch.randn(shape, generator=dice), labels

    return batch


def sentences(dice: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    text = torch.randint(TOKENS, (4, LENGTH + 1), generator=dice)
    return text[:, :-1], text[:, 1:].contiguous()


TASKS = {
    "mlp-1m": Task(lambda: perceptron(256, 640, 640, 512), momentum, labelled(64, 256)),
    "mlp-25m": Task(lambda: perceptron(1024, 3072, 3072, 3072, 1024), momentum, labelled(16, 1024)),
    "cnn": Task(convolutional, momentum, labelled(8, 3, 16, 16)),
    "transformer": Task(Transformer, adam, sentences),
}
TASKS |= {f"{name}-adam": replace(TASKS[name], optimizer=adam) for name in ("mlp-1m", "mlp-25m")}


def parameters_of(model: Any) -> torch.Tensor:
    """Return all parameters in one vector."""
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
