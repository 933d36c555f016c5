"""The notebook's part: ``%%elastic_train``, ``%elastic`` and displays of jobs.

Importing this package loads neither IPython nor ipywidgets; loading the extension does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

__all__ = ["load_ipython_extension", "unload_ipython_extension"]


def load_ipython_extension(shell: InteractiveShell) -> None:
    """Register the magics, for ``%load_ext nbelastic``."""
    from .magics import register  # IPython is loaded here

    register(shell)


def unload_ipython_extension(shell: InteractiveShell) -> None:
    """Unregister the magics, for ``%unload_ext nbelastic``."""
    from .magics import unregister

    unregister(shell)
