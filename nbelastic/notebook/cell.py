"""A notebook cell as a function that can travel.

A :class:`CellFunction` runs a cell's source on a rank as the notebook would run it: from the top,
in a namespace of its own whose ``__name__`` is ``"__main__"``, with the variables of the notebook
that it uses. Functions that were defined in the notebook see that same namespace, as they do at
home: what the cell assigns, they read.
"""

from __future__ import annotations

import ast
import io
import linecache
import re
import tokenize
import types
from typing import TYPE_CHECKING, Any

from nbelastic.elastic.context import LocalContext, current
from nbelastic.errors import NotInitialized, PreflightError

from .names import needed_names
from .parcel import pack

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["CellError", "CellFunction"]

_RESULT = "__nbelastic_result__"

_IPYTHONS = re.compile(r"^\s*[%!?]|^[\w\s.,\[\]]*=\s*[%!]|\?\s*$")
"""A line that only IPython understands: a magic, a shell command, a question."""


class CellError(PreflightError):
    """The cell cannot be a training function; the message names the line."""

    def _render_traceback_(self) -> list[str]:
        """Show the message alone: the frames are all of the magic's own code."""
        return [f"{type(self).__name__}: {self}"]


class CellFunction:
    """A cell's source with what it needs; calling it runs the cell.

    Parameters
    ----------
    body : str
        The cell without its magic line.
    namespace : mapping of str to object
        The notebook's variables; those that the cell uses are taken along.
    filename : str, default "Cell"
        What tracebacks call it, such as ``Cell In[5]``.
    above : str, default ""
        The lines above the body (the magic's own), so that lines are numbered as in the cell.
    home : dict, optional
        The globals of functions that were defined in the notebook.
    flags : int, default 0
        Compiler flags of the notebook (``from __future__ import …`` in an earlier cell).

    Attributes
    ----------
    captured : dict of str to object
        The variables that travel with the cell.

    Raises
    ------
    SyntaxError
        The cell is not Python; with the line as it is numbered in the cell.
    CellError
        The cell is empty, or has a line that only IPython understands.
    """

    def __init__(
        self,
        body: str,
        namespace: Mapping[str, Any],
        *,
        filename: str = "Cell",
        above: str = "",
        home: dict[str, Any] | None = None,
        flags: int = 0,
    ) -> None:
        self.filename = self.__name__ = filename
        self._above = above.splitlines()
        self._body = body if body.endswith("\n") else body + "\n"
        self._flags = flags
        self._home = home
        self._shared: dict[str, Any] | None = None
        self._anchor: types.FunctionType | None = None
        self._remember_lines()
        self._compile()
        names = needed_names(self._parse(), self._padded)
        self.captured = {name: namespace[name] for name in sorted(names) if name in namespace}

    def __repr__(self) -> str:
        return f"<CellFunction {self.filename}: {', '.join(self.captured) or 'no variables'}>"

    def __getstate__(self) -> dict[str, Any]:
        state = {**self.__dict__, "_home": None, "_shared": None}
        if self._home is not None:
            # Functions of one namespace that are pickled together share one again where they
            # arrive. This one holds on to it, whether or not the cell uses any other.
            state["_anchor"] = types.FunctionType(_nothing.__code__, self._home, "cell")
        return state

    def __call__(self) -> Any:
        """Run the cell.

        Returns
        -------
        object
            On rank 0 the value of the last expression, if the cell ends in one without a
            semicolon; None on other ranks. In a job it is packed for its way to the notebook.
        """
        self._remember_lines()
        namespace = self._namespace()
        exec(self._compile(), namespace)
        value = namespace.pop(_RESULT, None)
        try:
            context = current()
        except NotInitialized:
            return value
        if context.rank != 0:
            return None
        return value if isinstance(context, LocalContext) else pack(value)

    # -- source --------------------------------------------------------------------------------

    @property
    def _padded(self) -> str:
        """The source with blank lines for the lines above it."""
        return "\n" * len(self._above) + self._body

    def _remember_lines(self) -> None:
        """Let tracebacks in this process show the cell's lines."""
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
                f"{self.filename}, line {error.lineno}: {line.strip()!r} is for IPython, and a "
                "rank runs plain Python; move it to a cell of its own above this one"
            ) from None
        if not tree.body:
            raise CellError(f"{self.filename}: there is no code below the magic's line to run")
        return tree

    def _compile(self) -> types.CodeType:
        """Compile the cell such that the value of a last expression is kept."""
        tree = self._parse()
        last = tree.body[-1]
        if isinstance(last, ast.Expr) and not _ends_in_semicolon(self._body):
            target = ast.copy_location(ast.Name(_RESULT, ast.Store()), last)
            tree.body[-1] = ast.copy_location(ast.Assign([target], last.value), last)
        try:
            code: types.CodeType = compile(tree, self.filename, "exec", self._flags, True)
        except SyntaxError as error:  # found without the text at hand: a return, an await
            error.text = error.text or linecache.getline(self.filename, error.lineno or 0)
            raise
        return code

    # -- namespace -----------------------------------------------------------------------------

    def _namespace(self) -> dict[str, Any]:
        """Return the namespace to run in: fresh, with what was captured."""
        namespace: dict[str, Any] = {}
        if self._anchor is not None:
            namespace = self._anchor.__globals__
            if self._shared is None:
                self._shared = dict(namespace)
            namespace.clear()
            namespace.update(self._shared)
        namespace.update(self.captured, __name__="__main__", __doc__=None)
        return namespace


def _nothing() -> None:
    """Do nothing: the code of the function that holds a namespace."""


def _ends_in_semicolon(source: str) -> bool:
    skip = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.ENDMARKER, tokenize.DEDENT)
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    last = [token.string for token in tokens if token.type not in skip]
    return bool(last) and last[-1] == ";"
