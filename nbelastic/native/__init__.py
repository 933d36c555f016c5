"""C++ under :mod:`nbelastic.collectives`, where it could be built.

What is in it: :mod:`nbelastic.native._core`. Without it everything runs over Gloo.
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
