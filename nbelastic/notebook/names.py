"""Names that a cell needs from the notebook, found without running it.

Code at the top level runs in order, so a name is needed if it is read before it is bound. Bodies of
functions run later, at the earliest when the function's name is read; a name that they use is
needed unless the cell certainly binds it before. One name too many costs little; one too few is a
``NameError`` on a worker. So after an ``if`` a name counts as bound only if every branch binds it.
Bodies of loops and of ``with`` count as run, because what is read after them is nearly always what
they have bound.
"""

from __future__ import annotations

import ast
import re
import symtable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

_OF_IPYTHON = re.compile(
    r"In|Out|get_ipython|exit|quit|display|_+|_i+|_i?\d+|_[iod]h|_exit_code|__\w+__"
)


def users_names(
    namespace: Mapping[str, Any], hidden: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the user's own names in a notebook's namespace.

    Parameters
    ----------
    namespace : mapping of str to object
        The notebook's variables.
    hidden : mapping of str to object, optional
        IPython's own variables. A name with another value now is the user's.
    """
    hidden = hidden or {}
    missing = object()
    return {
        name: value
        for name, value in namespace.items()
        if not _OF_IPYTHON.fullmatch(name) and hidden.get(name, missing) is not value
    }


def needed_names(tree: ast.Module, source: str) -> set[str]:
    """Return the names that a cell reads without binding them itself.

    Parameters
    ----------
    tree : ast.Module
        The parsed cell.
    source : str
        Its source.
    """
    table = symtable.symtable(source, "cell", "exec")
    flow = _Flow(table)
    flow.run(tree.body)
    return flow.needed | (set(_used_in_bodies(table)) - flow.bound)


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


class _Flow(ast.NodeVisitor):
    """Traverses a cell's top level in the order in which it runs.

    Attributes
    ----------
    bound : set of str
        Names that have a value by now.
    needed : set of str
        Names that were read before they had one.

    Parameters
    ----------
    table : symtable.SymbolTable
        The cell's.
    """

    def __init__(self, table: symtable.SymbolTable) -> None:
        self._bodies: dict[tuple[str, int], list[str]] = {}
        for child in table.get_children():
            used = self._bodies.setdefault((child.get_name(), child.get_lineno()), [])
            used += [s.get_name() for s in child.get_symbols() if s.is_global()]
            used += _used_in_bodies(child)
        self._uses: dict[str, list[str]] = {}  # of functions and classes that were not read yet
        self.bound: set[str] = set()
        self.needed: set[str] = set()
        self._likely: set[str] = set()  # in handlers: what the body of the try binds

    def run(self, nodes: Sequence[ast.AST | None]) -> None:
        """Visit nodes one after the other."""
        for node in nodes:
            if node is not None:
                self.visit(node)

    def _read(self, name: str) -> None:
        if name not in self.bound and name not in self._likely:
            self.needed.add(name)
        for used in self._uses.pop(name, ()):  # it may be called from here on
            self._read(used)

    def _branch(self, start: set[str], nodes: Sequence[ast.AST]) -> set[str] | None:
        """Return the names bound after a branch; None if it leaves the block."""
        self.bound = set(start)
        self.run(nodes)
        ends = nodes and isinstance(nodes[-1], (ast.Raise, ast.Continue, ast.Break))
        return None if ends else self.bound

    def _join(self, start: set[str], *branches: set[str] | None) -> None:
        alive = [branch for branch in branches if branch is not None]
        self.bound = set.intersection(*alive) if alive else set(start)

    # -- names ---------------------------------------------------------------------------------

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Store):
            self.bound.add(node.id)
            return
        self._read(node.id)
        if isinstance(node.ctx, ast.Del):
            self.bound.discard(node.id)

    def visit_Assign(self, node: ast.Assign) -> None:
        self.run([node.value, *node.targets])

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        if isinstance(node.target, ast.Name):
            self._read(node.target.id)
        self.run([node.value, node.target])

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self.run([node.annotation, node.value])
        if node.value is not None or not isinstance(node.target, ast.Name):
            self.visit(node.target)

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
        self.run([node.value, node.target])

    def visit_Import(self, node: ast.Import | ast.ImportFrom) -> None:
        self.bound.update(a.asname or a.name.split(".")[0] for a in node.names)

    visit_ImportFrom = visit_Import  # noqa: N815  # as ast has it

    # -- definitions ---------------------------------------------------------------------------

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self.run([*node.decorator_list, node.args, node.returns])
        self._define(node)

    def _define(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> None:
        self.bound.add(node.name)
        self._uses[node.name] = self._bodies.get((node.name, node.lineno), [])

    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815  # as ast has it

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self.visit(node.args)
        for used in self._bodies.get(("lambda", node.lineno), ()):
            self._read(used)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.run([*node.decorator_list, *node.bases, *node.keywords])
        around = set(self.bound)
        self.run(node.body)
        self.bound = around
        self._define(node)

    def _visit_comprehension(self, node: Any) -> None:
        around = set(self.bound)
        for part in node.generators:
            self.run([part.iter, part.target, *part.ifs])
        results = [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
        self.run(results)
        inside = (each for each in ast.walk(node) if isinstance(each, ast.NamedExpr))
        self.bound = around | {each.target.id for each in inside}

    visit_ListComp = visit_SetComp = _visit_comprehension  # noqa: N815  # as ast has it
    visit_DictComp = visit_GeneratorExp = _visit_comprehension  # noqa: N815  # as ast has it

    # -- branches ------------------------------------------------------------------------------

    def visit_For(self, node: ast.For | ast.AsyncFor) -> None:
        self.run([node.iter, node.target, *node.body, *node.orelse])

    visit_AsyncFor = visit_For  # noqa: N815  # as ast has it

    def visit_If(self, node: ast.If) -> None:
        self.visit(node.test)
        start = set(self.bound)
        self._join(start, self._branch(start, node.body), self._branch(start, node.orelse))

    def visit_Try(self, node: Any) -> None:
        start = set(self.bound)
        body = self._branch(start, [*node.body, *node.orelse])
        outer, self._likely = self._likely, self._likely | (body or set())
        handlers = [self._branch(start, [each]) for each in node.handlers]
        handlers = [
            None if isinstance(each.body[-1], (ast.Raise, ast.Continue, ast.Break)) else bound
            for each, bound in zip(node.handlers, handlers, strict=True)
        ]
        self._join(start, body, *handlers)
        self.run(node.finalbody)
        self._likely = outer

    visit_TryStar = visit_Try  # noqa: N815  # as ast has it

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> None:
        if node.type is not None:
            self.visit(node.type)
        if node.name is not None:
            self.bound.add(node.name)
        self.run(node.body)
        self.bound.discard(node.name or "")

    def visit_Match(self, node: ast.Match) -> None:
        self.visit(node.subject)
        start = set(self.bound)
        last = node.cases[-1]
        whole = last.guard is None and getattr(last.pattern, "pattern", last) is None
        branches = [self._case(start, case) for case in node.cases]
        self._join(start, *branches, *([] if whole else [start]))

    def _case(self, start: set[str], case: ast.match_case) -> set[str] | None:
        names = {
            name
            for part in ast.walk(case.pattern)
            for name in (getattr(part, "name", None), getattr(part, "rest", None))
            if isinstance(name, str)
        }
        self.bound = start | names
        self.run([case.pattern, case.guard])
        return self._branch(self.bound, case.body)
