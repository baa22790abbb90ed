"""A user played by a model: what it sees, how it ends a conversation, and what its errors do."""

from __future__ import annotations

import pytest

from agentenv.core import EngineUnavailable, UsageError
from agentenv.engine import ScriptedEngine, ScriptedTurn
from agentenv.runner import ModelUser, UserTurn
from agentenv.testing import tool_call
from agentenv.tools import tool
from scenes import RENDERER, TOKENIZER, Chat, Go, play


class Shop(Go):
    """Sells one thing and is told what the customer wants by a user."""

    ends_on_text = False

    def start(self, wish: str) -> str:
        return "You sell fruit."

    @tool
    def stock(self) -> str:
        "Say what is in stock."
        return "apples"


def played_by(*turns, **options) -> tuple[ModelUser, ScriptedEngine]:
    engine = ScriptedEngine(list(turns), tokenizer=TOKENIZER)
    return ModelUser(engine, "You want {wish}.", renderer=RENDERER, **options), engine


async def sell(user: ModelUser, *script: str):
    return await play(Shop(), script, {"wish": "apples"}, user=user)


async def test_the_model_sees_the_conversation_with_the_roles_turned_round_and_no_tools():
    user, engine = played_by("Apples, please.", "Thanks. ###STOP###")
    record = await sell(user, "What do you want?", tool_call("stock"), "Here they are.")

    turned = [
        {"role": "system", "content": "You want apples."},
        {"role": "assistant", "content": "You sell fruit."},
        {"role": "user", "content": "What do you want?"},
        {"role": "assistant", "content": "Apples, please."},
        {"role": "user", "content": "Here they are."},
    ]
    assert record.stop_reason == "user_done"
    prompts = [RENDERER.decode(RENDERER.start(turned[:count])) for count in (3, 5)]
    assert [request.prompt_text for request in engine.requests] == prompts


async def test_the_end_marker_ends_the_conversation_and_is_not_said():
    user, _ = played_by("Thanks. ###STOP###", "###STOP###")
    await user.start({}, seed=0)

    last_words = await user.respond([{"role": "assistant", "content": "Here."}])
    silence = await user.respond([{"role": "assistant", "content": "Here."}])

    assert last_words == UserTurn("Thanks.", done=True)
    assert silence == UserTurn(None, done=True)


async def test_a_user_that_opens_speaks_before_the_policy():
    user, engine = played_by("Hello!", "###STOP###", opens=True)

    record = await sell(user, "Hello, what do you want?")

    assert [message["content"] for message in record.messages[:2]] == ["You sell fruit.", "Hello!"]
    assert "(The assistant waits for you to speak.)" in engine.requests[0].prompt_text


async def test_the_same_seed_draws_the_same_words_and_each_turn_has_a_seed_of_its_own():
    user, engine = played_by("a", "b", "c", "d")

    for _ in range(2):
        await user.start({}, seed=5)
        await user.respond([])
        await user.respond([])

    first, second, again, once_more = (request.sampling.seed for request in engine.requests)
    assert first != second
    assert (first, second) == (again, once_more)


async def test_episodes_do_not_share_a_user():
    user, _ = played_by()

    one = user.fresh()
    await one.start({"wish": "pears"}, seed=1)

    assert vars(user)["_instructions"] == "You want {wish}."


async def test_a_chat_engine_plays_a_user_too():
    user = ModelUser(Chat("Apples."), "Buy.")
    await user.start({}, seed=0)

    assert await user.respond([{"role": "assistant", "content": "Yes?"}]) == "Apples."


@pytest.mark.parametrize(
    "fault", [ScriptedTurn(error=EngineUnavailable("down")), ScriptedTurn(text="A", finish_reason="abort")]
)
async def test_an_engine_that_fails_aborts_the_episode_and_scores_nothing(fault: ScriptedTurn):
    user, _ = played_by(fault)

    record = await sell(user, "What do you want?")

    assert (record.stop_reason, record.reward, record.trainable) == ("aborted", None, False)


async def test_a_user_calls_its_own_tools_before_it_speaks_and_remembers_them():
    looked = []

    def look(place: str) -> str:
        "Look into a place."
        looked.append(place)
        return f"the {place} is empty"

    fridge, broken = tool_call("look", place="fridge"), "<tool_call>\n{oops\n</tool_call>"
    user, engine = played_by(fridge, broken, "My fridge is empty.", "Bye. ###STOP###", tools=[look])

    record = await sell(user, "What do you want?", "Why?")

    assert looked == ["fridge"]
    said = [message["content"] for message in record.messages if message["role"] == "user"]
    assert said == ["You sell fruit.", "My fridge is empty.", "Bye."]
    assert all("the fridge is empty" in request.prompt_text for request in engine.requests[1:])
    assert "the fridge is empty" not in str(record.messages)
    last = engine.requests[3].prompt_text
    assert last.index("the fridge is empty") < last.index("My fridge is empty.") < last.index("Why?")


async def test_a_user_that_only_calls_tools_has_to_speak():
    def nothing() -> str:
        "Do nothing."
        return "nothing"

    user, engine = played_by(*[tool_call("nothing")] * 8, "Well. ###STOP###", tools=[nothing])

    await sell(user, "What do you want?")

    assert "nothing" in engine.requests[7].prompt_text
    assert len(engine.requests) == 9


def test_an_engine_on_tokens_without_a_renderer_is_refused():
    with pytest.raises(UsageError, match="a user has an engine that works on tokens, but no renderer"):
        ModelUser(ScriptedEngine(["Hi."]), "Buy.")
