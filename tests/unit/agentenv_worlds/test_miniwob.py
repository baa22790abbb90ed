"""Web pages of MiniWoB++, played in Chromium where the packages and a browser are installed."""

import json
import re
from copy import copy

import pytest

import agentenv as ae
from agentenv.cli import main
from agentenv.core import Action, Context, DependencyMissing, UnknownEnvironment
from agentenv.core.images import image_file, url_of
from agentenv.engine import ChatCompletion, ScriptedEngine, Usage
from agentenv.envs import EnvSpec, spec
from agentenv.render import byte_tokenizer
from agentenv.runner import Runner
from agentenv.testing import check_env, oracle_of, play, tool_call_message
from agentenv_worlds.miniwob import browser
from agentenv_worlds.miniwob.oracle import SOLVED


@pytest.fixture(scope="module", autouse=True)
def _no_browser_is_left():
    yield
    browser.close_browser()


def needs_miniwob():
    pytest.importorskip("miniwob", reason="UNTESTED: miniwob is not installed", exc_type=ImportError)
    pytest.importorskip("playwright", reason="UNTESTED: playwright is not installed")
    try:
        browser.check_page("click-test")
    except DependencyMissing as error:
        pytest.skip(f"UNTESTED: {error}")


def test_the_error_for_a_missing_package_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr(browser.importlib.util, "find_spec", lambda name: None)

    with pytest.raises(DependencyMissing, match="pip install --no-deps miniwob"):
        spec("miniwob:click-test")


def test_a_machine_without_chromium_is_told_so(monkeypatch):
    monkeypatch.setattr(browser.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(browser, "_chromium", lambda: None)
    monkeypatch.setattr(browser, "_has_own", lambda: False)

    with pytest.raises(DependencyMissing, match=r"needs Chromium.*apt-get install chromium"):
        spec("miniwob:click-test")


def test_the_list_of_libraries_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr("agentenv.envs.worlds.find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="0"):
        main(["list", "miniwob", "--json"])
    (peer,) = json.loads(capsys.readouterr().out)["libraries"]

    assert (peer["name"], peer["needs"]) == ("miniwob:PAGE", browser.INSTALL)


@pytest.mark.engine
def test_an_unknown_page_is_told_with_the_nearest_one():
    needs_miniwob()

    with pytest.raises(UnknownEnvironment, match="did you mean 'click-test-2'"):
        spec("miniwob:click-tets-2")
    assert len(EnvSpec.from_json(spec("miniwob:click-test-2").to_json()).task_set().take(2)) == 2


@pytest.mark.engine
@pytest.mark.parametrize("page", SOLVED)
async def test_the_page_accepts_its_oracle(page):
    needs_miniwob()
    entry = spec(f"miniwob:{page}")

    played = [await play(entry, oracle_of(entry), entry.task_set()[number]) for number in range(3)]

    assert [episode.reward for episode in played] == [1.0] * 3


@pytest.mark.exhaustive
async def test_the_checker_passes_on_a_page():
    needs_miniwob()
    report = await check_env("miniwob:click-test-2", tasks=2, timeout_s=600)

    assert report.ok, str(report)


async def begun(page, seed=2, **settings):
    entry = spec(f"miniwob:{page}")
    env = entry.make(**settings)
    first = await env.begin({"seed": seed}, seed=0, context=Context())
    return env, first.messages[-1]["content"]


@pytest.mark.engine
async def test_a_seed_decides_what_the_page_asks_and_shows():
    needs_miniwob()
    pages = []
    for seed in (2, 2, 4):
        env, shown = await begun("enter-text", seed)
        pages.append(shown)
        await env.shutdown()

    assert pages[0] == pages[1] != pages[2]


@pytest.mark.engine
async def test_what_cannot_be_done_is_answered():
    needs_miniwob()
    env, shown = await begun("click-button")
    (box,) = re.findall(r"- generic \[ref=(e\d+)\]:", shown)[:1]

    async def answer(name, **arguments):
        result = (await env.advance(Action.of(tool_call_message(name, **arguments)))).tool_results[0]
        assert result.is_error
        return result.content

    assert "shows no element" in await answer("click", ref="text=Submit")
    assert "not an <input>" in await answer("fill", ref=box, text="x")
    assert "shows no element 'e999'" in await answer("click", ref="e999")
    assert (await env.end("max_turns")).reward == -1.0
    await env.shutdown()


@pytest.mark.engine
async def test_the_wrong_button_ends_the_page_with_minus_one():
    needs_miniwob()
    env, shown = await begun("click-test-2")
    (wrong,) = re.findall(r'button "TWO" \[ref=(e\d+)\]', shown)

    await env.advance(Action.of(tool_call_message("click", ref=wrong)))

    assert await env.is_finished()
    assert (await env.end("env_done")).reward == -1.0
    await env.shutdown()


class Sees:
    """A chat engine that clicks what is asked for, and keeps what it was sent."""

    name = "sees"
    max_context_tokens = None

    def __init__(self, *calls):
        self.calls = list(calls)
        self.sent = []

    async def chat(self, messages, tools, sampling, *, deadline_s=None):
        self.sent.append(list(messages))
        return ChatCompletion(self.calls.pop(0), Usage(10, 1), "stop")

    async def close(self): ...


def pictures(content):
    return [part for part in content if part["type"] == "image_url"] if isinstance(content, list) else []


@pytest.mark.engine
async def test_screenshots_reach_models_of_text_and_of_tokens_and_are_refused_without_eyes():
    needs_miniwob()
    env = spec("miniwob:enter-text").make(screenshots=True)
    engine = Sees(
        tool_call_message("fill", ref="e5", text="x"), tool_call_message("fill", ref="e5", text="y")
    )
    limits = ae.RunLimits(max_turns=2)

    seen = await Runner(engine, limits=limits).run_episode(env, {"seed": 2})

    assert seen.stop_reason == "max_turns"
    first, second = (
        pictures(message["content"])[0] for message in seen.messages if pictures(message["content"])
    )
    assert first["image_url"]["url"].startswith("data:image/png;base64,iVBOR")
    assert first != second
    assert pictures(engine.sent[1][-1]["content"]) == [second]

    fill = '<tool_call>{"name": "fill", "arguments": {"ref": "e5", "text": "x"}}</tool_call>'
    tokenizer = byte_tokenizer()
    engine = ScriptedEngine([fill, fill], tokenizer=tokenizer)
    kept = await Runner(engine, ae.Renderer(tokenizer), limits).run_episode(
        spec("miniwob:enter-text").make(screenshots=True), {"seed": 2}
    )
    assert [span.source for span in kept.sequences[0].spans if span.images] == ["prompt", "env"]
    files = [image.data for image in kept.sequences[0].images]
    said = [one for message in kept.messages for one in pictures(message["content"])]
    assert files == [image_file(url_of(one)) for one in said]

    tokenizer = copy(byte_tokenizer())
    tokenizer.images = None
    blind = Runner(ScriptedEngine(lambda request: "x", tokenizer=tokenizer), ae.Renderer(tokenizer))
    refused = await blind.run_episode(
        spec("miniwob:enter-text").make(screenshots=True), {"seed": 2}, env_id="miniwob/enter-text-v0"
    )
    assert (refused.stop_reason, refused.turns) == ("error", ())
    assert "shows images" in refused.error.message
