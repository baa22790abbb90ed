"""The hidden tests: the examples in the docstrings of a file, and variations of them.

A session is the examples of one docstring, which run one after the other with the same names. Variation 0 is
the docstring's own. The others change the values in the examples, so that there are tests whose inputs are
written nowhere. What a session shall show is recorded from the published file.
"""

from __future__ import annotations

import ast
import doctest
from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["Session", "sessions_of"]

_PARSER = doctest.DocTestParser()


@dataclass(frozen=True, slots=True)
class Session:
    """Examples that run one after the other."""

    name: str
    """`DOCSTRING.VARIATION`: the number of the docstring in its file, and that of the variation."""
    examples: tuple[str, ...]
    """Source texts of the examples."""


def sessions_of(source: str) -> Iterator[Session]:
    """Yield the sessions of a file."""
    for number, docstring in enumerate(_docstrings(ast.parse(source))):
        try:
            examples = tuple(example.source for example in _PARSER.get_examples(docstring))
        except ValueError:  # a docstring whose examples are badly indented
            continue
        seen: set[tuple[str, ...]] = set()
        for variation, vary in enumerate((None, _More, _Shorter, _Reversed)):
            varied = examples if vary is None else tuple(_varied(example, vary()) for example in examples)
            if varied and varied not in seen:
                seen.add(varied)
                yield Session(f"{number}.{variation}", varied)


def _docstrings(tree: ast.Module) -> Iterator[str]:
    """Yield the docstrings that have examples; the order is that of the tree, level by level."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = ast.get_docstring(node, clean=False)
            if docstring is not None and ">>>" in docstring:
                yield docstring.expandtabs()


def _varied(example: str, vary: ast.NodeTransformer) -> str:
    try:
        tree = ast.parse(example)
    except SyntaxError:
        return example
    return ast.unparse(ast.fix_missing_locations(vary.visit(tree))) + "\n"


class _More(ast.NodeTransformer):
    """Whole numbers are one larger."""

    def visit_Constant(self, node: ast.Constant) -> ast.expr:
        """Return the varied constant."""
        if type(node.value) is not int:
            return node
        return ast.Constant(node.value + 1)


class _Shorter(ast.NodeTransformer):
    """Lists and texts lack their last part."""

    def visit_List(self, node: ast.List) -> ast.expr:
        """Return the varied list."""
        self.generic_visit(node)
        return ast.List(node.elts[:-1], node.ctx) if isinstance(node.ctx, ast.Load) else node

    def visit_Tuple(self, node: ast.Tuple) -> ast.expr:
        """Return the varied tuple."""
        self.generic_visit(node)
        return ast.Tuple(node.elts[:-1], node.ctx) if isinstance(node.ctx, ast.Load) else node

    def visit_Constant(self, node: ast.Constant) -> ast.expr:
        """Return the varied text."""
        return ast.Constant(node.value[:-1]) if isinstance(node.value, str | bytes) else node

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.expr:
        """Return the formatted text as it is."""
        return node


class _Reversed(ast.NodeTransformer):
    """Lists and texts are turned round."""

    def visit_List(self, node: ast.List) -> ast.expr:
        """Return the varied list."""
        self.generic_visit(node)
        return ast.List(node.elts[::-1], node.ctx) if isinstance(node.ctx, ast.Load) else node

    def visit_Tuple(self, node: ast.Tuple) -> ast.expr:
        """Return the varied tuple."""
        self.generic_visit(node)
        return ast.Tuple(node.elts[::-1], node.ctx) if isinstance(node.ctx, ast.Load) else node

    def visit_Constant(self, node: ast.Constant) -> ast.expr:
        """Return the varied text."""
        return ast.Constant(node.value[::-1]) if isinstance(node.value, str | bytes) else node

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.expr:
        """Return the formatted text as it is."""
        return node
