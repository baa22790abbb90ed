"""Tasks and functions of the Berkeley Function-Calling Leaderboard, read from the package bfcl-eval.

Only data files and the small modules that check answers are used: importing the rest of the package would
need the clients of a dozen model providers, and would make directories beside the package.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Mapping, Sequence
from functools import lru_cache
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from agentenv.core import DependencyMissing, JsonValue, json_lines
from agentenv_worlds.names import check_known

__all__ = [
    "CATEGORIES",
    "MULTI_TURN",
    "ast_checker",
    "check_category",
    "entry_of",
    "language_of",
    "new_module",
    "rows",
    "schema_of",
]

MULTI_TURN = ("multi_turn_base", "multi_turn_miss_func", "multi_turn_miss_param", "multi_turn_long_context")
SINGLE_TURN = (
    "simple_python",
    "simple_java",
    "simple_javascript",
    "multiple",
    "parallel",
    "parallel_multiple",
    "irrelevance",
    "live_simple",
    "live_multiple",
    "live_parallel",
    "live_parallel_multiple",
    "live_irrelevance",
    "live_relevance",
)
CATEGORIES = (*MULTI_TURN, *SINGLE_TURN)

_CHECKERS = "bfcl_eval.eval_checker.multi_turn_eval"
_LANGUAGES = {"simple_java": "Java", "simple_javascript": "JavaScript"}


def check_category(name: str) -> None:
    """Check that a category exists and that its package is installed.

    Raises:
        UnknownEnvironment: There is no such category.
        DependencyMissing: bfcl-eval, or a package that it needs, is not installed.
    """
    check_known("BFCL has no category that can be played here and is named", name, CATEGORIES)
    if find_spec("bfcl_eval") is None or find_spec("mpmath") is None:
        raise DependencyMissing(
            f"bfcl:{name} needs the packages bfcl-eval and mpmath",
            remedy="pip install mpmath && pip install --no-deps bfcl-eval",
        )


def rows(category: str) -> list[dict[str, object]]:
    """Return the tasks of a category."""
    return [{"id": id, "category": category} for id in _entries(category)]


def entry_of(category: str, id: str) -> Mapping[str, Any]:
    """Return a task as the leaderboard has it, with functions and `ground_truth`; do not change it."""
    return _entries(category)[id]


def language_of(category: str) -> str:
    """Return the programming language in which the arguments of a category are written."""
    return _LANGUAGES.get(category, "Python")


def schema_of(function: Mapping[str, Any], category: str) -> dict[str, JsonValue]:
    """Return a function of the leaderboard as a tool in OpenAI's format, as it is shown to models with tools.

    Dots in names become underscores, and each description ends in the leaderboard's hint about the language.
    """
    language = language_of(category)
    hint = "Java 8 SDK" if language == "Java" else "Python 3" if language == "Python" else language
    properties: dict[str, JsonValue] = {}
    for name, entry in function["parameters"]["properties"].items():
        properties[name] = _typed(entry) if language == "Python" else _as_string(entry, language)
    parameters = {**function["parameters"], "type": "object", "properties": properties}
    description = f"{function['description']} Note that the provided function is in {hint} syntax."
    name = str(function["name"]).replace(".", "_")
    shown: dict[str, JsonValue] = {"name": name, "description": description, "parameters": parameters}
    if "response" in function:
        shown["response"] = function["response"]
    return {"type": "function", "function": shown}


def new_module(name: str) -> Any:
    """Execute one of the leaderboard's modules for multi-turn tasks anew, and return the module.

    The module keeps the objects of every episode in its global variables. With a module of its own an episode
    shares none of them with others, and they are freed with it.
    """
    spec = find_spec(f"{_CHECKERS}.{name}")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@lru_cache(maxsize=1)
def ast_checker() -> Any:
    """Return the leaderboard's checker of single-turn answers.

    Its module imports the table of all models, and with it the clients of all providers, only to learn
    whether the model writes an underscore for a dot in names. Ours does, so that table is replaced for the
    import.
    """
    table = "bfcl_eval.constants.model_config"
    replaced = sys.modules.get(table)
    stand_in = ModuleType(table)
    stand_in.__dict__["MODEL_CONFIG_MAPPING"] = {"agentenv": SimpleNamespace(underscore_to_dot=True)}
    sys.modules[table] = stand_in
    try:
        module: Any = importlib.import_module("bfcl_eval.eval_checker.ast_eval.ast_checker")
    finally:
        if replaced is None:
            del sys.modules[table]
        else:
            sys.modules[table] = replaced
    return module


@lru_cache(maxsize=len(CATEGORIES))
def _entries(category: str) -> Mapping[str, dict[str, Any]]:
    """Read a category's tasks by id."""
    folder = _folder()
    file = f"BFCL_v4_{category}.json"
    entries = {entry["id"]: entry for entry in _lines(folder / file)}
    answers = folder / "possible_answer" / file
    for answer in _lines(answers) if answers.exists() else ():
        entries[answer["id"]]["ground_truth"] = answer["ground_truth"]
    if category in MULTI_TURN:
        for entry in entries.values():
            _give_functions(entry)
    return entries


def _give_functions(entry: dict[str, Any]) -> None:
    """Add the documents of the functions to a multi-turn task; those held back go to `missed_function`."""
    files = importlib.import_module("bfcl_eval.constants.executable_backend_config")
    names: Mapping[str, str] = files.MULTI_TURN_FUNC_DOC_FILE_MAPPING
    functions = [function for name in entry["involved_classes"] for function in _documents(names[name])]
    held_back = {
        turn: [function for function in functions if function["name"] in missed]
        for turn, missed in entry.get("missed_function", {}).items()
    }
    hidden = {function["name"] for late in held_back.values() for function in late}
    entry["missed_function"] = held_back
    entry["function"] = [function for function in functions if function["name"] not in hidden]


@lru_cache(maxsize=16)
def _documents(file: str) -> Sequence[dict[str, Any]]:
    return _lines(_folder() / "multi_turn_func_doc" / file)


def _folder() -> Path:
    spec = find_spec("bfcl_eval")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return Path(spec.submodule_search_locations[0]) / "data"


def _lines(path: Path) -> list[dict[str, Any]]:
    return [row for _, row in json_lines(path)]


def _typed(entry: Mapping[str, Any], *, is_item: bool = False) -> dict[str, Any]:
    """Write the types of a schema as JSON Schema has them; items of lists are not said to be floats."""
    names: Mapping[str, str] = importlib.import_module("bfcl_eval.constants.type_mappings").GORILLA_TO_OPENAPI
    kind = entry.get("type")
    typed: dict[str, Any] = {**entry, "type": names.get(str(kind), "string")}
    if kind == "float" and not is_item:
        typed["format"] = "float"
        typed["description"] = f"{entry.get('description', '')} This is a float type value."
    if isinstance(entry.get("properties"), Mapping):
        typed["properties"] = {name: _typed(part) for name, part in entry["properties"].items()}
    if isinstance(entry.get("items"), Mapping):
        typed["items"] = _typed(entry["items"], is_item=True)
    return typed


def _as_string(entry: Mapping[str, Any], language: str) -> dict[str, Any]:
    """Describe an argument of Java or JavaScript, which the model writes as text in that language."""
    kind = entry["type"]
    text = str(entry["description"])
    if kind == "any":
        text += f" This parameter can be of any type of {language} object in string representation."
    else:
        text += f" This is {language} {kind} type parameter in string representation."
    if kind in {"ArrayList", "Array", "array"}:
        of = entry["items"]["type"]
        text += f" The list elements are of type {of}; they are not in string representation."
    if kind == "dict" and "properties" in entry:
        fields = json.dumps(entry["properties"])
        text += (
            " The dictionary entries have the following schema; they are not in string representation. "
            f"{fields}"
        )
    rest = {name: part for name, part in entry.items() if name not in {"items", "properties"}}
    return {**rest, "type": "string", "description": text}
