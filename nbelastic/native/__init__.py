"""Native core of :mod:`nbelastic.collectives`, in C++, if it could be built.

Its interface is in ``_core.pyi``. Without it, tensors travel over Gloo only.
"""

from __future__ import annotations

from importlib.util import find_spec

try:
    from nbelastic.native import _core as core
except ImportError as error:
    core = None  # type: ignore[assignment]
    missing = str(error) if find_spec(f"{__name__}._core") else "it was not built"
else:
    missing = ""

__all__ = ["core", "missing"]
