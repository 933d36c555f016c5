"""Describe, unpack and import the user's modules that travel with a job.

Runs in the kernel, in the thread that calls ``fit``, and in ranks.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import linecache
import os
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import CodeType, ModuleType
from typing import Any


@dataclass(frozen=True)
class Source:
    """A module's path in the kernel's file system, and its text; None for a namespace package."""

    path: str
    text: bytes | None


@dataclass(frozen=True)
class Modules:
    """Modules that travel with a job, by full name; modules left out, with the reason."""

    sources: Mapping[str, Source] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)  # the function may need them

    def describe(self) -> str:
        """Return a line on the modules that travel, and a line on each module left out."""
        sizes = Counter[str]()
        for name, source in self.sources.items():
            sizes[name.partition(".")[0]] += len(source.text or b"")
        what = [f"{name} ({size / 1024:,.1f} KiB)" for name, size in sorted(sizes.items())]
        lines = [f"modules that travel: {', '.join(what) or 'none'}\n"]
        lines += [f"left out: {name}, {why}\n" for name, why in sorted(self.left_out.items())]
        return "".join(lines)


class _SourceImporter(  # type: ignore[misc]  # typeshed: a static method in one base
    importlib.abc.MetaPathFinder, importlib.abc.SourceLoader
):
    """Imports a job's modules from their texts; their files are those of the kernel."""

    def __init__(self, sources: Mapping[str, Source]) -> None:
        self._sources = sources
        self._texts = {source.path: source.text for source in sources.values()}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        source = self._sources.get(fullname)
        if source is None:
            return None
        if source.text is None:
            spec = importlib.machinery.ModuleSpec(fullname, None, is_package=True)
            spec.submodule_search_locations = [source.path]
            return spec
        return importlib.util.spec_from_loader(fullname, self)

    def get_filename(self, fullname: str) -> str:
        return self._sources[fullname].path

    def get_data(self, path: str) -> bytes:
        return self._texts[path] or b""

    def get_code(self, fullname: str) -> CodeType | None:
        # Tracebacks show these lines, also where the file has been edited since.
        path, text = self.get_filename(fullname), self.get_source(fullname) or ""
        linecache.cache[path] = (len(text), None, text.splitlines(keepends=True), path)
        return super().get_code(fullname)


def install(modules: Modules) -> None:
    """Make imports find a job's modules from now on, before any on the worker's path."""
    # What is imported already stays: it is what every rank needs, and none of it is the user's.
    if modules.sources:
        sys.meta_path.insert(0, _SourceImporter(modules.sources))
        importlib.invalidate_caches()


def torch_settings() -> dict[str, str]:
    """Return torch's settings of this process that training depends on, without its defaults."""
    torch: Any = sys.modules.get("torch")
    if not hasattr(torch, "get_default_device"):  # not imported, or an older one
        return {}
    only_warns = torch.is_deterministic_algorithms_warn_only_enabled()
    deterministic = "warn" if only_warns else "yes"
    found = {
        "dtype": (str(torch.get_default_dtype()).removeprefix("torch."), "float32"),
        "device": (str(torch.get_default_device().type), "cpu"),
        "precision": (str(torch.get_float32_matmul_precision()), "highest"),
        "deterministic": (deterministic * torch.are_deterministic_algorithms_enabled(), ""),
    }
    return {name: value for name, (value, default) in found.items() if value != default}


KERAS = "KERAS_BACKEND"  # Keras reads it when it is imported; and the name of a setting
# Settings of Keras that travel; so does its policy of types, which depends on ``floatx``.
KERAS_DEFAULTS = {"floatx": "float32", "epsilon": "1e-07", "image_data_format": "channels_last"}


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
    """Apply another process's settings, before Keras is imported here, but no device missing."""
    if name := settings.get(KERAS):
        os.environ[KERAS] = name
    for name, value in settings.items():
        if name.startswith("keras "):
            import keras

            set_value = getattr(keras.config, name.replace("keras ", "set_"))
            set_value(float(value) if name == "keras epsilon" else value)
        elif name != KERAS:
            import torch

            if name == "dtype":
                torch.set_default_dtype(getattr(torch, value))
            elif name == "precision":
                torch.set_float32_matmul_precision(value)
            elif name == "deterministic":
                torch.use_deterministic_algorithms(True, warn_only=value == "warn")
            elif value != "cuda" or torch.cuda.is_available():
                torch.set_default_device(value)
