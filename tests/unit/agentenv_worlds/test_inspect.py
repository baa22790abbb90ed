"""Tasks of Inspect, played here and by Inspect itself where it is installed (`make test-agents`)."""

import asyncio
import json
import textwrap

import pytest

from agentenv.core import Action, Context, EnvironmentMisuse, UnknownEnvironment, UsageError
from agentenv.envs import spec
from agentenv.testing import check_env

FILE = '''
    from inspect_ai import Task, task
    from inspect_ai.agent import react
    from inspect_ai.dataset import Sample
    from inspect_ai.model import ChatMessageAssistant, ChatMessageSystem, ChatMessageUser
    from inspect_ai.scorer import Score, accuracy, choice, f1, includes, match, mean, pattern, scorer
    from inspect_ai.solver import generate, multiple_choice, prompt_template, system_message, use_tools
    from inspect_ai.solver import solver
    from inspect_ai.tool import ToolError, tool
    from inspect_ai.util import store

    @tool
    def add():
        async def execute(a: int, b: int = 1):
            """Add two numbers.

            Args:
                a: First.
                b: Second.
            """
            store().set("calls", store().get("calls", 0) + 1)
            if a > 100:
                raise ToolError("too large")
            return a + b

        return execute

    @scorer(metrics={"length": [mean()], "calls": [mean()]})
    def parts():
        async def score(state, target):
            return Score(value={"length": len(state.messages), "calls": store().get("calls", 0)})

        return score

    @scorer(metrics=[accuracy()])
    def unscored():
        async def score(state, target):
            return None

        return score

    @solver
    def asks_twice():
        async def solve(state, generate):
            state = await generate(state)
            state.messages.append(ChatMessageUser(content="Are you sure?"))
            return await generate(state)

        return solve

    @solver
    def forgets():
        async def solve(state, generate):
            state = await generate(state)
            state.messages = state.messages[-1:]
            return await generate(state)

        return solve

    SUMS = [Sample(input=f"What is {n} + 1?", target=[str(n + 1), "right"], id=f"s{n}") for n in (1, 2)]
    SHOTS = [
        ChatMessageSystem(content="s"),
        ChatMessageUser(content="0 + 0?"),
        ChatMessageAssistant(content="0"),
        ChatMessageUser(content="1 + 1?"),
    ]

    @task
    def sums(words="Work it out: {prompt}"):
        plan = [system_message("Be brief."), prompt_template(words), use_tools(add()), generate()]
        return Task(dataset=SUMS, solver=plan, scorer=[includes(), parts()])

    @task
    def letters():
        rows = [Sample(input="Which?", choices=["a", "b", "c"], target="B")]
        return Task(dataset=rows, solver=multiple_choice(), scorer=choice())

    @task
    def shots():
        return Task(dataset=[Sample(input=SHOTS, target="2")], scorer=[match(), f1(), unscored()])

    @task
    def twice():
        return Task(dataset=SUMS, setup=system_message("s"), solver=asks_twice(), scorer=pattern(r"(\\d+)"))

    @task
    def rewriting():
        return Task(dataset=SUMS, solver=forgets(), scorer=includes())

    @task
    def agent():
        return Task(dataset=SUMS, solver=react(tools=[add()]), scorer=includes())

    @task
    def boxed():
        return Task(dataset=SUMS, scorer=includes(), sandbox="docker")

    @task
    def plain():
        return Task(dataset=SUMS)
'''

ONE = """
@task
def doubles():
    return Task([Sample(input="2 * 2", target="4")], solver=generate(), scorer=match())
"""


@pytest.fixture
def file(tmp_path):
    pytest.importorskip("inspect_ai", reason="UNTESTED: inspect-ai is not installed")
    path = tmp_path / "tasks_of_inspect.py"
    path.write_text(textwrap.dedent(FILE))
    return path


def call(text="", **arguments):
    function = {"name": "add", "arguments": json.dumps(arguments)}
    calls = [{"id": "c1", "type": "function", "function": function}]
    return {"role": "assistant", "content": text, "tool_calls": calls}


SCRIPTS = [
    ("sums", [call(a=1), "It is 2."]),
    ("sums", [call("Let me see.", a=1, b=5), call(a=200), call(a="x"), "I do not know."]),
    ("sums", ["right"]),
    ("letters", ["ANSWER: B"]),
    ("letters", ["I think ANSWER: C"]),
    ("letters", ["no"]),
    ("shots", ["2"]),
    ("shots", ["two"]),
    ("twice", ["3", "No: 2"]),
    ("twice", ["2", "No: 3"]),
]


def by_inspect(file, task, script):
    """Return the scores and the conversation of the first sample, by Inspect's own evaluation."""
    from inspect_ai import eval as evaluate
    from inspect_ai.model import ModelOutput, get_model
    from inspect_ai.scorer import value_to_float

    from agentenv_worlds.inspect.env import _output

    outputs = [
        _output({"role": "assistant", "content": said} if isinstance(said, str) else said) for said in script
    ]
    model = get_model("mockllm/model", custom_outputs=outputs or [ModelOutput()])
    (log,) = evaluate(
        f"{file}@{task}", model=model, limit=1, display="none", log_dir=str(file.parent / "logs")
    )
    sample = log.samples[0]
    assert sample.error is None, sample.error
    scores = {}
    for name, score in (sample.scores or {}).items():
        if isinstance(score.value, dict):
            scores |= {f"{name}/{part}": float(value) for part, value in score.value.items()}
        else:
            scores[name] = value_to_float()(score.value)
    return scores, [
        (one.role, one.text, (one.error and one.error.message) if one.role == "tool" else None)
        for one in sample.messages
    ]


async def by_us(file, task, script):
    entry = spec(f"inspect:{file}@{task}")
    env = entry.make()
    shown = list((await env.begin(dict(entry.task_set()[0].data), seed=0, context=Context())).messages)
    for said in script:
        step = await env.advance(Action.of(said))
        shown += [
            Action.of(said).to_message(),
            *(one.to_message() for one in step.tool_results),
            *step.messages,
        ]
    assert step.terminated
    outcome = await env.end("env_terminated")
    await env.shutdown()
    return outcome, shown


@pytest.mark.engine
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("task", "script"), SCRIPTS)
async def test_scores_and_conversations_are_those_of_inspect(file, task, script, monkeypatch):
    import inspect_ai.model._model as counted  # it would download a tokenizer to count tokens

    monkeypatch.setattr(counted, "count_text_tokens", len)
    theirs, messages = await asyncio.to_thread(by_inspect, file, task, script)
    outcome, shown = await by_us(file, task, script)

    ours = {name: value for name, value in outcome.rewards.items() if value is not None}
    assert ours == theirs
    assert outcome.reward == next(iter(theirs.values()))
    assert [one["role"] for one in shown] == [role for role, _, _ in messages]
    texts = [one["content"] if isinstance(one["content"], str) else "" for one in shown]
    assert texts == [error or text for _, text, error in messages]


@pytest.mark.engine
@pytest.mark.filterwarnings("ignore")
async def test_the_checker_finds_nothing_wrong(file):
    report = await check_env(
        f"inspect:{file}@sums", tasks=2, only=("schema", "determinism", "isolation", "runner")
    )

    assert report.ok, str(report)


@pytest.mark.engine
@pytest.mark.filterwarnings("ignore")
async def test_what_cannot_be_played_is_refused_in_words(file):
    for name, words in [
        ("boxed", "boxed needs a sandbox of Inspect; play it with `inspect eval`"),
        ("plain", "plain has no scorer"),
        ("sum", "did you mean 'sums'"),
        ("", "names no task.*@letters"),
    ]:
        with pytest.raises((UsageError, UnknownEnvironment), match=words):
            spec(f"inspect:{file}@{name}")
    env = spec(f"inspect:{file}@rewriting").make()
    await env.begin({"id": "s1", "index": 0}, seed=0, context=Context())
    with pytest.raises(EnvironmentMisuse, match="rewrites messages that the model was already shown"):
        await env.advance(Action.of("2"))
    await env.shutdown()


@pytest.mark.engine
@pytest.mark.filterwarnings("ignore")
async def test_an_agent_that_asks_by_itself_is_refused(file):
    env = spec(f"inspect:{file}@agent").make()

    with pytest.raises(EnvironmentMisuse, match=r"the solver fails: .*an ae\.AgentEnv here"):
        await env.begin({"id": "s1", "index": 0}, seed=0, context=Context())
    await env.shutdown()


@pytest.mark.engine
async def test_arguments_reach_the_function_of_the_task(file):
    entry = spec(f"inspect:{file}@sums").with_kwargs({"words": "Say {prompt}"})
    env = entry.make()
    first = await env.begin({"id": "s1", "index": 0}, seed=0, context=Context())
    await env.shutdown()

    assert first.messages[-1]["content"] == "Say What is 1 + 1?"


@pytest.mark.engine
@pytest.mark.filterwarnings("ignore")
def test_a_file_with_tasks_of_inspect_is_named_as_other_files_are(file):
    named = spec(f"{file}:sums")
    only = file.with_name("one.py")
    only.write_text(f"from tasks_of_inspect import Sample, Task, generate, match, task\n{ONE}")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(file.parent))
        first = spec(str(only))

    assert named.kwargs == {"source": f"{file}@sums"}
    assert first.kwargs == {"source": f"{only}@doubles"}
    with pytest.raises(UnknownEnvironment, match=f"the task letters of Inspect.* inspect:{file}@letters"):
        spec(str(file))


def test_a_name_without_a_task_is_refused():
    with pytest.raises(UsageError, match="names no task"):
        spec("inspect:")
