"""Answer ``import horovod`` with nbelastic, for scripts that are not changed.

Runs in ranks, and in processes that a script starts by ``multiprocessing``. The folder ``alias``
has a package ``horovod``. It goes to the end of ``sys.path``, so a Horovod that is installed comes
first; ``sys.path`` travels to processes that data loaders spawn. That package calls
:func:`answer_as`. Its modules stand in for modules of nbelastic: ``horovod.torch.elastic`` for
``nbelastic.torch.elastic``.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.abc
import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from nbelastic.elastic.ranks.context import current
from nbelastic.errors import NbelasticError

FOLDER = str(Path(__file__).parents[1] / "alias")  # the folder with a package `horovod`
NOTE = "import horovod → nbelastic (--no-alias turns it off)"

_ELSEWHERE = {
    "common": "nbelastic",
    "common.elastic": "nbelastic.torch.elastic",
    "common.exceptions": "nbelastic.errors",
    "common.util": "nbelastic.torch",
    "runner": "nbelastic",
    "tensorflow.keras": "nbelastic.keras",
    "tensorflow.keras.callbacks": "nbelastic.keras.callbacks",
    "tensorflow.keras.elastic": "nbelastic.keras.elastic",
}
"""Modules of Horovod whose names are elsewhere in nbelastic."""

_MISSING = ("mxnet", "ray", "spark")  # importing one of these is an error


def alias_horovod(wanted: bool | None) -> None:
    """Make ``import horovod`` find nbelastic; for None only where no Horovod is installed."""
    if wanted:
        sys.path.insert(0, FOLDER)
    elif wanted is None:
        sys.path.append(FOLDER)


class _Alias(ModuleType):
    def __init__(self, name: str, target: ModuleType) -> None:
        super().__init__(name, target.__doc__)
        self._target = target
        self.__path__: list[str] = []
        self.__version__ = getattr(sys.modules["nbelastic"], "__version__", "")

    def __getattr__(self, name: str) -> Any:
        full, target = f"{self.__name__}.{name}", f"{self._target.__name__}.{name}"
        if target == "nbelastic.run":
            return functools.partial(_refuse_run, full)
        try:
            return getattr(self._target, name)
        except AttributeError:
            pass
        if not name.startswith("__"):
            with contextlib.suppress(ModuleNotFoundError):
                return importlib.import_module(full)
        raise AttributeError(
            f"module {self.__name__!r} has no attribute {name!r}: it stands in for "
            f"{self._target.__name__!r}, which has none"
        )


class _AliasFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds modules of Horovod among those of nbelastic."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        top, _, rest = fullname.partition(".")
        if top != "horovod" or not rest:
            return None
        name = _ELSEWHERE.get(rest, "")
        with contextlib.suppress(ModuleNotFoundError):  # below a module that is no package
            if not name and importlib.util.find_spec(f"nbelastic.{rest}") is not None:
                name = f"nbelastic.{rest}"
        if name:
            return ModuleSpec(fullname, self, loader_state=name, is_package=True)
        if rest in _MISSING:
            raise ModuleNotFoundError(
                f"No module named {fullname!r}: nbelastic stands in for Horovod here, and trains "
                "PyTorch and Keras models. Use horovod.torch or horovod.keras, or install Horovod "
                "and run the script by horovodrun",
                name=fullname,
            )
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Alias(spec.name, importlib.import_module(spec.loader_state))

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: the other module was imported when this one was made."""


def _refuse_run(name: str, *_: Any, **__: Any) -> NoReturn:
    # In place of ``horovod.run``, which a script may import and never call: importing is no error.
    raise NotImplementedError(
        f"{name} starts a job, and this script runs in a rank of one. Call the function "
        "itself; from outside a job, nbelastic.fit(fn, np=4) runs a function on ranks"
    )


def answer_as(package: str) -> None:
    """Make a package's name stand for nbelastic. The package ``alias/horovod`` calls it."""
    if not any(isinstance(each, _AliasFinder) for each in sys.meta_path):
        sys.meta_path.insert(0, _AliasFinder())
    alias = _Alias(package, importlib.import_module("nbelastic"))
    alias.__spec__ = sys.modules[package].__spec__
    sys.modules[package] = alias
    with contextlib.suppress(NbelasticError):  # outside a rank there is no history
        current().note("alias", NOTE)
