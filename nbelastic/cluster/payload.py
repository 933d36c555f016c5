"""Describe the user's modules that travel with a job; unpack a job's payload.

Runs in the kernel, in the thread that calls ``fit``, and in workers, in the threads of ranks.
"""

from __future__ import annotations

import os
import pickle
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import cloudpickle

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from nbelastic.messages import JobPayload


@dataclass(frozen=True)
class Source:
    """A module: its path in the kernel's file system, and its text.

    `text` is None for a directory without ``__init__.py``, which is a namespace package.
    """

    path: str
    text: bytes | None
    package: bool


@dataclass(frozen=True)
class Modules:
    """Modules that travel with a job, by full name; modules left out, with the reason."""

    sources: Mapping[str, Source] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)  # the function may need them

    def describe(self) -> str:
        """Return a line on the modules that travel, and a line on each module left out."""
        found: dict[str, list[Source]] = {}
        for name, source in self.sources.items():
            if source.text is not None:
                found.setdefault(name.partition(".")[0], []).append(source)
        what = [f"{name} ({_size(sources)})" for name, sources in sorted(found.items())]
        lines = [f"modules that travel: {', '.join(what) or 'none'}\n"]
        lines += [f"left out: {name}, {why}\n" for name, why in sorted(self.left_out.items())]
        return "".join(lines)


def _size(sources: list[Source]) -> str:
    size = sum(len(source.text or b"") for source in sources)
    files = "1 file" if len(sources) == 1 else f"{len(sources)} files"
    return f"{files}, {size / 1024:,.1f} KiB"


def unpack_modules(payload: JobPayload) -> Modules:
    """Return the modules of a payload."""
    modules: Modules = pickle.loads(payload.modules)
    return modules


def unpack_call(
    payload: JobPayload,
) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """Return the function and its arguments; its modules must be importable."""
    function, args, kwargs = cloudpickle.loads(payload.call)
    return function, args, kwargs


def torch_settings() -> dict[str, str]:
    """Return torch's settings of this process that training depends on, without its defaults."""
    torch = sys.modules.get("torch")
    if not hasattr(torch, "get_default_device"):  # not imported, or an older one
        return {}
    assert torch is not None
    found = {
        "dtype": str(torch.get_default_dtype()).removeprefix("torch."),
        "device": str(torch.get_default_device().type),
        "precision": str(torch.get_float32_matmul_precision()),
        "deterministic": "no",
    }
    if torch.are_deterministic_algorithms_enabled():
        only_warns = torch.is_deterministic_algorithms_warn_only_enabled()
        found["deterministic"] = "warn" if only_warns else "yes"
    defaults = {"dtype": "float32", "device": "cpu", "precision": "highest", "deterministic": "no"}
    return {name: value for name, value in found.items() if value != defaults[name]}


KERAS = "KERAS_BACKEND"
"""Variable of the environment that Keras reads when it is imported; and the name of a setting."""


KERAS_DEFAULTS = {"floatx": "float32", "epsilon": "1e-07", "image_data_format": "channels_last"}
"""Settings of Keras that travel; so does its policy of types, which depends on ``floatx``."""


def keras_settings() -> dict[str, str]:
    """Return the back end and settings of Keras that ranks are to have, without its defaults."""
    config: Any = getattr(sys.modules.get("keras"), "config", None)
    if not hasattr(config, "backend"):  # not imported
        return {KERAS: name} if (name := os.environ.get(KERAS, "")) else {}
    found = {name: str(getattr(config, name)()) for name in KERAS_DEFAULTS}
    changed = {name: value for name, value in found.items() if value != KERAS_DEFAULTS[name]}
    if (policy := config.dtype_policy().name) != found["floatx"]:
        changed["dtype_policy"] = policy
    return {KERAS: str(config.backend()), **{f"keras {n}": each for n, each in changed.items()}}


def take_settings(settings: Mapping[str, str]) -> None:
    """Apply another process's settings, before Keras is imported here."""
    if name := settings.get(KERAS):
        os.environ[KERAS] = name
    own = {n.removeprefix("keras "): v for n, v in settings.items() if n.startswith("keras ")}
    if own:
        import keras

        for name, value in own.items():
            set_value = getattr(keras.config, f"set_{name}")
            set_value(float(value) if name == "epsilon" else value)
    _take_torch_settings({n: v for n, v in settings.items() if not n.startswith(("keras ", KERAS))})


def _take_torch_settings(settings: Mapping[str, str]) -> None:
    """Apply another process's settings of torch, but no device missing here."""
    if not settings:
        return
    import torch

    if dtype := settings.get("dtype"):
        torch.set_default_dtype(getattr(torch, dtype))
    if precision := settings.get("precision"):
        torch.set_float32_matmul_precision(precision)
    if deterministic := settings.get("deterministic"):
        torch.use_deterministic_algorithms(True, warn_only=deterministic == "warn")
    device = settings.get("device")
    if device is not None and (device != "cuda" or torch.cuda.is_available()):
        torch.set_default_device(device)
