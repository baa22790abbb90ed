"""tau2's domains, driven through the package inspect-evals where that is installed."""

import json

import pytest

import agentenv as ae
from agentenv.core import Action, Context, UsageError
from agentenv.engine import TextModel
from agentenv.testing import oracle_of, play, tool_call_message
from agentenv.tools import Toolbox, tool
from agentenv_worlds.tau2.user import CLOSING, ModelTau2User, ScriptedTau2User
from helpers.worlds import begun, told, world
from scenes import Chat

DOMAINS = {"retail": 114, "airline": 50, "telecom": 114, "banking_knowledge": 97}
LARGE = ("retail", "airline")
"""Domains whose databases are large: they are copied and hashed in each episode."""


@tool
def toggle_data() -> str:
    """Switch mobile data."""
    return "Mobile data is on."


async def test_a_user_played_by_a_model_uses_its_tools_and_then_speaks():
    engine = Chat("My data is off.", tool_call_message("toggle_data"), "It is on now.", "Bye. ###STOP###")
    user = ModelTau2User(TextModel(engine), "You are a customer.", Toolbox([toggle_data]), seed=0)

    said = [await user.speak(None), await user.speak("Switch your data on."), await user.speak("Good.")]

    assert said == ["My data is off.", "It is on now.", "Bye. ###STOP###"]
    roles = ["system", "user", "assistant", "user", "assistant", "tool"]
    assert [message["role"] for message in engine.heard[2]] == roles
    assert engine.heard[2][-1]["content"] == "Mobile data is on."
    assert engine.heard[2][3]["content"] == "Switch your data on."
    assert engine.offered == ["toggle_data"]


async def test_a_scripted_user_acts_only_when_the_agent_names_the_action():
    action = {"name": "toggle_data", "arguments": {}, "requestor": "user"}
    task = {
        "user_scenario": {"instructions": {"reason_for_call": "My data is off.", "known_info": None}},
        "evaluation_criteria": {"actions": [action]},
    }
    user = ScriptedTau2User(task, Toolbox([toggle_data]))

    heard = (None, "Hello?", "Please use toggle_data.", "anything else?")

    assert [await user.speak(words) for words in heard] == [
        "My data is off.",
        "Yes, please go ahead.",
        "I have done that. Mobile data is on.",
        "Thank you. ###STOP###",
    ]


@pytest.mark.parametrize(
    ("domain", "every"),
    [
        *(pytest.param(domain, 8 if domain in LARGE else 1, marks=pytest.mark.engine) for domain in DOMAINS),
        *(pytest.param(domain, 1, marks=pytest.mark.exhaustive) for domain in LARGE),
    ],
)
async def test_tau2_accepts_its_ground_truth(domain, every):
    entry = world(f"tau2:{domain}")
    tasks = [task for split in entry.task_set().splits for task in entry.task_set(split)]

    played = [(task.id, await play(entry, oracle_of(entry), task)) for task in tasks[::every]]

    assert len(tasks) == DOMAINS[domain]
    assert [id for id, episode in played if episode.reward != 1.0] == []


@pytest.mark.engine
async def test_an_agent_that_does_half_of_the_work_gets_nothing_and_reads_why():
    entry = world("tau2:telecom")
    env = entry.make()

    played = await play(
        entry, lambda *_: "Is there anything else I can do for you?", entry.task_set()[0], env=env
    )

    assert (played.reward, played.stop_reason) == (0.0, "env_terminated")
    assert "assertion failed" in env.explanation


@pytest.mark.engine
async def test_the_agent_gets_the_policy_and_the_user_gets_the_guidelines_and_the_scenario():
    entry = world("tau2:retail")
    engine = Chat("Hello, I want to cancel an order.", "No. ###STOP###")
    env = entry.make(user=TextModel(engine))

    first = await env.begin(entry.task_set("test")[0].data, seed=0, context=Context())
    last = await env.advance(Action.of("Which one?"))

    system, opening = first.messages
    instructed = engine.heard[0][0]["content"]
    assert "<policy>" in system["content"]
    assert opening["content"] == "Hello, I want to cancel an order."
    assert "# User Simulation Guidelines" in instructed
    assert "<scenario>" in instructed
    assert instructed not in system["content"]
    assert (last.terminated, last.messages) == (True, ())


@pytest.mark.engine
async def test_what_a_tool_of_tau2_does_not_take_is_told_to_the_agent():
    entry = world("tau2:telecom")
    env, _ = await begun(entry, entry.task_set()[0].data)
    assert "nobody" in await told(env, tool_call_message("get_customer_by_id", customer_id="nobody"))
    long = tool_call_message("get_customer_by_id", customer_id="x" * 30_000)
    assert "longer than" in await told(env, long)

    entry = world("tau2:airline")
    env, _ = await begun(entry, entry.task_set()[0].data)
    words = {"user_id": "a", "origin": "JFK", "destination": "SEA", "flight_type": "one_way"}
    rest = {"cabin": "economy", "payment_methods": [], "total_baggages": 0, "nonfree_baggages": 0}
    call = tool_call_message(
        "book_reservation", **words, **rest, insurance="no", flights=[{}], passengers=[{}]
    )
    assert "flight_number" in await told(env, call)


@pytest.mark.engine
@pytest.mark.parametrize("domain", DOMAINS)
def test_arguments_nested_deep_are_answered_and_the_conversation_ends_with_a_score(domain):
    entry = world(f"tau2:{domain}")
    env = ae.make(f"tau2:{domain}")
    env.reset(options={"task": entry.task_set("test")[0].data})

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
    entry = world("tau2:banking_knowledge")
    task = entry.task_set("test")["task_051"]
    (first, _), (second, _) = [await begun(entry, task.data) for _ in range(2)]
    look = tool_call_message("banking_get_user_information_by_id", user_id="5e4c1a83b0")
    change = tool_call_message("banking_change_user_email", user_id="5e4c1a83b0", new_email="new@mail.com")

    await told(first, change)

    assert "new@mail.com" in await told(first, look)
    assert "meimei" in await told(second, look)


@pytest.mark.engine
def test_ways_to_read_the_knowledge_base():
    entry = world("tau2:banking_knowledge")
    greps, none = (
        [one["function"]["name"] for one in entry.make(retrieval=way).tool_schemas]
        for way in ("grep", "no_knowledge")
    )

    assert "banking_grep" in greps
    assert "banking_grep" not in none
    with pytest.raises(UsageError, match="retrieval must be one of"):
        entry.make(retrieval="vectors")
