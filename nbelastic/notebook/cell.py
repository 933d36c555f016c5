"""A notebook cell as a function that can be sent to ranks.

A :class:`CellFunction` runs a cell on a rank as the notebook would: from the top, in a namespace
called ``"__main__"`` with the notebook's variables that it uses. Functions defined in the notebook
share that namespace, so they read what the cell assigns.
"""

from __future__ import annotations

import ast
import itertools
import linecache
import re
import reprlib
import sys
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
LARGE = 16 * 2**20  # bytes from which the user is warned of a variable
MOST_ITEMS = 1_000
DEEPEST = 4


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
        flags: int = 0,  # of the compiler, as an earlier cell's ``from __future__`` has set them
    ) -> None:
        self.filename = self.__name__ = filename
        self._above = above.splitlines()
        self._body = body if body.endswith("\n") else body + "\n"
        self._flags = flags
        self._home = home
        self._ran: dict[str, Any] | None = None
        self._anchor: types.FunctionType | None = None
        self._remember_lines()
        self._compile()  # an error of syntax is raised here
        names = needed_names(self._parse(), self._padded)
        self.imported = set(imported_names(self._parse()))
        self.captured = {name: namespace[name] for name in sorted(names) if name in namespace}

    def __repr__(self) -> str:
        return f"<CellFunction {self.filename}: {', '.join(self.captured) or 'no variables'}>"

    def __getstate__(self) -> dict[str, Any]:
        state = {**self.__dict__, "_home": None, "_ran": None}
        if self._home is not None:
            # Functions of one namespace that are pickled together share one again on the rank.
            # This one keeps it, whether or not the cell uses another.
            state["_anchor"] = types.FunctionType((lambda: None).__code__, self._home, "cell")
        state["_submodules"] = _submodules(self._compile(), self.captured.values())
        return state

    def __call__(self) -> Any:
        """Run the cell; return the value of its last expression on rank 0, None on others."""
        self._remember_lines()
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

    def _remember_lines(self) -> None:
        """Make the cell's lines available to tracebacks in this process."""
        lines = [f"{line}\n" for line in (*self._above, *self._body.splitlines())]
        linecache.cache[self.filename] = (sum(map(len, lines)), None, lines, self.filename)

    def _parse(self) -> ast.Module:
        try:
            tree: ast.Module = compile(
                self._padded, self.filename, "exec", self._flags | ast.PyCF_ONLY_AST, True
            )
        except SyntaxError as error:
            line = linecache.getline(self.filename, error.lineno or 0).rstrip()
            if not _IPYTHONS.search(line):
                raise
            raise CellError(
                f"{self.filename}, line {error.lineno}: {line.strip()!r} is for IPython, but a "
                "rank runs plain Python; move it to a cell of its own above this one"
            ) from None
        if not tree.body:
            raise CellError(f"{self.filename}: there is no code below the magic's line to run")
        return tree

    def _compile(self) -> types.CodeType:
        """Compile the cell so that the value of a last expression is kept."""
        tree = self._parse()
        last = tree.body[-1]
        line = self._padded.encode().splitlines()[(last.end_lineno or 0) - 1]
        is_hidden = line[last.end_col_offset :].lstrip().startswith(b";")
        if isinstance(last, ast.Expr) and not is_hidden:
            target = ast.copy_location(ast.Name(_RESULT, ast.Store()), last)
            tree.body[-1] = ast.copy_location(ast.Assign([target], last.value), last)
        try:
            code: types.CodeType = compile(tree, self.filename, "exec", self._flags, True)
        except SyntaxError as error:  # a return or an await, found without the text
            error.text = error.text or linecache.getline(self.filename, error.lineno or 0)
            raise
        return code


def _submodules(code: types.CodeType, values: Iterable[Any]) -> list[types.ModuleType]:
    """Return modules that earlier cells imported, and the code reads from a package."""
    # They are pickled with the cell, so that a rank imports them, as cloudpickle does.
    names, codes = set[str](), [code]
    for each in codes:
        names |= set(each.co_names)
        codes += [constant for constant in each.co_consts if isinstance(constant, types.CodeType)]
    packages = tuple(f"{each.__name__}." for each in values if isinstance(each, types.ModuleType))
    return [
        module
        for name, module in list(sys.modules.items())
        for package in packages
        if name.startswith(package) and names.issuperset(name[len(package) :].split("."))
        if isinstance(module, types.ModuleType)
    ]


# -- sizes -----------------------------------------------------------------------------------------


def large_variables(captured: Mapping[str, Any], least: int = LARGE) -> list[tuple[str, int]]:
    """Return the variables of at least `least` bytes with their sizes, the largest first."""
    sizes = [(name, estimated_size(value)) for name, value in captured.items()]
    return sorted((s for s in sizes if s[1] >= least), key=lambda s: (-s[1], s[0]))


def estimated_size(value: Any, depth: int = DEEPEST, seen: set[int] | None = None) -> int:
    """Return an estimate of the bytes in arrays, tensors, models and containers of them."""
    seen = set() if seen is None else seen
    if id(value) in seen or isinstance(value, (type, types.ModuleType)):
        return 0
    seen.add(id(value))
    try:
        if hasattr(value, "__dask_graph__"):
            return 0  # a task graph, not data
        if hasattr(value, "columns") and callable(getattr(value, "memory_usage", None)):
            return int(value.memory_usage(index=True).sum())
        if isinstance(size := getattr(value, "nbytes", None), int):
            return size
        parts: Any = value
        if not isinstance(value, (dict, list, tuple, set, frozenset)):
            parts = getattr(value, "__dict__", ())
        items = parts.values() if isinstance(parts, dict) else parts
        first = list(itertools.islice(items, MOST_ITEMS if depth else 0))
        found = sum(estimated_size(each, depth - 1, seen) for each in first)
        # Extrapolated from the first thousand.
        return sys.getsizeof(value) + found * len(parts) // max(len(first), 1)
    except Exception:  # attributes of any class may raise; the estimate must not
        return 0


# -- results ---------------------------------------------------------------------------------------
#
# A job that has trained for hours must not fail because its last line is an open file, or a tensor
# on a GPU that the machine of the notebook does not have.

LONGEST = 4_000  # maximum length of a placeholder's text


@dataclass(frozen=True, repr=False, eq=False)
class UnavailableValue:
    """A placeholder for a value that could not be sent: its text, and the reason."""

    text: str  # its ``repr``
    kind: str  # name of its class
    reason: str

    def __repr__(self) -> str:
        return self.text

    def __str__(self) -> str:
        return f"{self.text}\n{self._why()}"

    def _why(self) -> str:
        return f"[only the text of this {self.kind} was returned: {self.reason}]"

    def _repr_pretty_(self, printer: Any, _: bool) -> None:
        printer.text(str(self))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise AttributeError(
            f"{name!r}: {self._why()} Return a part of it, such as a number or a state_dict."
        )


@dataclass(frozen=True)
class RemoteValue:
    """A pickled value. Unpickling it gives the value, or a placeholder."""

    data: bytes
    text: str
    kind: str

    def __reduce__(self) -> tuple[Any, ...]:
        return _open, (self.data, self.text, self.kind)


def pack(value: Any) -> RemoteValue | UnavailableValue:
    """Return the value of a cell's last expression as it is sent to the notebook."""
    text, kind = _text(value), type(value).__name__
    try:
        return RemoteValue(dumps(value), text, kind)
    except Exception as error:  # pickling runs code of any class
        return UnavailableValue(text, kind, f"it cannot be pickled ({_line(error)})")


def _open(data: bytes, text: str, kind: str) -> Any:
    try:
        return cloudpickle.loads(data)
    except Exception as error:  # unpickling runs code of any class
        return UnavailableValue(text, kind, f"it cannot be unpickled here ({_line(error)})")


def _line(error: Exception) -> str:
    return " ".join(summary_of(error).split())


def _text(value: Any) -> str:
    long = isinstance(value, (list, tuple, dict, set, str, bytes)) and len(value) > LONGEST
    try:
        text = reprlib.repr(value) if long else repr(value)
    except Exception as error:  # a __repr__ is the user's
        text = f"<{type(value).__name__}; its repr() failed: {_line(error)}>"
    return text if len(text) <= LONGEST else f"{text[:LONGEST]} …"
