"""tau2's domains, driven through the package inspect-evals where that is installed."""

import json

import pytest

import agentenv as ae
from agentenv.core import Action, Context, DependencyMissing, UnknownEnvironment, UsageError
from agentenv.engine import ChatCompletion, TextModel, Usage
from agentenv.envs import EnvSpec, spec
from agentenv.testing import check_env, oracle_of, play, tool_call_message
from agentenv.tools import Toolbox, tool
from agentenv_worlds.tau2.user import CLOSING, ModelTau2User, ScriptedTau2User

DOMAINS = {"retail": 114, "airline": 50, "telecom": 114, "banking_knowledge": 97}


def needs_tau2():
    pytest.importorskip("inspect_evals", reason="UNTESTED: inspect-evals is not installed")


class Talker:
    """A chat engine that says its lines, and remembers what it was asked."""

    name = "talker"
    max_context_tokens = None

    def __init__(self, *lines):
        self.lines = list(lines)
        self.asked = []

    async def chat(self, messages, tools, sampling, *, deadline_s=None):
        self.asked.append(
            ([dict(message) for message in messages], [one["function"]["name"] for one in tools])
        )
        line = self.lines.pop(0)
        message = line if isinstance(line, dict) else {"role": "assistant", "content": line}
        return ChatCompletion(message, Usage(1, 1), "stop")

    async def close(self): ...


@tool
def toggle_data() -> str:
    """Switch mobile data."""
    return "Mobile data is on."


def test_the_error_for_a_missing_package_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr("agentenv_worlds.tau2.package.importlib.util.find_spec", lambda name: None)

    with pytest.raises(DependencyMissing, match="pip install --no-deps inspect-evals"):
        spec("tau2:retail")


def test_an_unknown_domain_is_told_with_the_nearest_one():
    with pytest.raises(UnknownEnvironment, match="did you mean 'airline'"):
        spec("tau2:airlin")


async def test_a_user_played_by_a_model_uses_its_tools_and_then_speaks():
    engine = Talker("My data is off.", tool_call_message("toggle_data"), "It is on now.", "Bye. ###STOP###")
    user = ModelTau2User(TextModel(engine), "You are a customer.", Toolbox([toggle_data]), seed=0)

    said = [await user.speak(None), await user.speak("Switch your data on."), await user.speak("Good.")]

    assert said == ["My data is off.", "It is on now.", "Bye. ###STOP###"]
    messages, tools = engine.asked[2]
    assert tools == ["toggle_data"]
    assert [message["role"] for message in messages] == [
        "system",
        "user",
        "assistant",
        "user",
        "assistant",
        "tool",
    ]
    assert messages[-1]["content"] == "Mobile data is on."
    assert messages[3]["content"] == "Switch your data on."


async def test_a_scripted_user_acts_only_when_the_agent_names_the_action():
    action = {"name": "toggle_data", "arguments": {}, "requestor": "user"}
    task = {
        "user_scenario": {"instructions": {"reason_for_call": "My data is off.", "known_info": None}},
        "evaluation_criteria": {"actions": [action]},
    }
    user = ScriptedTau2User(task, Toolbox([toggle_data]))

    said = [
        await user.speak(heard) for heard in (None, "Hello?", "Please use toggle_data.", "anything else?")
    ]

    assert said == [
        "My data is off.",
        "Yes, please go ahead.",
        "I have done that. Mobile data is on.",
        "Thank you. ###STOP###",
    ]


async def refused(domain, every):
    """Return how many tasks a domain has, and which of each `every`-th the ground truth is refused."""
    entry = spec(f"tau2:{domain}")
    tasks = [task for split in entry.task_set().splits for task in entry.task_set(split)]
    played = [(task.id, await play(entry, oracle_of(entry), task)) for task in tasks[::every]]
    return len(tasks), [id for id, episode in played if episode.reward != 1.0]


@pytest.mark.engine
@pytest.mark.parametrize("domain", DOMAINS)
async def test_tau2_accepts_its_ground_truth(domain):
    needs_tau2()
    # The large databases of these two are copied and hashed in each episode.
    every = 8 if domain in {"retail", "airline"} else 1

    assert await refused(domain, every) == (DOMAINS[domain], [])


@pytest.mark.exhaustive
@pytest.mark.parametrize("domain", ["retail", "airline"])
async def test_tau2_accepts_its_ground_truth_on_every_task(domain):
    needs_tau2()

    assert await refused(domain, 1) == (DOMAINS[domain], [])


@pytest.mark.engine
@pytest.mark.parametrize(
    ("domain", "trivial_limit"),
    # Three of the four tasks of airline that are tried here want nothing changed.
    [
        pytest.param("airline", 0.75, marks=pytest.mark.exhaustive),
        ("telecom", None),
        ("banking_knowledge", None),
    ],
)
async def test_the_checker_passes_on_tau2(domain, trivial_limit):
    needs_tau2()
    report = await check_env(f"tau2:{domain}", tasks=2, trivial_limit=trivial_limit, timeout_s=600)

    assert report.ok, str(report)


@pytest.mark.engine
async def test_an_agent_that_does_half_of_the_work_gets_nothing_and_reads_why():
    needs_tau2()
    entry = spec("tau2:telecom")
    env = entry.make()

    def silent(messages, task, rng):
        return "Is there anything else I can do for you?"

    played = await play(entry, silent, entry.task_set()[0], env=env)

    assert (played.reward, played.stop_reason) == (0.0, "env_terminated")
    assert "assertion failed" in env.explanation


@pytest.mark.engine
async def test_the_agent_gets_the_policy_and_the_user_gets_the_guidelines_and_the_scenario():
    needs_tau2()
    engine = Talker("Hello, I want to cancel an order.", "No. ###STOP###")
    entry = spec("tau2:retail")
    task = entry.task_set("test")[0]
    env = entry.make(user=TextModel(engine))

    first = await env.begin(task.data, seed=0, context=Context())
    last = await env.advance(Action.of("Which one?"))

    system, opening = first.messages
    told = engine.asked[0][0][0]["content"]
    assert "<policy>" in system["content"]
    assert opening["content"] == "Hello, I want to cancel an order."
    assert "# User Simulation Guidelines" in told
    assert "<scenario>" in told
    assert told not in system["content"]
    assert (last.terminated, last.messages) == (True, ())


@pytest.mark.engine
async def test_an_error_of_tau2_s_tool_is_told_to_the_agent_and_long_arguments_are_refused():
    needs_tau2()
    entry = spec("tau2:telecom")
    env = entry.make()
    await env.begin(entry.task_set()[0].data, seed=0, context=Context())

    unknown = await env.advance(Action.of(tool_call_message("get_customer_by_id", customer_id="nobody")))
    long = await env.advance(Action.of(tool_call_message("get_customer_by_id", customer_id="x" * 30_000)))

    assert "nobody" in unknown.tool_results[0].content
    assert "longer than" in long.tool_results[0].content


@pytest.mark.engine
async def test_an_argument_that_tau2_cannot_read_is_told_to_the_agent():
    needs_tau2()
    entry = spec("tau2:airline")
    env = entry.make()
    await env.begin(entry.task_set()[0].data, seed=0, context=Context())
    words = {
        "user_id": "a",
        "origin": "JFK",
        "destination": "SEA",
        "flight_type": "one_way",
        "cabin": "economy",
    }
    rest = {"payment_methods": [], "total_baggages": 0, "nonfree_baggages": 0, "insurance": "no"}
    call = tool_call_message("book_reservation", **words, **rest, flights=[{}], passengers=[{}])

    answer = await env.advance(Action.of(call))

    assert answer.tool_results[0].is_error
    assert "flight_number" in answer.tool_results[0].content


@pytest.mark.engine
@pytest.mark.parametrize("domain", DOMAINS)
def test_arguments_nested_deep_are_answered_and_the_conversation_ends_with_a_score(domain):
    needs_tau2()
    env = ae.make(f"tau2:{domain}")
    env.reset(options={"task": spec(f"tau2:{domain}").task_set("test")[0].data})

    for depth in (50, 51, 400, 990):
        for deep in ("[" * depth + "]" * depth, '{"a":' * depth + "1" + "}" * depth):
            for schema in env.unwrapped.tool_schemas:
                function = schema["function"]
                for value in (deep, json.dumps(deep)):  # nested, and a text that is
                    inside = ", ".join(f'"{name}": {value}' for name in function["parameters"]["properties"])
                    said = tool_call_message(function["name"])
                    said["tool_calls"][0]["function"]["arguments"] = f"{{{inside}}}"
                    env.step(said)
    *_, reward, terminated, _, _ = env.step(f"Is there {CLOSING} I can do for you?")

    assert terminated
    assert reward in {0.0, 1.0}
    env.close()


@pytest.mark.engine
async def test_two_episodes_at_once_have_databases_of_their_own():
    needs_tau2()
    entry = spec("tau2:banking_knowledge")
    task = entry.task_set("test")["task_051"]
    first, second = entry.make(), entry.make()
    for env in (first, second):
        await env.begin(task.data, seed=0, context=Context())
    look = Action.of(tool_call_message("banking_get_user_information_by_id", user_id="5e4c1a83b0"))
    change = tool_call_message("banking_change_user_email", user_id="5e4c1a83b0", new_email="new@mail.com")

    await first.advance(Action.of(change))

    assert "new@mail.com" in (await first.advance(look)).tool_results[0].content
    assert "meimei" in (await second.advance(look)).tool_results[0].content


@pytest.mark.engine
def test_ways_to_read_the_knowledge_base():
    needs_tau2()
    entry = spec("tau2:banking_knowledge")
    names = {
        way: [one["function"]["name"] for one in entry.make(retrieval=way).tool_schemas]
        for way in ("grep", "no_knowledge")
    }

    assert "banking_grep" in names["grep"]
    assert "banking_grep" not in names["no_knowledge"]
    with pytest.raises(UsageError, match="retrieval must be one of"):
        entry.make(retrieval="vectors")
    assert len(EnvSpec.from_json(entry.to_json()).task_set("test")) == 97
