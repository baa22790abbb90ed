"""Environments and tools of others, driven through the packages themselves where they are installed."""

import subprocess
import sys
import types

import pytest

from agentenv.core import Action, Context, DependencyMissing, UnknownEnvironment, UsageError
from agentenv.envs import EnvSpec, spec
from agentenv.envs.adapters import ToolMethods, tool_env
from agentenv.envs.rewards import Reward
from agentenv.testing import check_env, oracle_of, play


class Counter:
    """A class in the shape of TRL's `environment_factory`."""

    def __init__(self):
        self.reward = 0.0
        self.total = 0

    def reset(self, start: int = 0, **kwargs) -> str | None:
        self.total = start
        self.reward = 0.0
        return f"The counter is at {start}."

    def add(self, amount: int) -> int:
        """
        Add to the counter.

        Args:
            amount: how much to add.
        """
        self.total += amount
        self.reward = float(self.total == 10)
        return self.total

    def _helper(self):
        return "no tool"


def called(name, arguments):
    function = {"name": name, "arguments": arguments}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c", "type": "function", "function": function}],
    }


async def begun(env, task):
    first = await env.begin(task, seed=0, context=Context())
    return env, first.messages


async def test_a_trl_class_becomes_an_environment():
    env, first = await begun(ToolMethods(Counter()), {"prompt": "Reach ten.", "start": 4, "unused": 1})
    result = await env.advance(Action.of(called("add", '{"amount": 6}')))
    await env.advance(Action.of({"role": "assistant", "content": "done"}))

    assert first[0]["content"] == "Reach ten.\n\nThe counter is at 4."
    assert [one["function"]["name"] for one in env.tool_schemas] == ["add"]
    assert result.tool_results[0].content == "10"
    assert (await env.end("final_answer")).reward == 1.0


async def test_a_trl_prompt_of_messages_is_kept():
    prompt = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    _, first = await begun(ToolMethods(Counter()), {"prompt": prompt})

    assert [m["content"] for m in first] == ["s", "u", "The counter is at 0."]


async def test_a_trl_reward_function_sees_the_object_and_the_task():
    def score(environment, start, answer, **kwargs):
        return environment.total + start + len(answer)

    env, _ = await begun(ToolMethods(Counter(), score), {"prompt": "", "start": 3})
    await env.advance(Action.of({"role": "assistant", "content": "ok"}))

    assert (await env.end("final_answer")).reward == 8.0


async def test_a_trl_class_is_an_entry_point():
    rows = [{"prompt": "Reach ten.", "start": n} for n in range(5)]
    plain = EnvSpec.of("trl/Counter-v0", Counter, tasks=rows)
    wrapped = EnvSpec.of("trl/Counter-v0", tool_env(Counter), tasks=rows)

    for entry in (plain, wrapped):
        report = await check_env(entry, tasks=3, only=("schema", "determinism", "isolation", "gym", "runner"))
        assert report.ok, str(report)


def reached(environments, prompts, completions, start, **columns):
    """A reward function in the shape of TRL's, which scores a batch."""
    assert [len(values) for values in (prompts, completions, start, columns["goal"])] == [1, 1, 1, 1]
    said = [completion[-1]["content"] for completion in completions]
    return [env.total - first + len(text) for env, first, text in zip(environments, start, said, strict=True)]


@pytest.mark.parametrize("registered", [False, True])
async def test_a_batched_reward_of_trl_scores_an_episode(registered):
    entry = tool_env(Counter) if registered else tool_env(Counter, reached)
    rows = [{"prompt": "Reach ten.", "start": 3, "goal": 10}]
    rewards = [reached] if registered else []
    env = EnvSpec.of("trl/Counter-v0", entry, tasks=rows, rewards=rewards).make()

    await env.begin(dict(rows[0]), seed=0, context=Context())
    await env.advance(Action({"role": "assistant", "content": "four"}))
    outcome = await env.end("final_answer")

    assert outcome.reward == 4


async def test_a_batched_reward_that_returns_no_list_is_refused():
    reward = Reward(lambda completions: 1.0, name="flat")

    with pytest.raises(UsageError, match=r"reward 'flat' returned 1\.0 for lists of one episode"):
        await reward.score({"messages": [], "env": None}, {})


def test_what_is_no_environment_is_refused():
    with pytest.raises(UsageError, match=r"not an environment; subclass ae\.Env"):
        EnvSpec.of("x/List-v0", list).make()


@pytest.mark.parametrize(
    ("id", "package"), [("reasoning_gym:countdown", "reasoning_gym"), ("textarena:Wordle-v0", "textarena")]
)
def test_a_peer_that_is_not_installed_says_what_to_install(monkeypatch, id, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(DependencyMissing, match="pip install"):
        spec(id)


@pytest.mark.engine
async def test_reasoning_gym_is_played_and_scored_by_its_verifier():
    pytest.importorskip("reasoning_gym", reason="UNTESTED: reasoning-gym is not installed")
    entry = spec("reasoning_gym:spell_backward")
    task = entry.task_set("test")[0]

    right = await play(entry, oracle_of(entry), task)
    wrong = await play(entry, lambda messages, task, rng: "<answer>x</answer>", task)

    assert right.reward == 1.0
    assert wrong.reward < 0.5
    assert EnvSpec.from_json(entry.to_json()).task_set("test")[0] == task
    with pytest.raises(UnknownEnvironment, match="did you mean 'countdown'"):
        spec("reasoning_gym:countdwn")


@pytest.mark.engine
async def test_the_checker_passes_on_reasoning_gym():
    pytest.importorskip("reasoning_gym", reason="UNTESTED: reasoning-gym is not installed")
    report = await check_env("reasoning_gym:spell_backward", tasks=4)

    assert report.ok, str(report)


@pytest.mark.engine
@pytest.mark.filterwarnings("ignore")
async def test_textarena_is_played_with_seeds_that_hold():
    pytest.importorskip("textarena", reason="UNTESTED: textarena is not installed")
    report = await check_env("textarena:FrozenLake-v0", tasks=4)

    assert report.ok, str(report)


@pytest.mark.engine
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("game", ["TicTacToe-v0", "KuhnPoker-v0", "IteratedPrisonersDilemma-v0"])
async def test_a_textarena_game_for_two_is_played_from_each_seat(game):
    pytest.importorskip("textarena", reason="UNTESTED: textarena is not installed")
    entry = spec(f"textarena:{game}")
    # A single move that a trivial policy happens to play may win a game against chance.
    report = await check_env(entry, tasks=4, trivial_limit=1.0)

    assert report.ok, str(report)
    assert [task.data["seat"] for task in entry.task_set("test").take(3)] == [
        "player-0",
        "player-1",
        "player-0",
    ]
    assert EnvSpec.from_json(entry.to_json()).task_set("test")[1] == entry.task_set("test")[1]


@pytest.mark.engine
@pytest.mark.filterwarnings("ignore")
async def test_the_opponent_of_a_textarena_game_moves_first_if_it_has_the_first_seat():
    pytest.importorskip("textarena", reason="UNTESTED: textarena is not installed")
    env = spec("textarena:TicTacToe-v0").make(opponents=lambda move: move.choices[0])

    first = await env.begin({"seed": 1, "seat": "player-1"}, seed=0, context=Context())
    rewards = []
    for move in ("[3]", "[4]"):
        step = await env.advance(Action.of(move))
        rewards.append((step.terminated, step.reward))

    assert "You are Player 1" in first.messages[-1]["content"]
    assert "Player 0: [0]" in first.messages[-1]["content"]
    assert rewards == [(False, 0.0), (True, -1.0)]  # the opponent plays 0, 1 and 2
    assert step.info["seat_rewards"] == {"player-0": 1.0, "player-1": -1.0}


@pytest.mark.engine
@pytest.mark.filterwarnings("ignore")
def test_a_textarena_game_that_cannot_start_is_refused():
    pytest.importorskip("textarena", reason="UNTESTED: textarena is not installed")
    with pytest.raises(UsageError, match="cannot be played"):
        spec("textarena:Chess-v0")
    with pytest.raises(UnknownEnvironment, match="no game"):
        spec("textarena:Nothing-v9")


def test_a_textarena_game_that_cannot_start_is_told_before_any_episode(monkeypatch):
    class Game:
        def reset(self, **arguments):
            raise AssertionError("this game needs 2 players")

    registration = types.ModuleType("textarena.envs.registration")
    registration.ENV_REGISTRY = {"Duel-v0": None}
    package = types.ModuleType("textarena")
    package.make = lambda game: Game()
    for name, module in [
        ("textarena", package),
        ("textarena.envs", types.ModuleType("textarena.envs")),
        ("textarena.envs.registration", registration),
    ]:
        monkeypatch.setitem(sys.modules, name, module)

    with pytest.raises(UsageError, match=r"textarena:Duel-v0 cannot be played: .* needs 2 players"):
        spec("textarena:Duel-v0")


SERVER = """
from mcp.server.mcpserver import MCPServer

server = MCPServer("sums")

@server.tool()
def add(a: int, b: int) -> int:
    "Add two numbers."
    return a + b

@server.tool()
def fail() -> str:
    "Fail."
    raise ValueError("broken")

if __name__ == "__main__":
    server.run()
"""


@pytest.mark.engine
async def test_tools_of_an_mcp_server_are_tools(tmp_path):
    pytest.importorskip("mcp.server.mcpserver", reason="UNTESTED: mcp 2 is not installed")
    from agentenv.envs.adapters import mcp_tools

    path = tmp_path / "server.py"
    path.write_text(SERVER)
    async with mcp_tools([sys.executable, str(path)], only=["add", "fail"]) as tools:
        add, fail = tools
        good = await add.call('{"a": 1, "b": 2}')
        bad = await add.call('{"a": "x"}')
        broken = await fail.call("{}")

    assert add.schema()["function"]["description"] == "Add two numbers."
    assert (good.content, good.is_error) == ("3", False)
    assert bad.is_error
    assert broken.is_error
    with pytest.raises(UsageError, match=r"no tool 'nope'.*add"):
        async with mcp_tools([sys.executable, str(path)], only=["nope"]):
            pass


LIAR = """
import json, sys
for line in sys.stdin:
    if sys.argv[1] == "silent":
        continue
    asked = json.loads(line)
    tool = {"name": "a", "inputSchema": 5 if sys.argv[1] == "schema" else {"type": "object"}}
    answers = {
        "initialize": lambda: {"protocolVersion": asked["params"]["protocolVersion"],
                               "capabilities": {"tools": {}}, "serverInfo": {"name": "x", "version": "1"}},
        "tools/list": lambda: {"tools": [tool]} | ({"nextCursor": "again"} if sys.argv[1] == "endless" else {}),
        "tools/call": lambda: {"content": [{"type": "strange"}]},
    }
    if (answer := answers.get(asked.get("method"))) is not None:
        print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": answer()}), flush=True)
    elif "id" in asked:
        error = {"code": -32601, "message": "Method not found"}
        print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "error": error}), flush=True)
"""


@pytest.mark.engine
async def test_what_an_mcp_server_lies_about_is_told_in_words(tmp_path):
    pytest.importorskip("mcp.server.mcpserver", reason="UNTESTED: mcp 2 is not installed")
    from agentenv.envs.adapters import mcp_tools

    path = tmp_path / "liar.py"
    path.write_text(LIAR)
    with pytest.raises(UsageError, match=r"cannot be reached: .*no-such-program"):
        async with mcp_tools(["no-such-program"], timeout_s=30.0):
            pass
    with pytest.raises(UsageError, match="did not answer within 1 s"):
        async with mcp_tools([sys.executable, str(path), "silent"], timeout_s=1.0):
            pass
    with pytest.raises(UsageError, match=r"more than 10,000 tools|did not list its tools within"):
        async with mcp_tools([sys.executable, str(path), "endless"], timeout_s=1.0):
            pass
    with pytest.raises(UsageError, match="list of tools cannot be read"):
        async with mcp_tools([sys.executable, str(path), "schema"], timeout_s=30.0):
            pass
    async with mcp_tools([sys.executable, str(path), "content"], timeout_s=30.0) as tools:
        answer = await tools[0].call("{}")

    assert answer.is_error


def test_adapters_import_no_peer():
    code = (
        "import sys, agentenv_worlds.reasoning_gym.env, agentenv_worlds.textarena.env, agentenv.envs.adapters.mcp, agentenv.envs.adapters.trl;"
        "print({'reasoning_gym', 'textarena', 'mcp', 'trl', 'torch'} & set(sys.modules))"
    )
    shown = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)

    assert shown.stdout.strip() == "set()"
