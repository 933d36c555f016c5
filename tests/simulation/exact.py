"""Storms over a job whose result must have the same bits as a training without any fault.

The function trains a real network in steps of micro-batches: loader, gradients, sums along the
tree, state and elastic loop are the real ones, and so is all of the control plane. What is faked
are processes, clocks and the network.
"""

from __future__ import annotations

import functools
import random
from collections import deque
from dataclasses import replace
from typing import Any

import torch

import nbelastic.torch as hvd
from nbelastic.data.balancer import LEAST_STEPS
from nbelastic.driver.options import Options
from tests.support.exact_training import (
    EPOCHS,
    STEPS,
    ExactTraining,
    Ledger,
    one_thread,
    train_alone,
)

from . import user
from .loop import Hub
from .schedule import LENGTHS, Fault, Script
from .world import World, play

STORM = (
    ("kill", 8),
    ("kill_host", 2),
    ("retire", 5),
    ("close", 3),
    ("restart", 2),
    ("add", 5),
    ("scale", 2),
    ("stop", 4),
    ("hold", 2),
    ("slow", 2),
    ("cut_peers", 4),
    ("cut_scheduler", 3),
    ("cut_from_scheduler", 1),
    ("pause_scheduler", 1),
)
"""Faults that a job with enough patience survives, and how often each is drawn."""


def train() -> tuple[int, str]:
    """Train on a rank: the function that is sent to the workers."""
    world = user._stage[-1]
    assert isinstance(world, Storm)
    actor = user.Actor(world)
    actor.compute(actor.script.setup)
    training = ExactTraining(world.rows, balance="speed" if world.uneven else "even")
    training.loader.balancer._latest = Uneven(world, actor.session.spec.start)
    _loop(training.state, training, actor)
    return training.state.steps, training.digest()


@hvd.elastic.run
def _loop(state: Any, training: ExactTraining, actor: user.Actor) -> None:
    script = actor.script
    assert isinstance(actor.world, Storm)
    actor.say(f"enters generation {actor.session.generation} at step {state.steps}")
    for state.epoch in range(state.epoch, EPOCHS):
        for step in training.loader:
            actor.compute(script.step_time)
            training.backward(step)
            actor.world.before_update(actor, training)
            training.update()
            if script.commits(1, state.steps):
                state.commit()
            elif state.steps % 3 == 0:
                state.check_host_updates()


alone = functools.cache(train_alone)


class Uneven(deque[float]):
    """Times of ranks of differing speeds, which change at times, and quotas with them."""

    def __init__(self, world: Storm, start: int) -> None:
        super().__init__()
        self._dice, self._steps_left = random.Random(f"{world.seed} {start}"), 0

    def append(self, measured: float) -> None:
        if not self._steps_left:
            self._steps_left = self._dice.randint(1, 4)
            self.clear()
            self.extend([self._dice.choice((1.0, 1.0, 2.5, 7.0))] * LEAST_STEPS)
        self._steps_left -= 1


# -- the storm -------------------------------------------------------------------------------------


class ModalHub(Hub):
    """A hub whose fibers have each their own mode of gradients, which is the thread's in torch."""

    def switch(self) -> None:
        before = torch.is_grad_enabled()
        torch.set_grad_enabled(True)
        try:
            super().switch()
        finally:
            torch.set_grad_enabled(before)


class Storm(World):
    """A schedule of faults that a patient job survives."""

    hub_type = ModalHub
    hesitations = (0.0,)  # autograd is on the stack of a fiber in backward, which must not switch
    function = staticmethod(train)

    def __init__(self, seed: int, *, tracing: bool = False) -> None:
        self.rows: Ledger = {}
        self.uneven = seed % 3 == 1
        self.changes = 0
        super().__init__(seed, tracing=tracing)

    def run(self) -> None:
        """Play the storm: it ends with the bits, and the rows, of a training without one.

        If a rank is lost after the loop, when others have returned, its result is, too, and the
        job fails with that.
        """
        super().run()
        if self.end == "finished":
            digest, ledger = alone()
            assert set(self.driver.future.result()) == {(STEPS, digest)}
            assert self.rows == ledger
        else:
            assert self.end == "RankFailed", f"the job ended with {self.end}"

    def before_update(self, actor: user.Actor, training: ExactTraining) -> None:
        """Let something happen to a rank between its gradients and its update."""
        quotas = training.loader.balancer._balance[1].quotas
        self.changes += max(quotas) > min(quotas) + 1

    def _build_cluster(self) -> None:
        hosts = self.random.choice((1, 2, 3))
        for number in range(self.random.choice((2, 3, 3, 4, 5))):
            self.hire(f"w{number}", f"h{number % hosts}", nanny=True)

    def _make_options(self) -> Options:
        return Options(
            np=self.random.choice((None, 2)),
            min_np=1,
            elastic_timeout=200.0,
            stall_timeout=6.0,
            heartbeat_timeout=2.0,
            blacklist_cooldown=(0.5, 2.0),
        )

    def _make_script(self) -> Script:
        chance = self.random
        return Script(
            seed=chance.randrange(1 << 20),
            setup=chance.choice((0.0, 0.2)) * chance.random(),
            steps=STEPS,
            step_time=chance.choice((0.1, 0.3)) * (0.5 + chance.random()),
            commit_every=chance.choice((0.5, 1.0, 1.0)),
        )

    def _make_faults(self, planned: bool) -> list[Fault]:
        chance = self.random
        kinds, weights = zip(*STORM, strict=True)
        length = STEPS * self.script.step_time
        faults = [
            Fault(
                0.3 + chance.random() * length,
                chance.choices(kinds, weights)[0],
                chance.randrange(8),
                chance.choice(LENGTHS[:-1]),
            )
            for _ in range(chance.choice((2, 3, 4, 6)))
        ]
        faults.sort(key=lambda fault: fault.at)
        end = faults[-1].at + 1.0  # workers that were retired for good are replaced
        return [*faults, *(Fault(end, "add", which, 0.0) for which in (0, 2))]


class BadMemory(Storm):
    """A job without faults, but that a bit of the parameters of one rank flips, once."""

    known_errors = ("nbelastic.errors.NbelasticError: the parameters of rank",)
    only_planned = False

    def before_update(self, actor: user.Actor, training: ExactTraining) -> None:
        victim = self.crew[self.seed % len(self.crew)]
        its = actor.fiber.process.owner is victim
        if its and training.state.steps == STEPS // 2 and not self.struck:
            self.struck.add(self.crew[self.seed % len(self.crew)].id)
            words = training.model[0].weight.data.view(torch.int32)
            words[1, 2] ^= 1 << self.seed % 32

    def _build_cluster(self) -> None:
        for number in range(3 + self.seed % 3):
            self.hire(f"w{number}", f"h{number % 2}", nanny=True)

    def _make_options(self) -> Options:
        return replace(super()._make_options(), np=len(self.crew))

    def _make_faults(self, planned: bool) -> list[Fault]:
        return []


def storm(seed: int, *, kind: type[Storm] = Storm, tracing: bool = False) -> Storm:
    """Play a storm; raise AssertionError where something does not hold."""
    with one_thread():
        return play(lambda: kind(seed, tracing=tracing))
