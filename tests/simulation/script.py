"""Made-up training functions: how long, how often, and what goes wrong in them."""

from __future__ import annotations

import random
from dataclasses import dataclass, field


@dataclass
class Mishap:
    """Something that user code does wrong at a step, on one rank or on all."""

    kind: str
    step: int
    rank: int | None
    times: int


@dataclass
class Script:
    """What a user's function does; with `samples`, it goes through them instead of `steps`."""

    seed: int
    elastic: bool = True
    setup: float = 0.1
    steps: int = 8
    step_time: float = 0.05
    commit_every: float = 0.5
    rides: bool = True
    tail: float = 0.0
    after: float = 0.0
    loops: int = 1
    samples: int = 0
    epochs: int = 1
    batch: int = 1
    mishaps: list[Mishap] = field(default_factory=list)

    @property
    def harmless(self) -> bool:
        """Whether the function itself never does anything wrong."""
        return not self.mishaps

    @property
    def commits_first(self) -> bool:
        """Whether each generation begins with a commit: one that leads nowhere."""
        return self.seed % 3 == 0

    def commits(self, loop: int, step: int) -> bool:
        """Whether all ranks commit after this step."""
        number = (self.seed * 1_000_003 + loop * 7919 + step * 104_729) & 0xFFFFFF
        return (number * 2_654_435_761 >> 8) % 1000 < 1000 * self.commit_every


def make_script(random: random.Random) -> Script:
    """Make up a function."""
    script = Script(
        seed=random.randrange(1 << 20),
        elastic=random.random() > 0.1,
        setup=random.choice((0.0, 0.02, 0.3, 1.0)) * random.random(),
        steps=random.randint(2, 12),
        step_time=random.choice((0.005, 0.03, 0.2, 0.6)) * (0.5 + random.random()),
        commit_every=random.choice((0.2, 0.5, 1.0)),
        rides=random.random() < 0.6,
        tail=random.choice((0.0, 0.0, 0.0, 2.0)) * random.random(),
        after=random.choice((0.0, 0.0, 0.5)) * random.random(),
        loops=2 if random.random() < 0.1 else 1,
        samples=random.choice((7, 12, 24)) if random.random() < 0.25 else 0,
        epochs=random.choice((1, 1, 2, 3)),
        batch=random.choice((1, 2, 3)),
    )
    if random.random() < 0.22:
        kind = random.choice(("raise", "raise", "return", "hang", "deaf", "collective"))
        rank = None if random.random() < 0.3 else random.randrange(3)
        times = 1 if random.random() < 0.6 else 1_000
        script.mishaps.append(Mishap(kind, random.randrange(-1, script.steps), rank, times))
    return script
