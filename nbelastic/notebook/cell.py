"""A notebook cell as a function that can be sent to ranks.

A :class:`CellFunction` runs a cell on a rank as the notebook would: from the top, in a namespace
called ``"__main__"`` with the notebook's variables that it uses. Functions defined in the notebook
share that namespace, so they read what the cell assigns.
"""

from __future__ import annotations

import ast
import linecache
import re
import sys
import traceback
import types
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import cloudpickle

from nbelastic.elastic.ranks.context import current_or_none
from nbelastic.elastic.ranks.session import Session
from nbelastic.errors import PreflightError, summary_of
from nbelastic.pickling import dumps

from .names import imported_names, needed_names

_RESULT = "__nbelastic_result__"
_IPYTHONS = re.compile(r"^\s*[%!?]|^[\w\s.,\[\]]*=\s*[%!]|\?\s*$")  # for IPython alone


class CellError(PreflightError):
    """The cell cannot be a training function; the message names the line."""


class CellFunction:
    """A cell's source with its variables; a call runs the cell."""

    def __init__(
        self,
        body: str,
        namespace: Mapping[str, Any],  # the notebook's variables
        *,
        filename: str = "Cell",  # in tracebacks, such as ``Cell In[5]``
        above: str = "",  # the magic's lines, so that lines are numbered as in the cell
        home: dict[str, Any] | None = None,  # globals of functions defined in the notebook
    ) -> None:
        self.filename = self.__name__ = filename
        self._above = above.splitlines()
        self._body = body if body.endswith("\n") else body + "\n"
        self._home = home
        self._ran: dict[str, Any] | None = None
        self._anchor: types.FunctionType | None = None
        self._compile()  # an error of syntax is raised here
        tree = self._parse()
        names = needed_names(tree, self._padded)
        self.imported = set(imported_names(tree))
        self.captured = {name: namespace[name] for name in sorted(names) if name in namespace}

    def __repr__(self) -> str:
        return f"<CellFunction {self.filename}: {', '.join(self.captured) or 'no variables'}>"

    def __getstate__(self) -> dict[str, Any]:
        state = {**self.__dict__, "_home": None, "_ran": None}
        if self._home is not None:
            # Functions of one namespace that are pickled together share one again on the rank.
            # This one keeps it, whether or not the cell uses another.
            state["_anchor"] = types.FunctionType((lambda: None).__code__, self._home, "cell")
        state["_submodules"] = _submodules(self._parse(), self.captured.values())
        return state

    def __call__(self) -> Any:
        """Run the cell; return the value of its last expression on rank 0, None on others."""
        namespace: dict[str, Any] = {} if self._anchor is None else self._anchor.__globals__
        namespace.update(self.captured, __name__="__main__", __doc__=None)
        self._ran = namespace
        exec(self._compile(), namespace)
        value = namespace.pop(_RESULT, None)
        context = current_or_none()
        if context is None:
            return value
        if context.rank != 0:
            return None
        return pack(value) if isinstance(context, Session) else value

    def variables(self) -> dict[str, Any]:
        """Return the cell's variables: on a rank those of its run, else the notebook's."""
        return self._ran if self._ran is not None else self._home or {}

    # -- source --------------------------------------------------------------------------------

    @property
    def _padded(self) -> str:
        return "\n" * len(self._above) + self._body

    def _parse(self) -> ast.Module:
        flags = ast.PyCF_ONLY_AST
        tree: ast.Module = compile(self._padded, self.filename, "exec", flags, dont_inherit=True)
        return tree

    def _compile(self) -> types.CodeType:
        """Compile the cell so that the value of a last expression is kept."""
        # Its lines are made available to tracebacks in this process.
        lines = [f"{line}\n" for line in (*self._above, *self._body.splitlines())]
        linecache.cache[self.filename] = (sum(map(len, lines)), None, lines, self.filename)
        try:
            tree = self._parse()
            if not tree.body:
                raise CellError(f"{self.filename}: there is no code below the magic's line to run")
            last = tree.body[-1]
            line = self._padded.encode().splitlines()[(last.end_lineno or 0) - 1]
            is_hidden = line[last.end_col_offset :].lstrip().startswith(b";")
            if isinstance(last, ast.Expr) and not is_hidden:
                target = ast.copy_location(ast.Name(_RESULT, ast.Store()), last)
                tree.body[-1] = ast.copy_location(ast.Assign([target], last.value), last)
            code: types.CodeType = compile(tree, self.filename, "exec", dont_inherit=True)
        except SyntaxError as error:
            error.text = linecache.getline(self.filename, error.lineno or 0)
            if _IPYTHONS.search(error.text):
                hint = "is for IPython, but a rank runs plain Python; move it to a cell above"
                where = f"{self.filename}, line {error.lineno}"
                raise CellError(f"{where}: {error.text.strip()!r} {hint}") from None
            raise CellError("".join(traceback.format_exception_only(error)).strip()) from None
        return code


def _submodules(tree: ast.Module, values: Iterable[Any]) -> list[types.ModuleType]:
    """Return modules that earlier cells imported, and the code reads from a package."""
    # They are pickled with the cell, so that a rank imports them, as cloudpickle does.
    names = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    packages = tuple(f"{each.__name__}." for each in values if isinstance(each, types.ModuleType))
    return [
        module
        for name, module in list(sys.modules.items())
        for package in packages
        if name.startswith(package) and names.issuperset(name[len(package) :].split("."))
        if isinstance(module, types.ModuleType)
    ]


# -- results ---------------------------------------------------------------------------------------
#
# A job that has trained for hours must not fail because its last line is an open file, or a tensor
# on a GPU that the machine of the notebook does not have.

LONGEST = 4_000  # maximum length of a placeholder's text


@dataclass(frozen=True)
class ReturnedValue:
    """A value on its way to the notebook. Unpickling gives the value, or without it this text."""

    text: str  # the value's ``repr``
    reason: str  # why there is only the text
    data: bytes = b""  # the value, pickled

    def __repr__(self) -> str:
        return (
            f"{self.text}\n[only this text was returned: {self.reason}; return a part of it, such "
            "as a number or a state_dict]"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return _open, (self.text, self.reason, self.data)


def pack(value: Any) -> ReturnedValue:
    """Return the value of a cell's last expression as it is sent to the notebook."""
    try:
        text = repr(value)[:LONGEST]
    except Exception as error:  # a __repr__ is the user's
        text = f"<{type(value).__name__}; its repr() failed: {summary_of(error)}>"
    try:
        return ReturnedValue(text, "", dumps(value))
    except Exception as error:  # pickling runs code of any class
        return ReturnedValue(text, f"it cannot be pickled ({summary_of(error)})")


def _open(text: str, reason: str, data: bytes) -> Any:
    if not data:
        return ReturnedValue(text, reason)
    try:
        return cloudpickle.loads(data)
    except Exception as error:  # unpickling runs code of any class
        return ReturnedValue(text, f"it cannot be unpickled here ({summary_of(error)})")
