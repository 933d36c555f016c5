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
    from .magics import ElasticMagics, wrap_debug  # IPython is loaded here

    shell.register_magics(ElasticMagics)
    wrap_debug(shell)


def unload_ipython_extension(shell: InteractiveShell) -> None:
    """Unregister the magics, for ``%unload_ext nbelastic``."""
    from .magics import ElasticMagics, unwrap_debug

    magics = shell.magics_manager.magics
    magics["cell"].pop("elastic_train", None)
    magics["line"].pop("elastic", None)
    shell.magics_manager.registry.pop(ElasticMagics.__name__, None)
    unwrap_debug(shell)
