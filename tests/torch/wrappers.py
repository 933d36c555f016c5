"""Optimizers that wrap others or keep more than groups and state, as people write them."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.optim import Optimizer


class Sam(Optimizer):
    """Sharpness-aware minimisation: shares its groups with a base whose momentum is its own."""

    def __init__(
        self, params: Any, base: type[Optimizer], rho: float = 0.05, **kwargs: Any
    ) -> None:
        super().__init__(params, {"rho": rho, **kwargs})
        self.base_optimizer = base(self.param_groups, **kwargs)
        self.param_groups = self.base_optimizer.param_groups
        self.defaults.update(self.base_optimizer.defaults)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        pairs = [(p, group) for group in self.param_groups for p in group["params"]]
        for p, group in pairs:
            self.state[p]["old_p"] = p.data.clone()
            p.add_(p.grad * group["rho"])
        self.zero_grad()
        torch.enable_grad()(closure)()
        for p, _ in pairs:
            p.data = self.state[p]["old_p"]
        self.base_optimizer.step()
        self.zero_grad()

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        self.base_optimizer.param_groups = self.param_groups


class NestedLookahead(Optimizer):
    """Lookahead whose state dict has its state as it is, and its counter in an attribute."""

    def __init__(self, optimizer: Optimizer, k: int = 3, alpha: float = 0.5) -> None:
        super().__init__(
            [{"params": group["params"]} for group in optimizer.param_groups], {"alpha": alpha}
        )
        self.optimizer = optimizer
        self.steps, self.k = 0, k
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["slow"] = p.detach().clone()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.optimizer.step(closure)
        self.steps += 1
        for group in self.param_groups if self.steps % self.k == 0 else []:
            for p in group["params"]:
                self.state[p]["slow"].lerp_(p, group["alpha"])
                p.copy_(self.state[p]["slow"])

    def state_dict(self) -> Any:
        return {"lookahead_state": self.state, "base_optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state_dict: Any) -> None:
        self.state = state_dict["lookahead_state"]
        self.optimizer.load_state_dict(state_dict["base_optimizer"])


class ScheduleFree(Optimizer):
    """A schedule-free wrapper: groups and state are those of its base, and a mode is its own."""

    param_groups, state, zero_grad, state_dict, load_state_dict = (
        property(operator.attrgetter(f"base.{name}"))
        for name in ("param_groups", "state", "zero_grad", "state_dict", "load_state_dict")
    )

    def __init__(self, base: Optimizer, momentum: float = 0.9) -> None:
        self.base = base
        self.momentum = momentum
        self.train_mode = False

    def _swap(self, to: bool) -> None:
        if self.train_mode != to:
            for p, values in self.state.items():
                held = p.data.clone()
                p.data.copy_(values["mean"])
                values["mean"].copy_(held)
        self.train_mode = to

    def train(self) -> None:
        self._swap(True)

    def eval(self) -> None:
        self._swap(False)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        assert self.train_mode
        self.base.step(closure)
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
            for p in group["params"]:
                mean = self.state[p].setdefault("mean", p.detach().clone())
                mean.lerp_(p, 1 / group["k"])


class Counting(torch.optim.SGD):
    """An optimizer whose own state travels by its state dict alone."""

    def __init__(self, params: Any, **kwargs: Any) -> None:
        super().__init__(params, **kwargs)
        self.now = [0]

    def step(self, closure: Any = None) -> None:
        self.now[0] += 1
        for group in self.param_groups:
            group["lr"] = 0.1 / self.now[0]
        super().step(closure)
        for p in self.param_groups[0]["params"]:  # torch loads it in the parameter's type
            wide = self.state[p].setdefault("wide", torch.tensor(1 / 3, dtype=torch.float64))
            p.data.add_(float(wide.mul_(1 + 1e-9) * 1e8 % 1))

    def state_dict(self) -> Any:
        return {**super().state_dict(), "now": self.now[0]}

    def load_state_dict(self, state_dict: Any) -> None:
        self.now[0] = state_dict["now"]
        super().load_state_dict({k: state_dict[k] for k in ("state", "param_groups")})


class Plain:
    """A wrapper that is no torch optimizer, and forgets about half of what it wraps."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.steps = 0

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def step(self) -> None:
        self.steps += 1
        for group in self.optimizer.param_groups:
            group["lr"] = 0.1 / self.steps
        self.optimizer.step()

    def state_dict(self) -> Any:
        return {"steps": self.steps}

    def load_state_dict(self, state_dict: Any) -> None:
        self.steps = state_dict["steps"]
