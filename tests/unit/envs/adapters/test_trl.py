"""Classes and reward functions of TRL, played as TRL's trainer reads them.

`tests/unit/agentenv_bridges/test_trl_classes.py` holds the same against the trainer itself.
"""

import pytest

import agentenv as ae
import scenes
from agentenv.core import Action, Context, TaskError, UsageError
from agentenv.envs import EnvSpec
from agentenv.envs.adapters import ToolMethods, tool_env
from agentenv.envs.rewards import Reward, rescore
from agentenv.testing import check_env, tool_call, tool_call_message


class Counter:
    """A class in the shape of TRL's `environment_factory`."""

    def reset(self, start: int = 0, **kwargs) -> str | None:
        self.total = start
        return f"The counter is at {start}."

    def add(self, amount: int) -> int:
        """Add to the counter.

        Args:
            amount: how much to add.
        """
        self.total += amount
        return self.total

    def get_reward(self) -> float:
        return float(self.total == 10)


class Odd(Counter):
    """Has members of every kind beside its tools."""

    get_reward = None
    shout = str.upper
    Inner = dict

    def __init__(self):
        self.called_by_name = print

    @property
    def size(self) -> int:
        raise AssertionError("nobody reads it")

    @classmethod
    def made(cls) -> str:
        return "made"

    def step(self) -> str:
        """Take a step."""
        return "stepped"

    def rows(self) -> list:
        """List the rows."""
        return [1, None]

    async def fail(self) -> str:
        """Fail."""
        raise ValueError("no luck")

    def _helper(self):
        return "no tool"


def giving(*values):
    """A reward function of TRL that gives one of the values to each environment."""

    def give(environments, **columns):
        return [*values] * len(environments)

    return give


half, nothing = giving(0.5), giving(None)


def names_of(env):
    return [one["function"]["name"] for one in env.tool_schemas]


def called(name, arguments="{}"):
    message = tool_call_message(name)
    message["tool_calls"][0]["function"]["arguments"] = arguments
    return message


async def begun(env, task):
    first = await env.begin(task, seed=0, context=Context())
    return env, first.messages


async def scored(reward, task, *answers, kind=Odd):
    """Play the answers and return the outcome."""
    env, _ = await begun(ToolMethods(kind(), reward), task)
    for answer in answers:
        message = answer if isinstance(answer, dict) else {"role": "assistant", "content": answer}
        await env.advance(Action.of(message))
    return await env.end("final_answer")


async def test_a_class_is_played_and_scores_itself():
    env, first = await begun(ToolMethods(Counter()), {"prompt": "Reach ten. ", "start": 4, "unused": 1})
    result = await env.advance(Action.of(called("add", '{"amount": 6}')))
    await env.advance(Action.of({"role": "assistant", "content": "done"}))
    outcome = await env.end("final_answer")

    assert first[0]["content"] == "Reach ten. The counter is at 4."
    assert names_of(env) == ["add"]
    assert result.tool_results[0].content == "10"
    assert (outcome.reward, outcome.rewards) == (1.0, {"Counter": 1.0})
    record = await episode_of(
        EnvSpec.of("trl/Counter-v0", Counter, tasks=[{"start": 4}]), tool_call("add", amount=6), "done"
    )
    assert record.reward == 1.0

    prompt = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    _, first = await begun(ToolMethods(Counter()), {"prompt": prompt})
    assert [one["content"] for one in first] == ["s", "uThe counter is at 0."]
    assert prompt[1]["content"] == "u"


async def test_what_tools_return_and_raise_is_written_as_trl_writes_it():
    """Also of a tool with the name of a method of ours."""
    env, _ = await begun(ToolMethods(Odd(), half), {})
    names = ("rows", "fail", "step")
    answers = [(await env.advance(Action.of(called(name)))).tool_results[0] for name in names]

    assert names_of(env) == ["add", "fail", "rows", "step"]
    assert [answer.content for answer in answers] == ["[1, None]", "{'error': 'no luck'}", "stepped"]
    assert [answer.is_error for answer in answers] == [False, True, False]
    assert "in fail" in answers[1].detail
    walker = type("Walker", (Odd,), {"get_reward": lambda self: 1.0})
    assert "step" in names_of(EnvSpec.of("trl/W-v0", walker).make())


@pytest.mark.parametrize("entry", [Counter, tool_env(Counter)])
async def test_a_class_is_an_entry_point(entry):
    rows = [{"prompt": "Reach ten.", "start": n} for n in range(5)]
    spec = EnvSpec.of("trl/Counter-v0", entry, tasks=rows)

    report = await check_env(spec, tasks=3, only=("schema", "determinism", "isolation", "gym", "runner"))

    assert report.ok, str(report)


async def episode_of(spec, *turns):
    """Play turns in an environment and return the record."""
    return await scenes.play(spec.make(), turns, spec.task_set()[0], env_id=spec.id)


class Painter:
    """Begins with a picture and answers with pictures."""

    def reset(self, **columns):
        return [{"type": "image", "image": picture()}, {"type": "text", "text": "What colour?"}]

    def look(self) -> object:
        """Look."""
        return picture()

    def compare(self) -> object:
        """Compare."""
        return [{"type": "image", "image": picture()}, {"type": "text", "text": "here"}]

    def get_reward(self) -> float:
        return 1.0


def picture():
    return pytest.importorskip("PIL.Image").new("RGB", (2, 2), "red")


async def test_pictures_and_content_parts_reach_the_model():
    env = ToolMethods(Painter())
    first = await env.begin({"prompt": "See. "}, seed=0, context=Context())
    answers = [(await env.advance(Action.of(called(name)))).tool_results[0] for name in ("look", "compare")]

    shown = [first.messages[0]["content"], *(answer.content for answer in answers)]
    assert [[part["type"] for part in parts] for parts in shown] == [
        ["text", "image_url", "text"],
        ["image_url"],
        ["image_url", "text"],
    ]
    assert first.images


async def test_what_trl_refuses_is_refused_in_words():
    unscored = type("Unscored", (), {"reset": lambda self, **columns: "go"})
    for entry in (unscored, tool_env(Odd)):
        with pytest.raises(UsageError, match=r"trl/None-v0 has no reward.*get_reward"):
            EnvSpec.of("trl/None-v0", entry).make()
    with pytest.raises(UsageError, match="object has no method reset"):
        ToolMethods(object(), half)
    wrong = type("Wrong", (Counter,), {"reset": lambda self, **columns: {"board": 1}})
    with pytest.raises(UsageError, match=r"Wrong\.reset\(\) returned \{'board': 1\}"):
        await begun(ToolMethods(wrong()), {})
    flat = Reward(lambda completions: 1.0, name="flat")
    with pytest.raises(UsageError, match=r"reward 'flat' returned 1\.0 for lists of one episode"):
        await flat.score({"messages": [], "env": None}, {})


async def test_reward_functions_get_columns_by_their_names():
    seen = {}

    def score(answer, state, prompts, completions, environments, **others):
        seen.update(others, answer=answer, state=state, prompts=prompts, completions=completions)
        return [float(environments[0].total)]

    task = {"prompt": "p", "answer": "gold", "state": "CA", "completion": "hidden", "start": 3}
    outcome = await scored(score, task, called("rows"), called("add", "{"), "four")

    assert outcome.reward == 3.0
    assert (seen["answer"], seen["state"], seen["start"]) == (["gold"], ["CA"], [3])
    assert "completion" not in seen
    assert seen["prompts"] == [[{"role": "user", "content": "pThe counter is at 3."}]]
    assert seen["completions"][0][:2] == [
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": {"name": "rows", "arguments": {}}}],
        },
        {"role": "tool", "name": "rows", "content": [1, None]},
    ]
    assert seen["completions"][0][-1] == {"role": "assistant", "content": "four"}


async def test_what_a_reward_function_logs_is_recorded_beside_its_value():
    def score(completions, log_extra, log_metric, trainer_state, **columns):
        log_extra("words", [len(completions[0][-1]["content"].split())])
        log_extra("said", [completions[0][-1]["content"]])
        log_metric("accuracy", 0.5)
        return [1.0 + trainer_state.global_step]

    outcome = await scored(score, {}, "a b c")

    assert outcome.reward == 1.0
    assert outcome.rewards == {"score": 1.0, "score/words": 3.0, "score/accuracy": 0.5}


class Attribute(Odd):
    reward = 0.25


@pytest.mark.parametrize(
    ("rewards", "total", "kind"),
    [
        ((half, nothing), 0.5, Odd),
        ((nothing, half, half), 1.0, Odd),
        ((nothing,), None, Odd),
        (None, 0.25, Attribute),  # which is read where nothing else scores
        (half, 0.5, Attribute),
    ],
)
async def test_none_of_one_function_leaves_the_episode_to_the_others(rewards, total, kind):
    assert (await scored(rewards, {}, "x", kind=kind)).reward == total


def test_a_registered_function_adds_to_those_of_the_factory():
    def wordle(environments, **columns):
        return [0.5 if column == "wordle" else None for column in columns["env"]]

    def catch(answer, **columns):
        return [0.25 if answer == ["gold"] else None]

    rows = (("wordle", ""), ("catch", "gold"), ("none", ""))
    tasks = [{"env": env, "answer": answer} for env, answer in rows]
    spec = EnvSpec.of("trl/Multi-v0", tool_env(Odd, wordle), tasks=tasks, rewards=[Reward(catch)])

    assert [summary.reward for summary in ae.evaluate(spec, "scripted:done").summaries] == [0.5, 0.25, None]


async def test_the_functions_of_trl_get_what_was_sampled():
    seen = {}

    def score(completion_ids, completions, **columns):
        seen.update(ids=completion_ids, completions=completions)
        return [1.0]

    class Plain(ae.ToolEnv):
        def start(self):
            return "Think."

    spec = EnvSpec.of("trl/Think-v0", Plain, rewards=[Reward(score)], tasks=[{}])
    trajectory = await episode_of(spec, "<think>\nhm\n</think>\n\nfour")
    shown = dict(seen)
    again = await rescore(trajectory, [score])

    assert shown["completions"] == [[{"role": "assistant", "content": "<think>\nhm\n</think>\n\nfour"}]]
    assert shown["ids"] == [list(trajectory.sequences[0].token_ids[trajectory.turns[0].start :])]
    assert seen == shown
    assert (trajectory.reward, again.reward) == (1.0, 1.0)


async def test_of_several_classes_the_task_names_one():
    entry = tool_env({"count": Counter, "odd": Odd}, nothing)
    rows = [{"environment": "count", "start": 10}, {"environment": "odd"}, {}]
    spec = EnvSpec.of("trl/Several-v0", entry, tasks=rows)
    made = [spec.make() for _ in range(3)]
    count, odd = [await begun(env, task.data) for env, task in zip(made[:2], spec.task_set(), strict=False)]

    assert [names_of(env) for env, _ in (count, odd)] == [["add"], ["add", "fail", "rows", "step"]]
    assert [(await env.end("final_answer")).reward for env in made[:2]] == [1.0, None]
    with pytest.raises(TaskError, match="one of: count, odd"):
        await begun(made[2], {})
