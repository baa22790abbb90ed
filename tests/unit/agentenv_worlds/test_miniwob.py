"""Web pages of MiniWoB++, played in Chromium where the packages and a browser are installed."""

import re
from copy import copy

import pytest

import agentenv as ae
import scenes
from agentenv.core import Action, DependencyMissing, UnknownEnvironment
from agentenv.core.images import image_file, url_of
from agentenv.envs import spec
from agentenv.render import byte_tokenizer
from agentenv.testing import oracle_of, play, tool_call_message
from agentenv_worlds.miniwob import browser
from agentenv_worlds.miniwob.oracle import SOLVED
from helpers import worlds
from helpers.worlds import told, world
from scenes import RENDERER, Chat


@pytest.fixture(scope="module", autouse=True)
def _no_browser_is_left():
    yield
    browser.close_browser()


def test_a_machine_without_chromium_is_told_so(monkeypatch):
    monkeypatch.setattr(browser.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(browser, "_chromium", lambda: None)
    monkeypatch.setattr(browser, "_has_own", lambda: False)

    with pytest.raises(DependencyMissing, match=r"needs Chromium.*apt-get install chromium"):
        spec("miniwob:click-test")


@pytest.mark.engine
@pytest.mark.parametrize("page", SOLVED)
async def test_the_page_accepts_its_oracle(page):
    entry = world(f"miniwob:{page}")

    played = [await play(entry, oracle_of(entry), entry.task_set()[number]) for number in range(3)]

    assert [episode.reward for episode in played] == [1.0] * 3


async def begun(page, seed=2):
    return await worlds.begun(world(f"miniwob:{page}"), {"seed": seed})


@pytest.mark.engine
async def test_a_seed_decides_what_the_page_asks_and_shows():
    with pytest.raises(UnknownEnvironment, match="did you mean 'click-test-2'"):
        world("miniwob:click-tets-2")
    pages = []
    for seed in (2, 2, 4):
        env, shown = await begun("enter-text", seed)
        pages.append(shown)
        await env.shutdown()

    assert pages[0] == pages[1] != pages[2]


@pytest.mark.engine
async def test_what_cannot_be_done_is_answered():
    env, shown = await begun("click-button")
    (box,) = re.findall(r"- generic \[ref=(e\d+)\]:", shown)[:1]

    async def answer(name, **arguments):
        return await told(env, tool_call_message(name, **arguments))

    assert "shows no element" in await answer("click", ref="text=Submit")
    assert "not an <input>" in await answer("fill", ref=box, text="x")
    assert "shows no element 'e999'" in await answer("click", ref="e999")
    assert (await env.end("max_turns")).reward == -1.0
    await env.shutdown()


@pytest.mark.engine
async def test_the_wrong_button_ends_the_page_with_minus_one():
    env, shown = await begun("click-test-2")
    (wrong,) = re.findall(r'button "TWO" \[ref=(e\d+)\]', shown)

    await env.advance(Action.of(tool_call_message("click", ref=wrong)))

    assert await env.is_finished()
    assert (await env.end("env_done")).reward == -1.0
    await env.shutdown()


def pictures(content):
    return [part for part in content if part["type"] == "image_url"] if isinstance(content, list) else []


@pytest.mark.engine
async def test_screenshots_reach_models_of_text_and_of_tokens_and_are_refused_without_eyes():
    entry = world("miniwob:enter-text")

    async def shown(model, renderer=RENDERER):
        return await scenes.play(
            entry.make(screenshots=True), model, {"seed": 2}, renderer=renderer, max_turns=2
        )

    engine = Chat(*(tool_call_message("fill", ref="e5", text=text) for text in "xy"))
    seen = await shown(engine)

    assert seen.stop_reason == "max_turns"
    first, second = (
        pictures(message["content"])[0] for message in seen.messages if pictures(message["content"])
    )
    assert first["image_url"]["url"].startswith("data:image/png;base64,iVBOR")
    assert first != second
    assert pictures(engine.heard[1][-1]["content"]) == [second]

    fill = '<tool_call>{"name": "fill", "arguments": {"ref": "e5", "text": "x"}}</tool_call>'
    kept = await shown([fill, fill])
    assert [span.source for span in kept.sequences[0].spans if span.images] == ["prompt", "env"]
    files = [image.data for image in kept.sequences[0].images]
    said = [one for message in kept.messages for one in pictures(message["content"])]
    assert files == [image_file(url_of(one)) for one in said]

    blind = copy(byte_tokenizer())
    blind.images = None
    refused = await shown("x", ae.Renderer(blind))
    assert (refused.stop_reason, refused.turns) == ("error", ())
    assert "shows images" in refused.error.message
