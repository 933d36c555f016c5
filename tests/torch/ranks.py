"""Tests that are programs of ranks."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from tests.collectives.worlds import MAKERS
from tests.support.world import StaticContext, run_ranks


def on_ranks(
    *sizes: int,
    kinds: Iterable[Any] = ("auto",),
    of: Callable[[StaticContext], Any] = lambda it: it,
) -> Callable[[Any], Any]:
    """Make a program of ranks a test, over worlds of these sizes and kinds of communicators.

    The program's first parameter is a rank's context, or `of` it; the others are fixtures. What it
    returns must be equal on all ranks.
    """

    def decorate(program: Callable[..., Any]) -> Callable[..., Any]:
        @pytest.mark.parametrize("kind", kinds)
        @pytest.mark.parametrize("size", sizes)
        @functools.wraps(program)
        def test(size: int, kind: str, **given: Any) -> None:
            results = run_ranks(
                size, lambda context: program(of(context), **given), make=MAKERS[kind]
            )
            assert all(each == results[0] for each in results)

        _context, *fixtures = inspect.signature(program).parameters.values()
        size_and_kind = [*inspect.signature(test, follow_wrapped=False).parameters.values()][:2]
        test.__signature__ = inspect.Signature([*size_and_kind, *fixtures])  # type: ignore
        return test

    return decorate
