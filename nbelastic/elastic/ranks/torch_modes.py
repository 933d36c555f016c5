"""Torch's settings of a thread, and their restoration.

An elastic loop calls its function again after a reset, which may have left it anywhere.
"""

from __future__ import annotations

import sys
from typing import Any


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
