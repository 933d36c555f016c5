"""Plain English in the package: first lines of modules, and words that slow a reader down."""

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "nbelastic"
LONGEST = 80
CLAUSE = re.compile(r"(Who|What|Where|Whether|How|Which)\b")
WORDS = re.compile(r"\b(whom|nobody|somebody|whoever|beside|hung\s+up)\b", re.IGNORECASE)

ROOMS = sorted({str(path.parent.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py")})


def texts(source):
    """Yield the line and the text of each comment, docstring and other string."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value


def faults(source):
    """Yield the line and the fault of each place in a module that breaks a rule."""
    first = (ast.get_docstring(ast.parse(source)) or "").partition("\n")[0]
    if len(first) > LONGEST:
        yield 1, f"first line of {len(first)} characters; {LONGEST} at most"
    if CLAUSE.match(first):
        yield 1, f"first line begins with {first.split()[0]!r}; begin with a noun or a verb"
    for line, text in texts(source):
        for word in WORDS.finditer(text):
            yield line + text.count("\n", 0, word.start()), f"{word.group()!r}"


def found_in(room):
    return [
        f"{path.relative_to(PACKAGE)}:{line}: {fault}"
        for path in sorted((PACKAGE / room).glob("*.py*"))
        if path.suffix in (".py", ".pyi")
        for line, fault in faults(path.read_text(encoding="utf-8"))
    ]


@pytest.mark.parametrize("room", ROOMS)
def test_docstrings_comments_and_messages_are_plain(room):
    found = found_in(room)
    assert not found, "\n" + "\n".join(found)


CHAIN = re.compile(r"\b(which|that|what|who|one|those|it|them|others|there|such)\b", re.IGNORECASE)
MOST_CHAINED = 0.03  # share of a room's docstrings whose first line may have two of these words


def first_lines(source):
    """Yield the first line of each docstring in a module."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, kinds) and (text := ast.get_docstring(node)):
            yield text.partition("\n")[0]


@pytest.mark.parametrize("room", ROOMS)
def test_first_lines_name_their_things(room):
    """Nouns, not chains of pronouns: "the plan of the last commit", not "what it was that…"."""
    sources = [each.read_text(encoding="utf-8") for each in (PACKAGE / room).glob("*.py")]
    lines = [line for source in sources for line in first_lines(source)]
    chained = [line for line in lines if len(CHAIN.findall(line)) >= 2]
    assert len(chained) <= MOST_CHAINED * len(lines), "\n".join(chained)
