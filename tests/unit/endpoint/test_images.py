"""Images that an agent with its own loop sends: by content, as data URLs only, at their places in the tokens."""

import base64

import openai
import pytest

import agentenv as ae
from agentenv.core.images import hash_of
from agentenv.engine import ScriptedEngine
from agentenv.render import Renderer, byte_tokenizer
from agentenv.runner import Runner
from helpers.seeing import png

FIRST, SECOND = png(1, 40, 30), png(2, 40, 30)


def shown(data):
    url = "data:image/png;base64," + base64.b64encode(data).decode()
    return {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}


class Looks(ae.AgentEnv):
    async def agent(self, url, task):
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as sdk:
            said = [shown(FIRST)]
            for following in (shown(SECOND), None):
                answer = await sdk.chat.completions.create(model="m", messages=said)
                said += [{"role": "assistant", "content": answer.choices[0].message.content}]
                said += [following] if following else []
            # The same words after another picture of the same size are another conversation.
            other = [shown(SECOND), *said[1:]]
            await sdk.chat.completions.create(model="m", messages=other[:3])
            link = {"type": "image_url", "image_url": {"url": "http://127.0.0.1/a.png"}}
            with pytest.raises(openai.APIStatusError, match="is no data URL"):
                await sdk.chat.completions.create(model="m", messages=[{"role": "user", "content": [link]}])
            return "done"

    def reward(self, answer):
        return 1.0


async def test_an_agents_images_stand_at_their_places_and_are_never_taken_for_each_other():
    codec = byte_tokenizer()
    engine = ScriptedEngine(["one", "two", "three", "four"], tokenizer=codec)
    record = await Runner(engine, Renderer(codec), ae.RunLimits()).run_episode(Looks(), {})

    assert record.error is None, record.error
    seen = [[image.sha256 for image in sequence.images] for sequence in record.sequences]
    first, second = hash_of(FIRST), hash_of(SECOND)
    assert [first, second] in seen
    assert [second, second] in seen
    for sequence in record.sequences:
        for image in sequence.images:
            ids = sequence.token_ids[image.offset : image.end]
            assert tuple(ids) == codec.images.prepare(40, 30).ids
