"""Fields of a task become what `start` and `reward` declare, or are refused by name.

What is exact follows pydantic's table of conversions; nulls follow JSON data sets, in which a column that a
row lacks is null.
"""

import re
import sys
from collections.abc import Iterable
from typing import Any, Literal

import numpy as np
import pytest
from pydantic import BaseModel

import agentenv as ae
from agentenv.core import Context, TaskError, UsageError
from agentenv.envs import AgentEnv, EnvSpec, ToolEnv
from agentenv.envs.declared import as_declared
from agentenv.envs.rewards import rescore
from agentenv.testing import play

if sys.flags.ignore_environment < 0:  # never true: the name stays unknown when the program runs
    from nowhere import Unknown


class Order(BaseModel):
    price: int


class Odd:
    """A class that pydantic cannot check."""


ODD = Odd()


def start(
    whole: int,
    number: float,
    yes: bool,
    text: str,
    maybe: int | None,
    words: list[str],
    many: Iterable[str],
    pairs: dict[str, int],
    choice: Literal["a", "b"],
    order: Order,
    odd: Odd,
    anything: Any,
    bare,
    unknown: "Unknown",
    level: int = 3,
    label: str = "none",
    plain="p",
    **rest: int,
): ...


@pytest.mark.parametrize(
    ("field", "given", "wanted"),
    [
        ("whole", "12", 12),
        ("whole", 12.0, 12),
        ("whole", "-7", -7),
        ("number", "1.5", 1.5),
        ("number", 2, 2.0),
        ("yes", "true", True),
        ("yes", "0", False),
        ("text", 12, "12"),
        ("text", "", ""),
        ("text", " 7 ", " 7 "),
        ("maybe", "", None),
        ("maybe", None, None),
        ("maybe", "4", 4),
        ("words", '["a", "b"]', ["a", "b"]),
        ("words", ("a",), ["a"]),
        ("many", ["a"], ["a"]),
        ("pairs", '{"a": 1}', {"a": 1}),
        ("choice", "a", "a"),
        ("order", {"price": "5"}, Order(price=5)),
        ("order", '{"price": 5}', Order(price=5)),
        ("odd", ODD, ODD),
        ("anything", "12", "12"),
        ("bare", "12", "12"),
        ("bare", None, None),
        ("unknown", "12", "12"),
        ("level", None, 3),
        ("level", "", 3),
        ("level", "5", 5),
        ("label", None, "none"),
        ("label", "", ""),
        ("plain", None, "p"),
        ("more", "12", "12"),
    ],
)
def test_a_value_becomes_what_is_declared(field, given, wanted):
    value = as_declared({field: given}, [start], where="task 1")[field]

    assert value == wanted
    assert type(value) is type(wanted)


@pytest.mark.parametrize(
    ("field", "given"),
    [
        *(("whole", given) for given in ("twelve", 1.5, "1.5", None, "", np.zeros(3))),
        ("number", "1,5"),
        ("yes", "perhaps"),
        *(("text", given) for given in (None, True, ["a"])),
        ("words", "a, b"),
        ("pairs", '{"a": "x"}'),
        ("choice", "c"),
        ("order", "5"),
        ("level", "x"),
    ],
    ids=str,
)
def test_a_value_of_another_type_is_refused_by_name(field, given):
    with pytest.raises(TaskError, match=rf"(?s)task 1: the field '{field}' is .* but start\(\) declares"):
        as_declared({field: given}, [start], where="task 1")


class Adder(ToolEnv):
    """Adds the numbers of a table, which has text in its cells."""

    def start(self, x: int, y: int):
        assert self.task["x"] == x
        return f"What is {x} + {y}?"

    def reward(self, answer: str, total: int) -> float:
        return float(answer == f"It is {total}.")


TABLE = "x,y,total,answer\n1,2,3,3\n"


async def scored(kind, tasks):
    env = kind()
    await env.begin(ae.TaskSet.of(tasks)[0].data, seed=0, context=Context())
    return env, await env.end("final_answer")


async def test_the_cells_of_a_table_are_numbers_where_numbers_are_declared(tmp_path):
    (tmp_path / "sums.csv").write_text(TABLE)

    class Strict(Adder):
        def start(self, x: int, y: int, answer):
            assert answer == "3"  # the reward's `answer` is the model's, so its annotation says nothing here
            return super().start(x, y)

        def reward(self, answer: str, total: int) -> float:
            return float(total == 3 and self.task["answer"] == "3")

    env, outcome = await scored(Strict, tmp_path / "sums.csv")

    assert env.context.task == {"x": 1, "y": 2, "total": 3, "answer": "3"}
    assert outcome.reward == 1.0


def test_a_column_that_is_no_number_is_one_kind_of_failure_and_ends_the_run(tmp_path):
    (tmp_path / "sums.csv").write_text("x,y,total\n" + "".join(f"{word},2,3\n" for word in "abcdefgh"))
    ae.register("test/CsvAdder-v0", Adder, tasks=str(tmp_path / "sums.csv"), override=True)

    result = ae.evaluate("test/CsvAdder-v0", model="scripted:It is 3.", runner={"concurrency": 1})

    assert [failure.count for failure in result.report.errors] == [3]
    assert re.search(r"\(row \d of the data\): the field 'x' is '[abc]'", result.report.errors[0].error)


async def test_an_agents_parameters_are_filled_by_name_and_declare_fields():
    class Solver(AgentEnv):
        def start(self, level: int):
            assert level == 2

        async def agent(self, url, x: int):
            return f"{url} {x + 1}"

        def reward(self, answer, limit: float):
            return limit * (answer == "http://127.0.0.1:1 3")

    class Wrong(AgentEnv):
        async def agent(self, url, taks):
            return ""

    env, wrong = Solver(), Wrong()
    await env.begin({"x": "2", "level": "2", "limit": "0.5"}, seed=0, context=Context())
    await env.run_agent("http://127.0.0.1:1")
    outcome = await env.end("final_answer")
    await env.shutdown()
    await wrong.begin({"x": 2}, seed=0, context=Context())
    with pytest.raises(UsageError, match=r"'taks' of .*Wrong.agent.* is not available") as caught:
        await wrong.run_agent("http://127.0.0.1:1")
    await wrong.shutdown()

    assert outcome.reward == 0.5
    assert caught.value.remedy == "did you mean 'task'? available: task, url, x"


def total(answer, x, y):
    return float(answer == str(x + y))


async def test_oracles_and_later_rewards_get_the_fields_that_start_declares(tmp_path):
    (tmp_path / "sums.csv").write_text("x,y\n1,2\n30,4\n")

    class Table(ToolEnv):
        def start(self, x: int, y: int):
            self.task.clear()  # an author may do with the task as he likes
            return f"What is {x} + {y}?"

        def reward(self, answer):
            return 0.0

        @staticmethod
        def oracle(messages, task, rng):
            return str(task["x"] + task["y"])

    async def score(trajectory, env, task):
        return total(trajectory.answer, **task), {}

    entry = EnvSpec.of("test/Table-v0", Table, tasks=tmp_path / "sums.csv")
    result = ae.evaluate(entry, "oracle", runner={"score": score})
    ((first,), _) = result.groups

    assert result.report.reward.mean == 1.0
    assert (await rescore(first, [total])).reward == 1.0
    assert (await play(entry, Table.oracle, entry.task_set()[0])).messages[-1]["content"] == "3"
