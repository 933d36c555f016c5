"""Names of Horovod that a script in a rank cannot use, and what to use instead.

A script may import such a name and never call it. So importing it is no error, but calling it is.
A module is missing as a whole: importing it is the error.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from collections.abc import Callable

_MODULES = ("mxnet", "ray", "spark")

_START = (
    "starts a job, and this script runs in a rank of one. Call the function itself; from outside a "
    "job, nbelastic.fit(fn, np=4) runs a function on ranks"
)
_FUNCTIONS = {"run": _START}
"""What a missing function is, and what to do instead; by its name after ``nbelastic.``."""


def missing_module(name: str) -> ModuleNotFoundError | None:
    """Return the error for a module of Horovod that nbelastic has not; None for any other name."""
    if name.partition(".")[2] not in _MODULES:
        return None
    return ModuleNotFoundError(
        f"No module named {name!r}: nbelastic stands in for Horovod here, and trains PyTorch "
        "and Keras models. Use horovod.torch or horovod.keras, or install Horovod and run the "
        "script by horovodrun",
        name=name,
    )


def missing_function(name: str, target: str) -> Callable[..., NoReturn] | None:
    """Return a function that says what to do instead; None for a name that is not known.

    `name` is the full one, such as ``horovod.run``; `target` that in nbelastic, where there is
    none.
    """
    advice = _FUNCTIONS.get(target.partition(".")[2])
    if advice is None:
        return None

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError(f"{name} {advice}")

    return refuse
