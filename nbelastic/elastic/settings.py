"""Settings that user code can change, and their restoration after it.

A rank runs in a process that later jobs use, in a thread of that process's pool. Its function may
disable gradients, set a default type or change the working directory.

A setting is a pair of functions, one that reads and one that sets. A setting that cannot be read or
set is skipped (another version of torch, a directory that is gone).
"""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = ["Setting", "Settings", "TorchModes", "attributes"]


class Setting(NamedTuple):
    """One setting.

    Attributes
    ----------
    read : callable
        Returns the present value.
    set : callable
        Takes a value that was read.
    """

    read: Callable[[], Any]
    set: Callable[[Any], object]


class Settings:
    """Values of settings at one moment.

    Parameters
    ----------
    settings : iterable of Setting
        The settings, in the order in which they are put back.
    """

    def __init__(self, settings: Iterable[Setting]) -> None:
        self._values = []
        for setting in settings:
            with contextlib.suppress(Exception):
                self._values.append((setting, setting.read()))

    def restore(self) -> None:
        """Put back what has changed since."""
        for setting, value in self._values:
            with contextlib.suppress(Exception):
                if _differs(setting, value):
                    setting.set(value)


def _differs(setting: Setting, value: Any) -> bool:
    try:
        return bool(setting.read() != value)
    except Exception:  # torch refuses to read it if old and new interfaces were both used
        return True


def attributes(owner: object, *names: str) -> list[Setting]:
    """Return settings that are attributes of an object."""
    return [
        Setting(
            lambda name=name: getattr(owner, name),  # type: ignore[misc]
            lambda value, name=name: setattr(owner, name, value),  # type: ignore[misc]
        )
        for name in names
    ]


class TorchModes:
    """Torch's settings of a thread: modes of autograd and autocast, and the default device.

    If torch is not imported yet, they are those of a new thread.
    """

    def __init__(self) -> None:
        self._modes = _modes()

    def restore(self) -> None:
        """Put back what has changed since, in the same thread."""
        torch: Any = sys.modules.get("torch")
        if torch is None:
            return
        now, before = _modes(), self._modes
        for device, (enabled, dtype) in now["autocast"].items():
            was_enabled, was_dtype = before["autocast"].get(device, (False, dtype))
            if (enabled, dtype) != (was_enabled, was_dtype):
                torch.set_autocast_enabled(device, was_enabled)
                torch.set_autocast_dtype(device, was_dtype)
                torch.clear_autocast_cache()
        if now["cache"] != before["cache"]:
            torch.set_autocast_cache_enabled(before["cache"])
        if now["inference"] != before["inference"]:
            _inference_guards.append(torch._C._InferenceMode(before["inference"]))
        if now["device"] != before["device"]:
            # The default device "cpu" is the same as none, which costs less.
            is_cpu = before["device"] in (None, "cpu")
            torch.set_default_device(None if is_cpu else before["device"])
        if torch.is_grad_enabled() != before["grad"]:
            torch.set_grad_enabled(before["grad"])


_inference_guards: list[Any] = []
"""Guards that end a mode of another guard that does not end it."""


def _modes() -> dict[str, Any]:
    torch: Any = sys.modules.get("torch")
    if getattr(torch, "set_default_device", None) is None:  # not imported, or not wholly
        return {"grad": True, "inference": False, "cache": True, "device": None, "autocast": {}}
    accelerator = torch.accelerator.current_accelerator()
    devices = {"cpu", "cuda", *([] if accelerator is None else [accelerator.type])}
    return {
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "cache": torch.is_autocast_cache_enabled(),
        "device": str(torch.get_default_device()),
        "autocast": {
            each: (torch.is_autocast_enabled(each), torch.get_autocast_dtype(each))
            for each in devices
        },
    }
