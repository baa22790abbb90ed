"""Import a library with a change, compiling only the statement that was changed.

A file is compiled statement by statement, so that a change costs the compilation of one function and not of
thousands of lines. What is imported is the same as from the whole changed file.
"""

from __future__ import annotations
import __future__

import ast
import importlib
import importlib.abc
import importlib.util
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType, ModuleType

from agentenv_envs.mini_swe.changes import Change, changed
from agentenv_envs.mini_swe.libraries import module_of

__all__ = ["Pieces"]


class Pieces(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """The compiled statements of a library's files, which it can be imported from."""

    def __init__(self, sources: Mapping[str, str], folder: Path) -> None:
        self._sources = sources
        self._folder = folder
        self._paths = {module_of(path): path for path in sources}
        self._compiled: dict[str, list[CodeType]] = {}
        self._spans: dict[str, list[tuple[int, int]]] = {}
        """First and last line of each statement, by path."""

    def changed(self, path: str, change: Change) -> Pieces:
        """Return the same library with a change of one file.

        Raises:
            SyntaxError: The changed statement does not compile.
        """
        mutant = Pieces(self._sources, self._folder)
        mutant._spans, mutant._compiled = self._spans, dict(self._compiled)
        pieces = list(self._pieces(path))
        spans = self._spans[path]
        number = next(n for n, (_, last) in enumerate(spans) if change.line <= last)
        first, last = spans[number]
        lines = changed(self._sources[path], change).split("\n")
        text = "\n" * (first - 1) + "\n".join(lines[first - 1 : last])
        pieces[number] = self._compile(path, ast.parse(text).body)
        mutant._compiled[path] = pieces
        return mutant

    def load(self, module: str) -> ModuleType:
        """Import a module of the library; all of its modules come from here then."""
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)
        return importlib.import_module(module)

    def warm_up(self, module: str) -> None:
        """Import a module and forget the library again; what it needs of others stays imported for forks."""
        try:
            self.load(module)
        finally:
            sys.meta_path.remove(self)
            for own in self._paths:
                sys.modules.pop(own, None)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return where a module of the library comes from; None for modules of others."""
        if fullname not in self._paths:
            return None
        file = self._folder / self._paths[fullname]
        where = [str(file.parent)] if file.name == "__init__.py" else None
        return importlib.util.spec_from_file_location(
            fullname, file, loader=self, submodule_search_locations=where
        )

    def exec_module(self, module: ModuleType) -> None:
        """Run the statements of a module."""
        for code in self._pieces(self._paths[module.__name__]):
            exec(code, vars(module))  # noqa: S102 - of the library that is being indexed

    def _pieces(self, path: str) -> list[CodeType]:
        if path not in self._compiled:
            statements = ast.parse(self._sources[path]).body
            self._spans[path] = [_span(statement) for statement in statements]
            self._compiled[path] = [self._compile(path, [statement]) for statement in statements]
        return self._compiled[path]

    def _compile(self, path: str, statements: list[ast.stmt]) -> CodeType:
        flags = 0
        for name in __future__.all_feature_names:
            if f"import {name}" in self._sources[path]:
                flags |= getattr(__future__, name).compiler_flag
        tree = ast.Module(statements, [])
        return compile(tree, str(self._folder / path), "exec", flags=flags, dont_inherit=True)


def _span(statement: ast.stmt) -> tuple[int, int]:
    """Return the first line, with decorators, and the last one of a statement."""
    decorators: list[ast.expr] = getattr(statement, "decorator_list", [])
    return min([statement.lineno, *(node.lineno for node in decorators)]), statement.end_lineno or 0
