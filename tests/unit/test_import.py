"""`import agentenv` is cheap, and what it offers is what it says."""

from __future__ import annotations

import subprocess
import sys

import pytest

import agentenv

NOT_FOR_A_FIRST_EVALUATION = (
    *("aiohttp", "openai", "httpx", "torch", "transformers", "pandas", "pyarrow", "rich"),
    *("agentenv.endpoint", "agentenv.runner.agent", "agentenv.training"),
    *("agentenv.workers.crew", "agentenv.workers.episode_worker", "agentenv.workers.local"),
    *("agentenv.workers.recipe", "agentenv.envs.adapters", "agentenv.engine.vllm", "agentenv.engine.hf"),
)
"""What an evaluation without a server, workers, an agent of its own and a terminal has no use for."""
HEAVY = ("torch", "transformers", "vllm", "gymnasium", "numpy", "openai", "pydantic", "aiohttp", "rich")


def test_import_loads_nothing_heavy():
    code = f"import sys, agentenv; print([name for name in {HEAVY!r} if name in sys.modules])"

    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert shown.stdout.strip() == "[]"


def test_a_first_evaluation_loads_only_what_it_uses(tmp_path):
    code = (
        "import sys\n"
        "from agentenv.cli import main\n"
        "sys.argv = ['agentenv', 'eval', 'agentenv/Calculator-v0', '-m', 'mock', '-n', '1', '-k', '1']\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        f"print([name for name in {NOT_FOR_A_FIRST_EVALUATION!r} if name in sys.modules])"
    )

    shown = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path
    )

    assert shown.stdout.splitlines()[-1] == "[]"
    assert list(tmp_path.glob("runs/*/trajectories.jsonl"))


def test_every_public_name_loads():
    for name in agentenv.__all__:
        assert getattr(agentenv, name) is not None, name


def test_public_names_are_sorted_and_equal_what_dir_shows():
    assert list(agentenv.__all__) == sorted(agentenv.__all__) == dir(agentenv)


def test_a_folder_is_there_without_an_import_of_its_own():
    code = (
        "import sys, agentenv as ae\n"
        "assert 'agentenv.testing' not in sys.modules\n"
        "print(ae.testing.tool_call_message('find', title='Dune')['role'], ae.runs.find_run.__name__)"
    )

    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert shown.stdout.split() == ["assistant", "find_run"]


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no_such_name"):
        agentenv.no_such_name


def test_a_public_name_stays_what_it_is_when_its_submodule_is_imported():
    code = (
        "import agentenv.tools.tool, agentenv.envs.registry, agentenv as ae\n"
        "from agentenv import tool\n"
        "print(callable(ae.tool), ae.tool is tool, 'agentenv/Calculator-v0' in ae.registry)"
    )

    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert shown.stdout.split() == ["True", "True", "True"]


def test_train_is_a_function_and_training_the_package_that_defines_it():
    with pytest.raises(TypeError, match=r"agentenv\.training is a package and cannot be called"):
        agentenv.training()  # pyright: ignore[reportCallIssue]
    assert agentenv.train is agentenv.training.train
    assert agentenv.train.__module__ == "agentenv.training.run"
