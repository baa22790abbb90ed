"""Images from tasks, tools and users: what the model is sent, what is kept, and who refuses them."""

from __future__ import annotations

import base64
import json

import pytest

import agentenv as ae
from agentenv.core.images import image_files
from agentenv.core.messages import chat_call
from agentenv.engine import Features, Sampling, ScriptedEngine
from agentenv.render import Renderer
from agentenv.runner import FunctionUser, UserTurn
from agentenv.runs import RunWriter, find_run
from agentenv.testing import tool_call_message
from agentenv.tools import Image
from agentenv_bridges import (
    from_atif,
    from_openai,
    from_prime_rl,
    to_atif,
    to_inspect,
    to_openai,
    to_prime_rl,
    to_sft,
)
from agentenv_providers import OpenAIChatEngine
from helpers.seeing import part, png, tokenizer_of
from scenes import TOKENIZER, Chat, Go, play

PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAABgAAAAYCAIAAABvFaqvAAAAH0lEQVR4nGM4oSFCFcQwatCoQaMGjRo0atCo"
    "QcPYIAA9xwkQ/AdHzAAAAABJRU5ErkJggg=="
)
PART = Image(PNG).to_part()


def images_in(message):
    content = message.get("content")
    return sum(part["type"] == "image_url" for part in content) if isinstance(content, list) else 0


async def test_a_first_picture_that_the_context_has_no_room_for_is_a_line_of_text_to_model_and_record():
    class Album(Go):
        sends_images = True

        def start(self) -> list[ae.Message]:
            pictures = [part(png(1, 28, 28)), part(png(2, 672, 672))]
            return [{"role": "user", "content": [*pictures, {"type": "text", "text": "Look."}]}]

    tokenizer = tokenizer_of("qwen2_5_vl")
    record = await play(Album(), "Seen.", renderer=Renderer(tokenizer), max_context_tokens=400)

    assert (record.stop_reason, record.error) == ("final_answer", None)
    assert len(record.sequences[0].images) == 1
    left = [part for part in record.messages[0]["content"] if part["type"] == "text"]
    assert left[0]["text"] == "[image left out: 578 tokens]"
    assert "[image left out: 578 tokens]" in tokenizer.decode(record.sequences[0].token_ids)


class Eyes(ae.ToolEnv):
    """Shows an image at the start, and another one by a tool."""

    sends_images = True

    def start(self) -> list[ae.Message]:
        return [{"role": "user", "content": [{"type": "text", "text": "What is here?"}, PART]}]

    @ae.tool
    def look(self) -> Image:
        """Look."""
        return Image(PNG)

    def reward(self, answer: str) -> float:
        return float("square" in answer)


async def seen():
    engine = Chat(tool_call_message("look"), "A square.")
    return engine, await play(Eyes(), engine, env_id="test/Eyes-v0")


async def test_images_of_tasks_and_tools_reach_the_model_and_the_record():
    engine, played = await seen()

    assert (played.reward, played.stop_reason) == (1.0, "final_answer")
    assert engine.heard[0][0]["content"] == [{"type": "text", "text": "What is here?"}, PART]
    assert engine.heard[1][-1]["content"] == [PART]
    assert [images_in(message) for message in played.messages] == [1, 0, 1, 0]


async def test_an_image_counts_as_a_thousand_tokens_and_not_as_its_base64():
    class Large(Eyes):
        def start(self):
            return [{"role": "user", "content": [Image(b"x" * 300_000).to_part()]}]

    full = Chat("A square.")

    played = await play(Large(), Chat("A square."), max_context_tokens=4_000)
    cut = await play(Large(), full, max_context_tokens=900)

    assert played.reward == 1.0
    assert (cut.stop_reason, full.heard) == ("context_length", [])


async def test_a_user_may_show_an_image():
    def show(messages, task):
        return UserTurn("See.", images=[Image(PNG)]) if len(messages) == 2 else None

    engine = Chat("Show me.", "A square.")
    played = await play(Go(), engine, user=FunctionUser(show))

    assert engine.heard[1][-1]["content"] == [{"type": "text", "text": "See."}, PART]
    assert played.messages[2]["content"] == [{"type": "text", "text": "See."}, PART]


class Blind(ScriptedEngine):
    """A scripted engine without eyes."""

    features = Features()


async def test_an_engine_without_eyes_refuses_before_it_samples_anything():
    engine = Blind(["A square."], tokenizer=TOKENIZER)

    played = await play(Eyes(), engine)

    assert (played.stop_reason, played.turns, engine.requests) == ("error", (), [])
    assert "shows images" in played.error.message
    assert "this model sees none" in played.error.message
    assert "openai:NAME" in played.error.message


@pytest.mark.parametrize("official", [True, False])
def test_images_of_tools_are_sent_as_messages_of_the_user(official):
    address = "https://api.openai.com/v1" if official else "http://127.0.0.1:1/v1"
    engine = OpenAIChatEngine("m", base_url=address, api_key="x")
    messages = [
        {"role": "user", "content": [PART]},
        {"role": "assistant", "content": None, "tool_calls": [chat_call(id, "look", "{}") for id in "abc"]},
        {"role": "tool", "tool_call_id": "a", "name": "look", "content": [PART]},
        {
            "role": "tool",
            "tool_call_id": "b",
            "name": "read",
            "content": [{"type": "text", "text": "x"}, PART],
        },
        {"role": "tool", "tool_call_id": "c", "name": "add", "content": "3"},
        {"role": "assistant", "content": "So."},
    ]

    sent = engine._body(messages, (), Sampling(), None, set())["messages"]

    roles = ["user", "assistant", "tool", "tool", "tool", "user", "assistant"]
    assert [message["role"] for message in sent] == roles
    assert [message["content"] for message in sent[2:5]] == ["(see the image)", "x", "3"]
    assert sent[5]["content"] == [
        {"type": "text", "text": "What look returned:"},
        PART,
        {"type": "text", "text": "What read returned:"},
        PART,
    ]
    assert messages[2]["content"] == [PART]
    plain = [{"role": "user", "content": "x"}]
    assert engine._body(plain, (), Sampling(), None, set())["messages"] == plain


async def test_a_run_keeps_images_and_exports_hand_them_on(tmp_path):
    _, played = await seen()
    writer = RunWriter.create("test/Eyes-v0", runs_dir=tmp_path)
    writer.append(played)
    writer.close()
    run = find_run(writer.path.name, runs_dir=tmp_path)
    (stored,) = run
    assert stored.messages == played.messages

    (chat,) = to_openai([stored])
    (sft,) = to_sft([stored])
    (back,) = from_openai([json.loads(json.dumps(chat))])
    (prime,) = from_prime_rl(list(to_prime_rl([stored])))
    inspect = json.dumps(to_inspect([stored], run.info))

    assert list(back.messages) == list(played.messages)
    assert [images_in(message) for message in sft["messages"]] == [images_in(m) for m in played.messages]
    assert [images_in(message) for message in prime.messages] == [1, 0, 1, 0]
    assert inspect.count(PART["image_url"]["url"]) >= 2


async def test_atif_takes_images_as_parts_and_gives_them_back():
    _, played = await seen()
    document = json.loads(json.dumps(to_atif(played)))

    (back,) = from_atif([document])

    source = {"media_type": "image/png", "path": PART["image_url"]["url"]}
    assert document["steps"][0]["message"][1] == {"type": "image", "source": source}
    assert list(back.messages) == list(played.messages)
    atif = pytest.importorskip("atif", reason="UNTESTED: atif is not installed")
    assert atif.Trajectory.model_validate(document)


async def test_record_store_and_exports_hold_the_picture_that_the_model_sees(tmp_path):
    pytest.importorskip("PIL")
    from agentenv.core.pictures import picture_of
    from field.pictures import odd_pictures

    files = odd_pictures()

    class Odd(ae.ToolEnv):
        sends_images = True

        def start(self) -> list[ae.Message]:
            return [{"role": "user", "content": [Image(data).to_part() for data in files.values()]}]

        def reward(self) -> float:
            return 1.0

    engine = Chat("Seen.")
    played = await play(Odd(), engine)
    writer = RunWriter.create("test/Odd-v0", runs_dir=tmp_path)
    writer.append(played)
    writer.close()
    (stored,) = find_run(writer.path.name, runs_dir=tmp_path)
    (chat,) = to_openai([stored])
    (sft,) = to_sft([stored])

    wanted = [picture_of(data) for data in files.values()]
    for message in (engine.heard[0][0], played.messages[0], chat["messages"][0], sft["messages"][0]):
        assert list(image_files([message])) == wanted
    shown = {path.read_bytes() for path in (writer.path / "images").iterdir() if path.suffix != ".json"}
    assert shown == set(wanted), "which the viewer shows"
