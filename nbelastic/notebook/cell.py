"""A notebook cell as a function that can be sent to ranks.

A :class:`CellFunction` runs a cell on a rank as the notebook would: from the top, in a namespace
called ``"__main__"`` with the notebook's variables that it uses. Functions defined in the notebook
share that namespace, so they read what the cell assigns.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import io
import linecache
import marshal
import re
import sys
import tokenize
import types
from typing import TYPE_CHECKING, Any

from nbelastic.elastic.ranks.context import LocalContext, current_or_none
from nbelastic.errors import PreflightError

from .names import imported_names, needed_names
from .remote_value import pack

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_RESULT = "__nbelastic_result__"

_IPYTHONS = re.compile(r"^\s*[%!?]|^[\w\s.,\[\]]*=\s*[%!]|\?\s*$")
"""A line that only IPython understands: a magic, a shell command, a help request."""

LARGE = 16 * 2**20
"""Bytes from which the user is warned of a variable."""

MOST_ITEMS = 1_000
DEEPEST = 4


class CellError(PreflightError):
    """The cell cannot be a training function; the message names the line."""

    def _render_traceback_(self) -> list[str]:
        return [f"{type(self).__name__}: {self}"]


class CellFunction:
    """A cell's source with its variables; a call runs the cell.

    A cell that is not Python is a SyntaxError, with lines numbered as in the cell. One that is
    empty, or has a line that only IPython understands, is a :class:`CellError`.
    """

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
        self._shared: dict[str, Any] | None = None
        self._ran: dict[str, Any] | None = None
        self._anchor: types.FunctionType | None = None
        self._remember_lines()
        self._code: types.CodeType | None = self._compile()
        names = needed_names(self._parse(), self._padded)
        self.imported = set(imported_names(self._parse()))
        self.captured = {name: namespace[name] for name in sorted(names) if name in namespace}

    def __repr__(self) -> str:
        return f"<CellFunction {self.filename}: {', '.join(self.captured) or 'no variables'}>"

    def __getstate__(self) -> dict[str, Any]:
        # Send compiled code: a rank that parses may fail while another thread of its worker parses
        # as well, because CPython 3.11 has one recursion counter for both.
        code = importlib.util.MAGIC_NUMBER, marshal.dumps(self._code)
        state = {**self.__dict__, "_home": None, "_shared": None, "_code": code}
        state["_ran"] = None
        if self._home is not None:
            # Functions of one namespace that are pickled together share one again on the rank.
            # This one keeps it, whether or not the cell uses another.
            state["_anchor"] = types.FunctionType(_nothing.__code__, self._home, "cell")
        state["_submodules"] = _submodules(self._compile(), self.captured.values())
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        magic, code = state["_code"]
        same = magic == importlib.util.MAGIC_NUMBER
        self._code = marshal.loads(code) if same else None  # None: compiled when called

    def __call__(self) -> Any:
        """Run the cell; return the value of its last expression on rank 0, None on other ranks.

        A semicolon behind the expression makes it None. In a job the value is packed for the
        notebook.
        """
        self._remember_lines()
        namespace = self._ran = self._namespace()
        exec(self._code or self._compile(), namespace)
        value = namespace.pop(_RESULT, None)
        context = current_or_none()
        if context is None:
            return value
        if context.rank != 0:
            return None
        return value if isinstance(context, LocalContext) else pack(value)

    def variables(self) -> dict[str, Any]:
        """Return the cell's variables: on a rank those of its run, else the notebook's."""
        return self._ran if self._ran is not None else self._home or {}

    # -- source --------------------------------------------------------------------------------

    @property
    def _padded(self) -> str:
        """The source with blank lines for the lines above it."""
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
        if isinstance(last, ast.Expr) and not _ends_in_semicolon(self._body):
            target = ast.copy_location(ast.Name(_RESULT, ast.Store()), last)
            tree.body[-1] = ast.copy_location(ast.Assign([target], last.value), last)
        try:
            code: types.CodeType = compile(tree, self.filename, "exec", self._flags, True)
        except SyntaxError as error:  # a return or an await, found without the text
            error.text = error.text or linecache.getline(self.filename, error.lineno or 0)
            raise
        return code

    # -- namespace -----------------------------------------------------------------------------

    def _namespace(self) -> dict[str, Any]:
        """Return a fresh namespace with the captured variables."""
        namespace: dict[str, Any] = {}
        if self._anchor is not None:
            namespace = self._anchor.__globals__
            if self._shared is None:
                self._shared = dict(namespace)
            namespace.clear()
            namespace.update(self._shared)
        namespace.update(self.captured, __name__="__main__", __doc__=None)
        return namespace


def _submodules(code: types.CodeType, values: Iterable[Any]) -> list[types.ModuleType]:
    """Return modules imported by earlier cells, and read by the code from a package.

    They are pickled with the cell, so that a rank imports them, as cloudpickle does for a function.
    """
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


def _nothing() -> None:
    """Do nothing: this is the code of the function that keeps a namespace."""


def _ends_in_semicolon(source: str) -> bool:
    skip = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.ENDMARKER, tokenize.DEDENT)
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    last = [token.string for token in tokens if token.type not in skip]
    return bool(last) and last[-1] == ";"


# -- sizes -----------------------------------------------------------------------------------------


def large_variables(captured: Mapping[str, Any], least: int = LARGE) -> list[tuple[str, int]]:
    """Return the variables of at least `least` bytes with their sizes, the largest first."""
    sizes = [(name, estimated_size(value)) for name, value in captured.items()]
    return sorted((s for s in sizes if s[1] >= least), key=lambda s: (-s[1], s[0]))


def estimated_size(value: Any) -> int:
    """Return an estimate of the bytes in arrays, tensors, models and containers of them."""
    return _estimate(value, DEEPEST, set())


def _estimate(value: Any, depth: int, seen: set[int]) -> int:
    if id(value) in seen or isinstance(value, type) or inspect.ismodule(value):
        return 0
    seen.add(id(value))
    try:
        known = _known(value)
        if known is not None:
            return known
        own = sys.getsizeof(value)
        return own + (_parts(value, depth - 1, seen) if depth else 0)
    except Exception:  # attributes of any class may raise; the estimate must not
        return 0


def _known(value: Any) -> int | None:
    """Return the size that arrays, tensors and tables report."""
    if hasattr(value, "__dask_graph__"):
        return 0  # a task graph, not data
    if callable(getattr(value, "element_size", None)) and callable(value.nelement):
        return int(value.element_size() * value.nelement())
    if callable(getattr(value, "memory_usage", None)) and hasattr(value, "columns"):
        return int(value.memory_usage(index=True).sum())
    size = getattr(value, "nbytes", None)
    return int(size) if isinstance(size, int) else None


def _parts(value: Any, depth: int, seen: set[int]) -> int:
    if isinstance(value, dict):
        return _sample(value.values(), len(value), depth, seen)
    if isinstance(value, (list, tuple, set, frozenset)):
        return _sample(value, len(value), depth, seen)
    inner = getattr(value, "__dict__", None)
    return _sample(inner.values(), len(inner), depth, seen) if isinstance(inner, dict) else 0


def _sample(values: Iterable[Any], total: int, depth: int, seen: set[int]) -> int:
    """Add up the items, extrapolated from the first thousand."""
    found = sum(_estimate(item, depth, seen) for item, _ in zip(values, range(MOST_ITEMS)))  # noqa: B905  # the first thousand
    return found if total <= MOST_ITEMS else found * total // MOST_ITEMS
