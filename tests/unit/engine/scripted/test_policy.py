"""Policies by name: the environment's oracle, a function of a file, and random calls."""

import sys

import pytest

from agentenv.core import UsageError, text_of
from agentenv.engine import Sampling, load_engine
from agentenv.envs import EnvSpec, ToolEnv
from agentenv.runner import FunctionUser, UserTurn
from agentenv.runs import rollout
from agentenv.testing import tool_call_message
from agentenv.tools import tool


class Shop(ToolEnv):
    """A shop whose customer names the article only when asked."""

    def start(self, article: str) -> str:
        self.sold = ""
        return "Serve the customer."

    @tool
    def sell(self, article: str) -> str:
        "Sell an article."
        self.sold = article
        return "sold"

    def is_done(self) -> bool:
        return bool(self.sold)

    def reward(self, article: str) -> float:
        return float(self.sold == article)

    @staticmethod
    def oracle(messages, task, rng):
        if messages[-1]["role"] == "assistant" or len(messages) == 1:
            return "What do you want?"
        return tool_call_message("sell", article=text_of(messages[-1]))


def customer(messages, task):
    return UserTurn(task["article"])


SHOP = EnvSpec.of(
    "test/Shop-v0", Shop, tasks=[{"article": name} for name in ("tea", "jam")], user=FunctionUser(customer)
)


def test_the_oracle_plays_with_the_simulated_user():
    played = [each for group in rollout(SHOP, "oracle", num_tasks=2) for each in group]

    assert [each.reward for each in played] == [1.0, 1.0]
    assert [each.stop_reason for each in played] == ["env_done", "env_done"]
    assert all(each.trainable for each in played)


def test_an_environment_without_oracle_is_refused_before_it_is_played():
    class Bare(ToolEnv):
        def start(self) -> str:
            return "?"

    Bare.__module__ = "builtins"
    with pytest.raises(UsageError, match="test/Bare-v0 has no oracle; write a function oracle"):
        rollout(EnvSpec.of("test/Bare-v0", Bare, tasks=[{}]), "oracle")


FILE = """
import agentenv as ae

class Echo(ae.ToolEnv):
    def start(self, word: str) -> str:
        return f"Say {word}."

    def reward(self, answer: str, word: str) -> float:
        return float(answer == word)

def shout(messages, task, rng):
    return task["word"].upper()

ae.register("test/EchoFile-v0", Echo, tasks=[{"word": "A"}, {"word": "b"}])
"""


def test_a_function_of_the_environments_own_file_plays(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    path = tmp_path / "echo_file_policy.py"
    path.write_text(FILE)

    for named in (f"policy:{path}:shout", "policy:echo_file_policy:shout"):
        assert [each.reward for group in rollout(str(path), named, num_tasks=2) for each in group] == [
            1.0,
            0.0,
        ]
    loaded = [module for module in sys.modules.values() if getattr(module, "__file__", "") == str(path)]
    assert len(set(loaded)) == 1


def test_a_file_that_the_program_imported_is_not_run_again(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    path = tmp_path / "echo_file_imported.py"
    path.write_text(FILE.replace("EchoFile", "EchoImported"))
    __import__("echo_file_imported")

    (group,) = rollout(str(path), "policy:echo_file_imported:shout")

    assert [each.reward for each in group] == [1.0]


def test_random_calls_tools_with_valid_arguments_and_depends_on_the_seed():
    first = rollout(SHOP, "random", num_tasks=2, group_size=4, limits={"max_turns": 3})
    again = rollout(SHOP, "random", num_tasks=2, group_size=4, limits={"max_turns": 3})
    said = [[each.messages for each in group] for group in first]

    assert said == [[each.messages for each in group] for group in again]
    assert len({str(messages) for messages in said[0]}) > 1
    results = [
        result for group in first for each in group for turn in each.turns for result in turn.tool_results
    ]
    assert results
    assert not [result.text for result in results if result.is_error and "not run" not in result.text]


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("policy:nowhere.py:f", "there is no file"),
        ("policy:math:pi", "name a function"),
        ("oracle:x", "takes nothing after a colon"),
        ("orakle", "did you mean oracle"),
    ],
)
def test_wrong_names_are_explained(model, message):
    with pytest.raises(UsageError, match=message):
        load_engine(model)


async def test_without_a_runner_there_are_no_messages():
    with pytest.raises(UsageError, match="no runner plays one"):
        await load_engine("random").engine.generate([1], Sampling(), stop_token_ids=(2,))
