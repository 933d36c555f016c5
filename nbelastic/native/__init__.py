"""Native core of :mod:`nbelastic.collectives`, in C++, if it could be built.

Its interface is in ``_core.pyi``. Without it, tensors travel over Gloo only.
"""

from __future__ import annotations

from importlib.util import find_spec

from nbelastic.system import LINUX

try:
    if not LINUX:
        raise ImportError("memory can be shared on Linux only")
    from nbelastic.native import _core as core
except ImportError as error:
    core = None  # type: ignore[assignment]
    built = not LINUX or find_spec(f"{__name__}._core")
    missing = str(error) if built else "it was not built"
else:
    missing = ""

__all__ = ["core", "missing"]
