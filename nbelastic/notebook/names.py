"""Names that a cell needs from the notebook, found without a run of the cell.

A name is needed if the cell reads it before it certainly binds it, or if a function uses it that
the cell does not certainly bind. One name too many costs little; one too few is a ``NameError`` on
a worker. So after an ``if`` a name counts as bound only if both branches bind it. Bodies of loops
and of ``with`` count as run, because what is read later is nearly always what they bind.
"""

from __future__ import annotations

import ast
import re
import symtable
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

_OF_IPYTHON = re.compile(
    r"In|Out|get_ipython|exit|quit|display|_+|_i+|_i?\d+|_[iod]h|_exit_code|__\w+__"
)


def users_names(
    namespace: Mapping[str, Any], hidden: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the user's own names in a namespace, also hidden names with a new value."""
    hidden = hidden or {}
    missing = object()
    return {
        name: value
        for name, value in namespace.items()
        if not _OF_IPYTHON.fullmatch(name) and hidden.get(name, missing) is not value
    }


def needed_names(tree: ast.Module, source: str) -> set[str]:
    """Return the names that a cell reads without a binding of its own."""
    table = symtable.symtable(source, "cell", "exec")
    flow = _Flow(table)
    bound = flow.run(tree.body, set())
    in_bodies = set(_used_in_bodies(table))
    mine = {symbol.get_name() for symbol in table.get_symbols()} | in_bodies
    return (flow.needed & mine) | (in_bodies - bound)


def imported_names(tree: ast.Module) -> Iterator[str]:
    """Yield the names of modules in all import statements of a cell."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


def _used_in_bodies(table: symtable.SymbolTable) -> Iterator[str]:
    """Yield the names of the notebook that functions, lambdas and class bodies use."""
    for child in table.get_children():
        yield from (s.get_name() for s in child.get_symbols() if s.is_global())
        yield from _used_in_bodies(child)


class _Flow:
    """Traverses a cell's top level in the order of its execution."""

    def __init__(self, table: symtable.SymbolTable) -> None:
        self.needed: set[str] = set()  # read before they had a value
        # Targets of comprehensions look like assignments in the tree, but are not among these.
        self._assigned = {
            symbol.get_name()
            for symbol in table.get_symbols()
            if symbol.is_assigned() or symbol.is_imported()
        }

    def run(self, nodes: Iterable[ast.AST], bound: set[str]) -> set[str]:
        """Traverse a block; return the names bound at its end."""
        for node in nodes:
            bound = self._statement(node, bound)
        return bound

    def _statement(self, node: Any, bound: set[str]) -> set[str]:
        bound = self._expressions(node, bound)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            return bound | {node.name}
        if isinstance(node, ast.ClassDef):
            self.run(node.body, bound)
            return bound | {node.name}
        branches = _branches(node)
        if branches:
            ends = [self.run(block, self._expressions(head, bound)) for head, block in branches]
            return self.run(getattr(node, "finalbody", []), set.intersection(*ends))
        return self.run([*getattr(node, "body", []), *getattr(node, "orelse", [])], bound)

    def _expressions(self, node: ast.AST, bound: set[str]) -> set[str]:
        """Traverse a statement without its inner statements; return the names bound afterwards."""
        reads: set[str] = set()
        binds: set[str] = set()
        walrus: set[str] = set()
        for part in _without_blocks(node):
            if isinstance(part, ast.Name):
                is_read = not isinstance(part.ctx, ast.Store) or isinstance(node, ast.AugAssign)
                (reads if is_read else binds).add(part.id)
            elif isinstance(part, ast.NamedExpr):
                walrus.add(part.target.id)
            elif isinstance(part, ast.alias):
                binds.add(part.asname or part.name.split(".")[0])
            else:  # patterns of match, and handlers, have their names as text
                names = (getattr(part, "name", None), getattr(part, "rest", None))
                binds.update(name for name in names if isinstance(name, str))
        self.needed |= reads - bound
        if isinstance(node, ast.Delete):
            return bound - reads
        is_declaration = isinstance(node, ast.AnnAssign) and node.value is None
        return bound if is_declaration else bound | (binds & self._assigned) | walrus


def _branches(node: Any) -> list[tuple[ast.AST, Sequence[ast.AST]]]:
    """Return the alternative blocks of a statement, each with the node evaluated before."""
    nothing = ast.Pass()
    if isinstance(node, ast.If):
        return [(nothing, node.body), (nothing, node.orelse)]
    if isinstance(node, ast.Match):
        return [(nothing, []), *((case, case.body) for case in node.cases)]
    if hasattr(node, "handlers"):
        handlers = [(handler, handler.body) for handler in node.handlers]
        return [(nothing, [*node.body, *node.orelse]), *handlers]
    return []


def _without_blocks(node: ast.AST) -> Iterator[ast.AST]:
    yield node
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, (ast.stmt, ast.ExceptHandler, ast.match_case)):
            yield from _without_blocks(child)
