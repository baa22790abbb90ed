"""Our environments as TRL's `environment_factory`: the same rewards as with our runner, and a real step."""

from __future__ import annotations

import asyncio
import inspect
import math
from pathlib import Path
from typing import ClassVar, Literal

import pytest
from transformers.utils import get_json_schema

import agentenv as ae
from agentenv.core import UsageError
from agentenv.envs import EnvSpec, ToolEnv
from agentenv.testing import tool_call
from agentenv.tools import tool
from agentenv_bridges import environment_factory, environment_reward, environment_rows
from scenes import play


class Counter(ToolEnv):
    """Counts to a number and says it."""

    system_prompt = "Count with the tool."
    closed: ClassVar[list[int]] = []

    def start(self, goal: int) -> str:
        self.goal, self.count = goal, 0
        return f"count to {goal}"

    @tool
    def add(self, amount: int, note: str | None = None, how: Literal["up", "down"] = "up") -> int:
        """Add to the count.

        Args:
            amount: how much,
                at least one.
            note: why.
            how: the direction.
        """
        self.count += amount if how == "up" else -amount
        self.add_turn_reward(0.125)
        return self.count

    @tool
    def crash(self) -> str:
        "Fail."
        raise ZeroDivisionError

    def is_done(self) -> bool:
        return self.count > 99

    def reward(self, answer: str) -> float:
        return float(self.count == self.goal) + 0.5 * (str(self.goal) in answer)

    def close(self) -> None:
        self.closed.append(1)


SPEC = EnvSpec.of("test/Counter-v0", Counter, tasks=[{"id": f"t{n}", "goal": n} for n in (2, 3)])


def begun(task: str = "t2"):
    env = environment_factory(SPEC)()
    row = next(row for row in environment_rows(SPEC) if row["task_id"] == task)
    return env, env.reset(**row)


def said(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def test_a_row_has_the_system_prompt_and_reset_the_first_observation():
    _, first = begun("t3")
    head = [{"role": "system", "content": "Count with the tool."}, {"role": "user", "content": ""}]
    found = {name for name, _ in inspect.getmembers(environment_factory(SPEC), inspect.isfunction)}

    assert environment_rows(SPEC, limit=1) == [{"prompt": head, "task_id": "t2"}]
    assert first == "count to 3"
    assert {name for name in found if not name.startswith("_")} == {"reset", "add", "crash"}
    with pytest.raises(UsageError, match="environment_rows"):
        environment_factory(SPEC)().reset(task_id="t2", prompt=head[1:])
    with pytest.raises(UsageError, match="use rollout_func"):  # it answers text
        environment_factory(EnvSpec.of("test/Talk-v0", ae.Env, tasks=[{"id": "t"}]))


def test_transformers_reads_our_schema_from_the_methods():
    schema = get_json_schema(begun()[0].add)["function"]

    assert (schema["name"], schema["description"]) == ("add", "Add to the count.")
    parameters = schema["parameters"]
    assert parameters["required"] == ["amount"]
    assert parameters["properties"]["amount"] == {"type": "integer", "description": "how much, at least one."}
    assert parameters["properties"]["note"]["type"] == "string"
    assert parameters["properties"]["how"]["enum"] == ["up", "down"]


def in_our_runner(script: list[object]) -> float | None:
    task = SPEC.task_set()["t2"]
    return asyncio.run(play(SPEC.make(), script, task, env_id=SPEC.id)).reward


@pytest.mark.parametrize("answer", ["2", "no idea"])
@pytest.mark.parametrize("amounts", [[2], [1, 1], [5], []])
def test_the_reward_is_that_of_our_runner(amounts, answer):
    env, _ = begun()

    for amount in amounts:
        env.add(amount=amount)
    (reward,) = environment_reward(completions=[[said(answer)]], environments=[env])

    assert reward == in_our_runner([*(tool_call("add", amount=amount) for amount in amounts), answer])


def test_what_the_model_is_shown_is_what_our_runner_shows():
    env, _ = begun()
    assert env.add(amount=1) == "1"
    assert "amount" in env.add(amount="many")
    assert "ZeroDivisionError" in env.crash()
    assert environment_reward([[said("2")]], environments=[env]) == [0.5 + 0.125]

    env, _ = begun()
    env.add(amount=2)
    ends_on_a_result = [said(""), {"role": "tool", "content": "2"}]  # which is no answer
    assert environment_reward([ends_on_a_result], environments=[env]) == [1.125]

    env, _ = begun()
    env.add(amount=100)  # ends the episode
    assert env.add(amount=1) == "not run: the environment has finished"
    assert environment_reward([[said("2")]], environments=[env]) == [0.125]


def test_an_object_is_used_again_with_a_fresh_environment():
    env, _ = begun()
    env.add(amount=1)
    closed = len(Counter.closed)

    env.reset(**environment_rows(SPEC)[0])

    assert env.add(amount=1) == "1"
    assert len(Counter.closed) == closed + 1


class Broken(Counter):
    def start(self, goal: int) -> str:
        raise OSError("no disk")


def test_a_failing_environment_costs_its_reward_and_not_the_run(caplog):
    spec = EnvSpec.of("test/Broken-v0", Broken, tasks=[{"id": "t", "goal": 1}])
    env = environment_factory(spec)()

    first = env.reset(**environment_rows(spec)[0])

    assert first == ""
    assert env.add(amount=1) == "not run: the environment has finished"
    assert environment_reward([[said("1")]], environments=[env]) == [None]
    assert "no disk" in caplog.text


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_trl_makes_a_step_on_our_environment_through_its_own_tool_loop(trl_trainer, monkeypatch):
    import trl

    templates = Path(trl.__file__).parent / "chat_templates"
    trainer = trl_trainer(
        environment_rows(SPEC),
        chat_template=(templates / "qwen3.jinja").read_text(),
        settings={
            "per_device_train_batch_size": 4,
            "max_completion_length": 400,
            "max_tool_calling_iterations": 2,
        },
        environment_factory=environment_factory(SPEC),
    )
    encode = trainer.processing_class.encode
    # A model of random weights calls no tool: what it would have said is put in its mouth.
    script = [
        [tool_call("add", amount=1), tool_call("add", amount=2), tool_call("add", amount=3), "hm"],
        ["2 3"] * 3,
    ]
    turns = iter(script)

    def speak(prompt_ids, *args, **kwargs):
        ids = [encode(text + "<|im_end|>", add_special_tokens=False) for text in next(turns)]
        return ids, [[-0.5] * len(one) for one in ids]

    monkeypatch.setattr(trainer, "_generate_single_turn", speak)

    trainer.train()

    logged = trainer.state.log_history[0]
    # Three make a call and name both goals, one of them counted to its own; the fourth does nothing.
    assert logged["reward"] == pytest.approx((3 * (0.125 + 0.5) + 1) / 4)
    assert logged["tools/call_frequency"] == 0.75
    assert math.isfinite(logged["loss"])
    assert logged["grad_norm"] > 0
