"""The viewer's page: small, self-contained, and deaf to what hostile text asks of it."""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from agentenv.core import Rewrite, StopReason, TokenSequence, TokenSpan, Trajectory, Turn
from agentenv.core.images import ImageTokens, hash_of
from agentenv.runs import compare, report_on
from agentenv.runs.store import Run, RunWriter, list_runs
from agentenv.runs.store.vocabulary import TokenTexts, token_bytes
from agentenv.runs.view import build_page, show
from agentenv.runs.view.data import episode_data, page_json, run_data, safe_json
from agentenv.runs.view.page import asset, frame
from helpers.browser import CHROMIUM, open_browser
from helpers.live_viewer import fetch, live
from helpers.sample_runs import (
    HOSTILE,
    ODD,
    TOKENIZER,
    episode,
    span,
    talk,
    varied,
    write_run,
    write_training,
)
from helpers.seeing import part, plain_png

needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")


class Tags(HTMLParser):
    """Collects what a browser would see as elements."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))


def test_page_without_data_is_small(tmp_path):
    """Without the library that draws the curves, which is about 50 kB, it has less than 125 kB."""
    page = build_page([write_run(tmp_path, "empty", [])])

    assert len(page.encode()) - len(asset("vendor/uPlot.js").encode()) < 128_000


def test_page_has_the_licence_of_the_library_that_it_contains(tmp_path):
    page = build_page([write_run(tmp_path, "empty", [])])

    assert asset("vendor/uPlot.LICENSE") in page
    assert "Permission is hereby granted, free of charge" in page


def test_page_reaches_for_nothing_outside_itself(tmp_path):
    page = build_page([write_run(tmp_path, "one", varied(2))])
    tags = Tags(page).tags

    assert not [attrs for _, attrs in tags if "src" in attrs or "href" in attrs]
    assert "connect-src &#x27;none&#x27;" in page
    own = page.replace("/*! https://github.com/leeoniya/uPlot (v1.6.32) */", "")
    assert not re.search(r"https?://(?!www\.w3\.org)", own)


def test_only_the_pages_own_script_is_a_script(tmp_path):
    hostile = episode(0, 0, output=HOSTILE, answer=HOSTILE)
    page = build_page([write_run(tmp_path, "hostile", [hostile])])
    scripts = [attrs.get("type") for tag, attrs in Tags(page).tags if tag == "script"]

    assert sorted(map(str, scripts)) == ["None", "application/json", "application/octet-stream"]
    assert "img" not in {tag for tag, _ in Tags(page).tags}


def test_numbers_that_json_lacks_do_not_break_the_page(tmp_path):
    odd = replace(episode(0, 0), metrics={"loss": float("nan"), "gap": float("inf")})
    page = build_page([write_run(tmp_path, "nan", [odd], metrics=[{"step": 1, "loss": float("nan")}])])
    data = re.search(r'id="page">(.*?)</script>', page, re.S)

    assert data
    json.loads(data[1], parse_constant=pytest.fail)


def test_episodes_that_matter_come_first_when_room_is_short(tmp_path):
    run = write_run(tmp_path, "many", varied(12))
    page = build_page([run], only=[run.summaries[40]], max_bytes=4_000)
    kept = re.findall(r'id="e0-(\d+)"', page)

    assert kept[0] == "40"
    assert 2 <= len(kept) < 10
    assert all(run.summaries[int(place)].reward is None for place in kept[1:])


def test_trajectories_at_hand_show_themselves_in_a_notebook():
    shown = show(episode(0, 0, answer=HOSTILE), tokenizer=TOKENIZER)
    tags = Tags(shown._repr_html_()).tags

    assert [tag for tag, _ in tags] == ["iframe"]
    assert tags[0][1]["sandbox"] == "allow-scripts"


def test_text_of_a_task_stands_once_in_the_page(tmp_path):
    asked = [
        replace(episode(task, member), task={"answer": task}) for task in range(3) for member in range(4)
    ]
    data = run_data(write_run(tmp_path, "asked", asked), vocabulary={})

    assert data["tasks"] == [
        ("How many pencils?", "0"),
        ("How many pencils?", "1"),
        ("How many pencils?", "2"),
    ]
    assert [row["Q"] for row in data["episodes"]] == [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2]


@pytest.mark.parametrize(
    ("piece", "byte_level", "expected"),
    [
        ("Ġthe", True, b" the"),
        ("Ċ", True, b"\n"),
        ("æ¼", True, b"\xe6\xbc"),
        ("▁the", False, b" the"),
        ("<0x0A>", False, b"\n"),
    ],
)
def test_vocabulary_entries_become_the_bytes_they_stand_for(piece, byte_level, expected):
    assert token_bytes(piece, byte_level=byte_level) == expected


def test_vocabulary_joins_to_the_text_that_was_encoded():
    text = f"<|im_start|>user\n{ODD}{HOSTILE}"
    ids = TOKENIZER.encode(text)
    words = TokenTexts(TOKENIZER.backend).fresh([ids])

    assert "".join(words[token] for token in ids).encode("latin-1").decode() == text


HOSTILE_FILES = {
    "run.json": ["[" * 100_000, '{"id": "bad", "config": {"success_at": ' + "[" * 900 + "]" * 900 + "}}"],
    "trajectories.jsonl": ["[" * 100_000, '{"messages": [5]}'],
    "index.jsonl": [
        "[" * 100_000,
        (
            '{"env_id": 1, "task_id": [], "group_id": {}, "member": "x", "stop_reason": "max_turns", "reward": "x", '
            '"tools": [[1, "x"]], "metrics": 5, "timings": {"total_s": []}, "offset": 0, "size": 9}'
        ),
    ],
    "metrics.jsonl": ["[" * 100_000, '{"step": ' + "[" * 900 + "]" * 900 + "}"],
    "annotations.jsonl": ["[" * 100_000, '{"episode": [], "tokens": [0, -5]}'],
    "vocab.json": ["[" * 100_000, '{"x": {}}', '{"' + "9" * 5000 + '": "x"}'],
}


@pytest.mark.parametrize(
    ("file", "text"),
    [(file, text) for file, lines in HOSTILE_FILES.items() for text in lines],
    ids=lambda part: part[:24],
)
def test_a_hostile_run_does_not_hide_the_others(tmp_path, file, text):
    write_run(tmp_path, "good", [episode(0, 0)])
    write_run(tmp_path, "bad", [episode(1, 0)])
    (tmp_path / "bad" / file).write_text(text + "\n")

    runs = list_runs(tmp_path)
    page = build_page(runs)
    with live(tmp_path) as server:
        status, answer = fetch(server.url)

    assert "good" in [run.id for run in runs]
    assert status == 200
    for shown in (page, answer):
        data = json.loads(shown.split('id="page">', 1)[1].split("</script>", 1)[0])
        assert "good" in [run["id"] for run in data["runs"]]


@needs_browser
@pytest.mark.slow
async def test_pages_in_a_real_browser(tmp_path):
    metrics = [{"step": n, "reward": n / 10, "entropy": 2 - n / 10} for n in range(1, 11)]
    runs = [
        write_run(tmp_path, "b", varied(), metrics=metrics, notes=True),
        write_run(tmp_path, "a", varied(9)),
    ]
    page = tmp_path / "view.html"
    page.write_text(build_page(runs))
    async with open_browser() as tab:
        await tab.open(page.as_uri())
        assert await tab.js("document.querySelectorAll('tr.row').length") == 2
        await tab.js("document.querySelectorAll('input[type=checkbox]').forEach((box) => box.click())")
        await tab.js(
            "[...document.querySelectorAll('input[type=checkbox]')].slice(-1)[0].checked || [...document.querySelectorAll('input[type=checkbox]')].slice(-1)[0].click()"
        )
        await tab.js("location.hash = '#/compare/0/1'")
        assert await tab.until("document.body.innerText.includes('tasks better')")

        await tab.js("location.hash = '#/r/0'")
        assert await tab.until("document.querySelectorAll('.vrow').length > 10")
        assert await tab.until("document.querySelectorAll('.plot canvas').length === 1")
        assert "env: KeyError: no price for" in str(await tab.js("document.body.innerText"))

        await tab.js("location.hash = '#/r/0/e/1'")
        await tab.until("document.querySelectorAll('.box').length >= 4")
        assert await tab.until(
            "document.querySelector('.centre').innerText.includes('A shop sells 17 boxes')"
        )
        text = str(await tab.js("document.querySelector('.centre').innerText"))
        assert "TOOL calc" in text
        assert await tab.js("document.querySelectorAll('.box.prompt .t:not(.off)').length") == 0
        assert await tab.js("document.querySelectorAll('.box.model .t.off').length") == 0
        assert await tab.js("document.querySelector('.right').innerText.includes('✓ yes')")
        assert await tab.js("document.querySelector('.mem').innerText.includes('+0.50')")
        for key, tab_name in [
            ("m", "mask"),
            ("e", "entropy"),
            ("r", "ratio"),
            ("d", "diff"),
            ("s", "messages"),
            ("l", "logprob"),
        ]:
            await tab.key(key)
            await tab.until(f"document.querySelector('.tabs .on').textContent === '{tab_name}'")
        await tab.key("ArrowRight")
        await tab.until("document.querySelector('.mem.on b').textContent === '#2'")
        await tab.key("j")
        await tab.key("j")
        assert await tab.js("document.querySelectorAll('.box.now').length") == 1
        await tab.key("t")
        assert await tab.js("document.documentElement.dataset.theme") == "dark"
        await tab.key("u")
        await tab.until("/^#\\/r\\/[^/]+$/.test(location.hash)")
        assert tab.complaints == []


@needs_browser
@pytest.mark.slow
async def test_hostile_and_odd_text_is_shown_and_never_run(tmp_path):
    bad = [episode(0, member, output=HOSTILE + ODD, answer=HOSTILE + ODD) for member in range(2)]
    page = tmp_path / "view.html"
    page.write_text(build_page([write_run(tmp_path, "hostile", bad)]))
    async with open_browser() as tab:
        await tab.open(page.as_uri())
        await tab.js("location.hash = '#/r/0/e/0'")
        await tab.until("document.querySelectorAll('.box').length >= 4")
        text = str(await tab.js("document.querySelector('.centre').innerText"))
        await tab.key("s")
        await tab.until("document.querySelector('.tabs .on').textContent === 'messages'")

        assert HOSTILE in text
        assert "漢字" in text
        assert "U+202E" in text
        assert "\u202e" not in text
        assert await tab.js("window.hacked") is None
        assert await tab.js("document.querySelectorAll('img').length") == 0
        assert tab.complaints == []


def _asking(task: int, member: int, question: str):
    """An episode whose task asks this."""
    plain = episode(task, member)
    return replace(
        plain, messages=({"role": "user", "content": question}, *plain.messages[1:]), task={"answer": "391"}
    )


@needs_browser
@pytest.mark.slow
async def test_lists_say_what_each_task_was(tmp_path):
    head = "Answer with a number and nothing else. "
    asked = [_asking(task, 0, f"{head}What is {task} + 1?") for task in range(3)]
    twins = [_asking(task, 0, f"Play. {HOSTILE}") for task in range(2)]
    page = tmp_path / "view.html"
    page.write_text(build_page([write_run(tmp_path, "asked", asked), write_run(tmp_path, "twins", twins)]))
    async with open_browser() as tab:
        await tab.open(page.as_uri())
        await tab.js("location.hash = '#/r/0'")
        await tab.until("document.querySelectorAll('.vrow').length === 3")
        first = str(await tab.js("document.querySelector('.vrow').innerText"))
        grid = str(await tab.js("document.querySelector('.grid').innerText"))
        assert "… 0 + 1?" in first
        assert first.index("391") < first.index("1.000")
        assert "… 2 + 1?" in grid

        await tab.js("location.hash = '#/r/1'")
        await tab.until("document.querySelectorAll('.vrow').length === 2")
        assert "order-0001 · Play. </script>" in str(await tab.js("document.body.innerText"))

        await tab.js("location.hash = '#/r/0/e/1'")
        await tab.until("document.querySelectorAll('.outcome').length")
        outcome = str(await tab.js("document.querySelector('.outcome').innerText"))
        assert [
            word for word in ("What is 1 + 1?", "17 boxes hold", "391", "1.000") if word not in outcome
        ] == []
        assert tab.complaints == []


CARDS = "[...document.querySelectorAll('main .cards')].slice(0, 1).map((cards) => cards.innerText).join('')"


@needs_browser
@pytest.mark.slow
@pytest.mark.parametrize("whole_numbers", [True, False])
async def test_figures_follow_the_filter_and_are_those_of_the_report(tmp_path, whole_numbers):
    """A filter that selects what the report counts gives the report's own figures."""
    episodes = [
        replace(
            one, reward=one.reward if not whole_numbers or one.reward is None else float(one.reward > 0.5)
        )
        for one in varied(12)
    ]
    run = write_run(tmp_path, "a", episodes)
    other = write_run(tmp_path, "b", [one for one in episodes if one.stop_reason is StopReason.MAX_TURNS])
    page = tmp_path / "view.html"
    page.write_text(build_page([run, other]))

    def expected(run: Run) -> list[str]:
        report = report_on(one for one in run.summaries if one.scored)
        assert report.reward
        passes = " ".join(f"@{k} {value:.2f}" for k, value in report.pass_at.items())
        limits = f"95 % {report.reward.low:.3f} to {report.reward.high:.3f}"
        spread = f"{report.num_groups_with_spread}/{report.num_groups}"
        return [f"{report.reward.mean:.3f}", limits, f"{report.num_tasks} tasks", passes, spread]

    async with open_browser() as tab:
        await tab.open(page.as_uri())
        await tab.js("location.hash = '#/r/0'")
        for text, figures in [("reward>-9", expected(run)), ("reward>-9 stop:max_turns", expected(other))]:
            await tab.until("document.querySelectorAll('.vrow').length > 0")
            await tab.js(
                f"(() => {{ const box = document.getElementById('filter'); box.value = '{text}';"
                " box.dispatchEvent(new Event('input')); })()"
            )
            chosen = run if text == "reward>-9" else other
            scored = [one for one in chosen.summaries if one.scored]
            await tab.until(f"document.querySelector('.filter').innerText.startsWith('{len(scored)} of')")
            cards = " ".join(str(await tab.js(CARDS)).split())
            assert [figure for figure in figures if figure not in cards] == []
            assert await tab.js("document.querySelectorAll('.grid a').length") == len(scored)
        assert tab.complaints == []


@needs_browser
@pytest.mark.slow
async def test_list_of_runs_has_figures_and_the_comparison_its_interval(tmp_path):
    metrics = [{"step": n, "reward": n / 40} for n in range(1, 38)]
    before = write_run(
        tmp_path, "a", [episode(task, 0, reward=task % 3 / 2) for task in range(20)], terms=("temperature 0",)
    )
    after = write_run(
        tmp_path,
        "b",
        [episode(task, 0, reward=1.0) for task in range(20)],
        metrics=metrics,
        terms=("temperature 1",),
    )
    page = tmp_path / "view.html"
    page.write_text(build_page([before, after]))
    difference = compare(before, after).difference
    assert difference
    async with open_browser() as tab:
        await tab.open(page.as_uri())
        text = str(await tab.js("document.querySelector('main').innerText"))
        assert [word for word in ("37", "0 s", " to ") if word not in text] == []
        assert await tab.js("document.querySelectorAll('th.num').length") == 4
        await tab.js(
            "(() => { const box = document.getElementById('filter'); box.value = 'train';"
            " box.dispatchEvent(new Event('input')); })()"
        )
        await tab.until("document.querySelectorAll('tr.row').length === 1")

        await tab.js("location.hash = '#/compare/0/1'")
        await tab.until("document.body.innerText.includes('change of the mean reward')")
        shown = await tab.js("document.querySelector('.cards .card').innerText.match(/[+\\u2212][\\d.]+/g)")
        assert await tab.js("document.querySelector('main > .warn').innerText") == (
            "not the same in both runs: " + "; ".join(compare(before, after).changed)
        )
        mean, low, high = (float(str(number).replace("\u2212", "-")) for number in shown)
        assert mean == pytest.approx(difference.mean, abs=0.006)
        assert (low, high) == pytest.approx((difference.low, difference.high), abs=0.03)
        assert await tab.js("window.hacked") is None
        assert tab.complaints == []


@needs_browser
@pytest.mark.slow
async def test_messages_mark_errors_show_images_and_fold_what_is_long(tmp_path):
    page = tmp_path / "view.html"
    page.write_text(build_page([write_run(tmp_path, "talk", [talk()])]))
    async with open_browser() as tab:
        await tab.open(page.as_uri())
        await tab.until("document.querySelectorAll('.box').length >= 6")
        assert "USER · AFTER TURN" not in str(await tab.js("document.querySelector('.centre').innerText"))
        await tab.key("s")
        await tab.until("document.querySelector('.tabs .on').textContent === 'messages'")
        text = str(await tab.js("document.querySelector('.centre').innerText"))
        heads = await tab.js("[...document.querySelectorAll('.box h4 > b')].map((head) => head.innerText)")
        failed = str(await tab.js("document.querySelector('.box.failed').innerText"))
        folds = str(
            await tab.js("[...document.querySelectorAll('.fold summary')].map((s) => s.innerText).join('|')")
        )

        assert heads == [
            "SYSTEM",
            "USER · opening",
            "ASSISTANT · TURN 1",
            "TOOL calc",
            "USER · simulated",
            "ASSISTANT · TURN 2",
            "ASSISTANT · TURN 3",
        ]
        assert "✕ exception" in failed
        assert "no such price" in failed
        assert [
            part
            for part in ("thinking, 560", "thinking, 7", "JSON · ", "not shown to the model")
            if part not in folds
        ] == []
        assert "<think>" not in text
        assert HOSTILE in text
        assert await tab.until("[...document.images].every((image) => image.naturalWidth === 24)")
        assert await tab.js("document.images.length") == 1
        assert "image, not loaded: https://example.org/x.png" in text
        assert "65 tokens of 1, then 17 own" in text
        assert await tab.js("window.hacked") is None
        await tab.js(
            "[...document.querySelectorAll('.box .copy')].find((b) => b.innerText === 'copy').click()"
        )
        await tab.js("[...document.querySelectorAll('.tree button')][1].click()")
        assert await tab.until("location.hash.endsWith('/t/223')")
        assert tab.complaints == []


def looked_at(*pictures: bytes) -> Trajectory:
    """An episode of two turns, before each of which a picture of four tokens is shown."""
    spans, messages = [], []
    for turn, (source, before, picture) in enumerate(
        zip(("prompt", "env"), ("abc", "gh"), pictures, strict=True)
    ):
        image = ImageTokens(len(before), 4, hash_of(picture), picture)
        spans += [replace(span(source, before + "...." + "."), images=(image,)), span("model", "ok", turn)]
        messages += [{"role": "user", "content": [part(picture)]}, {"role": "assistant", "content": "ok"}]
    turns = (Turn(0, messages[1], "stop", 2, start=8), Turn(1, messages[3], "stop", 2, start=17))
    return replace(
        episode(0, 0), turns=turns, messages=tuple(messages), sequences=(TokenSequence(tuple(spans)),)
    )


@needs_browser
@pytest.mark.slow
async def test_images_stand_among_the_tokens_with_their_places(tmp_path):
    there, lost = plain_png((200, 30, 30), 24, 20), plain_png((30, 30, 200), 24, 20)
    run = write_run(tmp_path, "seen", [looked_at(there, lost)])
    (run.path / "images" / f"{hash_of(lost)}.png").unlink()
    page = tmp_path / "view.html"
    page.write_text(build_page([run]))
    async with open_browser() as tab:
        await tab.open(page.as_uri())
        await tab.until("document.querySelectorAll('.box img.shown').length === 1")
        assert await tab.until("document.images[0].naturalWidth === 24")
        assert await tab.js("document.images[0].alt") == "image, tokens 3 to 6 (4)"
        text = str(await tab.js("document.querySelector('.centre').innerText"))
        assert "image, tokens 3 to 6 (4)" in text
        assert "its file is missing: image, tokens 12 to 15 (4)" in text
        shown = await tab.js("[...document.querySelectorAll('[data-place]')].map((t) => +t.dataset.place)")
        assert shown == [0, 1, 2, 7, 8, 9, 10, 11, 16, 17, 18]  # no text stands for an image's tokens
        assert tab.complaints == []


def forked() -> Trajectory:
    """An episode of an agent that had a sub-agent, and asked one turn again."""
    old = talk()
    prompt, said = old.sequences[1].spans
    other = Turn(2, {"role": "assistant", "content": "Sub"}, "stop", 3, sequence=1, start=len(prompt))
    turns = (*old.turns[:2], other, replace(old.turns[2], index=3, sequence=2))
    sub = TokenSequence((prompt, span("model", "Sub", 2)))
    again = TokenSequence((prompt, TokenSpan("model", said.token_ids, said.logprobs, 0, turn=3)))
    messages = (*old.messages[:-1], other.message, old.messages[-1])
    return replace(
        old,
        turns=turns,
        messages=messages,
        sequences=(old.sequences[0], sub, again),
        rewrites=(
            Rewrite(2, "new", old.messages[:1]),
            Rewrite(3, "forked", old.messages[:2], parent=0, shared_tokens=len(prompt)),
        ),
    )


def test_the_data_of_an_episode_have_the_causes_of_its_forks():
    first, second = episode_data(forked())["rewrites"]

    assert (first["cause"], first["parent"], first["shared_tokens"]) == ("new", None, 0)
    assert (second["cause"], second["parent"], second["shared_tokens"]) == ("forked", 0, 65)


@needs_browser
@pytest.mark.slow
async def test_the_tree_of_contexts_says_the_cause_of_each_fork(tmp_path):
    page = tmp_path / "view.html"
    page.write_text(build_page([write_run(tmp_path, "forks", [forked()])]))
    async with open_browser() as tab:
        await tab.open(page.as_uri())
        await tab.until("document.querySelectorAll('.box').length >= 6")
        await tab.key("s")
        await tab.until("document.querySelectorAll('.tree button').length === 3")
        lines = await tab.js(
            "[...document.querySelectorAll('.tree button')].map((b) => [...b.children].map((c) => c.textContent))"
        )
        inner = await tab.js("document.querySelector('.tree ul ul').textContent")
        titles = await tab.js("[...document.querySelectorAll('.tree .pill')].map((p) => p.title)")
        text = str(await tab.js("document.querySelector('.centre').textContent"))

        assert [line[0] for line in lines] == ["context 1", "context 3", "context 2"]
        assert [line[1] for line in lines[1:]] == ["forked", "new"]
        assert inner.startswith("context 3forked 65 tokens of 1, then 17 own")
        assert titles == ["goes on from an earlier reply", "another conversation"]
        assert "2 messages instead of those above (forked: goes on from an earlier reply)" in text
        assert tab.complaints == []


@needs_browser
@pytest.mark.slow
async def test_an_address_leads_to_a_token(tmp_path):
    long_text = "row 0123456789 " * 200
    spans = (span("prompt", "go\n"), span("model", long_text, 0))
    turn = Turn(0, {"role": "assistant", "content": long_text}, "stop", len(spans[1]), start=len(spans[0]))
    long = replace(episode(0, 0), turns=(turn,), sequences=(TokenSequence(spans),), reward=0.0)
    page = tmp_path / "view.html"
    page.write_text(build_page([write_run(tmp_path, "long", [long, episode(0, 1)])]))
    async with open_browser() as tab:
        await tab.open(page.as_uri() + "#/r/0/e/0/t/2900")
        await tab.until("document.querySelectorAll('.t.chosen').length === 1")
        bar = str(await tab.js("document.querySelector('.tokenbar').innerText"))
        assert "token 2900" in bar
        assert "logp" in bar
        assert await tab.js("document.querySelector('.t.chosen').getBoundingClientRect().top < innerHeight")

        await tab.key("n")
        await tab.until("location.hash === '#/r/long/e/0/t/2901'")
        await tab.js("document.querySelector('.box.prompt .t').click()")
        await tab.until("location.hash === '#/r/long/e/0/t/0'")
        assert "not trained" in str(await tab.js("document.querySelector('.tokenbar').innerText"))
        await tab.key("Escape")
        await tab.until("location.hash.endsWith('/e/0')")
        assert await tab.js("document.querySelectorAll('.tokenbar, .t.chosen').length") == 0
        await tab.key("ArrowRight")
        await tab.until("location.hash === '#/r/long/e/1'")
        assert tab.complaints == []


@needs_browser
@pytest.mark.slow
async def test_curves_of_a_training_lead_to_its_steps(tmp_path):
    page = tmp_path / "view.html"
    others = {f"{group}/{name}": 1.0 for group in ("logprobs", "packing", "tasks") for name in "ab"}
    metrics = {HOSTILE: 1.0, "workers/alive": 2.0, **others}
    page.write_text(build_page([write_training(tmp_path, "t", metrics=metrics, scored=True)]))
    async with open_browser() as tab:
        await tab.open(page.as_uri())
        await tab.until("document.querySelectorAll('.plot canvas').length === 2")
        names = await tab.js(
            "[...document.querySelectorAll('.charts .chart b')].map((name) => name.innerText)"
        )
        assert names == ["held-out success", "reward"]
        head = str(await tab.js("document.querySelector('main').innerText"))
        assert [
            when
            for when in ("before the first step", "best during it, step 2", "after step 3")
            if when not in head
        ] == []
        folds = "[...document.querySelectorAll('.folds summary')].map((fold) => fold.innerText)"
        assert await tab.js(folds) == ["inside the training (2)", "eval (2)", "flat (9)"]
        assert "demonstration 1" in head
        assert "#0\n" not in head  # what the model was shown stands apart
        assert "figures of step 3, the last of 3" in head
        assert "2 tasks, 4 scored" in head
        tops = "[...document.querySelectorAll('.folds > details')].map((fold) => fold.offsetTop)"
        assert len(set(await tab.js(tops))) == 1  # on one line, as long as they are closed
        await tab.js("document.querySelectorAll('details > summary').forEach((fold) => fold.click())")
        folds = await tab.js(tops)
        assert len(set(folds)) == len(folds) == 3
        await tab.until(
            "[...document.querySelectorAll('.chart b')].some((name) => name.innerText.includes('onerror'))"
        )

        box = await tab.js(
            "(() => { const box = document.querySelectorAll('.u-over')[1].getBoundingClientRect();"
            " return [box.left, box.top, box.width, box.height]; })()"
        )
        left, top, width, height = box
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            at = {"x": left + width - 2, "y": top + height / 2}
            await tab.call("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, **at)
            if kind == "mouseMoved":
                await tab.until("document.querySelectorAll('.chart')[1].innerText.includes('step 3 0.600')")
        await tab.until("location.hash.endsWith('/step/3')")
        # The address changes before the page of the step is drawn.
        await tab.until("document.body.innerText.includes('groups, best first')")
        text = str(await tab.js("document.body.innerText"))
        assert [word for word in ("held-out at this step", "step 1") if word not in text] == []
        assert await tab.js("document.querySelectorAll('tr.row').length") > 2
        await tab.key("ArrowLeft")
        await tab.until("location.hash.endsWith('/step/2')")

        await tab.js("location.hash = '#/r/0/steps/1/3'")
        await tab.until("document.body.innerText.includes('1 task better')")
        await tab.js(
            "[...document.querySelectorAll('a')].find((a) => a.innerText === 'side by side').click()"
        )
        await tab.until("document.querySelectorAll('.side .box').length >= 8")
        assert "tokens agree" in str(await tab.js("document.body.innerText"))
        await tab.js("document.querySelector('.side a.copy').click()")
        await tab.until("document.querySelectorAll('.tokenbar').length === 1")
        assert await tab.js("window.hacked") is None
        assert tab.complaints == []


@needs_browser
@pytest.mark.slow
async def test_demonstrations_and_held_out_episodes_are_told_apart(tmp_path):
    page = tmp_path / "view.html"
    page.write_text(build_page([write_training(tmp_path, "t")]))
    async with open_browser() as tab:
        await tab.open(page.as_uri())
        for name, count in [("trained on", 12), ("held-out 6", 6), ("demonstration 1", 1), ("all", 19)]:
            await tab.until("document.querySelectorAll('.filter button').length === 4")
            await tab.js(
                f"[...document.querySelectorAll('.filter button')].find((b) => b.innerText === '{name}').click()"
            )
            await tab.until(f"document.querySelector('.filter').innerText.startsWith('{count} of 19')")
        assert tab.complaints == []


@needs_browser
@pytest.mark.slow
async def test_curves_of_several_runs_lie_over_each_other(tmp_path):
    runs = [write_training(tmp_path, name, steps=steps) for name, steps in [("a", 3), ("b", 5), ("c", 2)]]
    page = tmp_path / "view.html"
    page.write_text(build_page(runs))
    async with open_browser() as tab:
        await tab.open(page.as_uri())
        for _ in runs:
            await tab.js("document.querySelector('input[type=checkbox]:not(:checked)').click()")
        await tab.js(
            "[...document.querySelectorAll('button')].find((b) => b.innerText === 'compare 3').click()"
        )
        await tab.until("document.querySelectorAll('.plot canvas').length === 1")
        assert await tab.js("document.querySelectorAll('.swatch').length") == 3
        first = "document.querySelector('.chart').innerText"
        assert "last 0.600 1 0.400" in " ".join(str(await tab.js(first)).split())

        for control, value in [("range", "value = 0.6"), ("checkbox", "checked = true")]:
            await tab.js("window.old = document.querySelector('canvas')")
            await tab.js(
                f"(() => {{ const one = document.querySelector('input[type={control}]'); one.{value};"
                " one.dispatchEvent(new Event('change')); })()"
            )
            await tab.until(
                "document.querySelector('canvas') && document.querySelector('canvas') !== window.old"
            )
        smooth = "document.querySelector('.chart').innerText.includes('0.600')"
        assert await tab.js(smooth) is False
        assert tab.complaints == []


@needs_browser
@pytest.mark.slow
async def test_rewards_of_zero_are_painted_as_the_lowest(tmp_path):
    episodes = [episode(task, member, reward=0.0) for task in range(2) for member in range(64)]
    page = tmp_path / "view.html"
    page.write_text(build_page([write_run(tmp_path, "zero", episodes)]))
    async with open_browser(width=1280) as tab:
        await tab.open(page.as_uri())
        await tab.until("document.querySelectorAll('.grid a').length === 128")

        colours = "[...new Set([...document.querySelectorAll('.grid a')].map((cell) => getComputedStyle(cell).backgroundColor.match(/[\\d.]+/g).map((c) => Math.round(255 * c)).join()))]"
        assert await tab.js(colours) == ["240,242,246"]
        assert await tab.js("document.querySelector('.grid').clientWidth > 780")
        assert (
            await tab.js("document.querySelector('.ends').innerText.split(/\\s+/).join(' ')")
            == "0.00 0.50 1.00"
        )
        await tab.js("document.querySelector('button.column:enabled').click()")
        assert await tab.until("document.getElementById('filter').value === 'reward>=0 reward<0.05'")
        assert "128 of 128" in str(await tab.js("document.querySelector('.filter').innerText"))


@needs_browser
@pytest.mark.slow
async def test_a_run_has_more_rewards_than_a_call_has_arguments(tmp_path):
    data = run_data(write_run(tmp_path, "long", [episode(0, 0)]), vocabulary={})
    (row,) = data["episodes"]
    data["episodes"] = [{**row, "i": n, "k": f"t{n}", "g": f"t{n}"} for n in range(150_000)]
    page = page_json([safe_json(data)], live=False, single=True, sort="")
    (tmp_path / "view.html").write_text(frame([f'<script type="application/json" id="page">{page}</script>']))
    async with open_browser() as tab:
        await tab.open((tmp_path / "view.html").as_uri())

        await tab.until("document.querySelectorAll('.vrow').length > 10")
        assert tab.complaints == []


@needs_browser
@pytest.mark.slow
async def test_big_runs_and_long_episodes_stay_quick(tmp_path):
    many = [episode(task, member) for task in range(1250) for member in range(4)]
    long_text = "row 0123456789 " * 6_600
    spans = (span("prompt", "go\n"), span("model", long_text, 0))
    sequence = TokenSequence(spans)
    turn = Turn(0, {"role": "assistant", "content": long_text}, "stop", len(spans[1]), start=len(spans[0]))
    many.append(
        Trajectory(
            env_id="shop/Math-v0", task_id="long", seed=0, group_id="long", stop_reason=StopReason.FINAL_ANSWER,
            turns=(turn,), sequences=(sequence,), messages=({"role": "user", "content": "go"},), reward=-1.0,
        )
    )  # fmt: skip
    page = tmp_path / "view.html"
    page.write_text(build_page([write_run(tmp_path, "big", many)], max_bytes=2_000_000))
    async with open_browser() as tab:
        await tab.open(page.as_uri())
        await tab.js("location.hash = '#/r/0'")
        await tab.until("document.querySelectorAll('.vrow').length > 10")
        rows = await tab.js("document.querySelectorAll('.vrow').length")
        await tab.js("document.querySelector('.vlist').scrollTop = 28 * 4990")
        await tab.until(
            "[...document.querySelectorAll('.vrow')].some((row) => row.textContent.includes('#4995'))"
        )
        await tab.js("location.hash = '#/r/0/e/5000'")
        await tab.until("document.querySelectorAll('.box.model .t').length > 100")
        tokens = await tab.js("document.querySelectorAll('.t').length")

        assert len(spans[1]) > 98_000
        assert rows < 60
        assert tokens < 20_000
        assert tab.complaints == []


@needs_browser
@pytest.mark.slow
async def test_live_page_follows_a_running_run(tmp_path):
    with (
        RunWriter.create("x", runs_dir=tmp_path, run_id="now", env_ids=("shop/Math-v0",)) as writer,
        live(tmp_path) as server,
    ):
        async with open_browser() as tab:
            await tab.open(server.url)
            await tab.until("document.body.innerText.includes('no finished episode yet')")
            writer.append(episode(0, 0))
            await tab.until("document.querySelectorAll('.vrow').length === 1")
            await tab.js("location.hash = '#/r/0/e/0'")
            await tab.until("document.querySelectorAll('.box').length >= 4")
            assert tab.complaints == []
    assert len(Run(writer.path)) == 1


@needs_browser
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["empty", "failed", "partial"])
async def test_runs_without_the_usual_are_shown_sensibly(tmp_path, kind):
    from agentenv.core import EpisodeError

    lost = EpisodeError("engine", "EngineUnavailable", "503")
    episodes = {
        "empty": [],
        "failed": [episode(0, m, stop=StopReason.ABORTED, error=lost) for m in range(3)],
        "partial": [episode(0, 0), episode(1, 0)],
    }[kind]
    page = tmp_path / "view.html"
    page.write_text(
        build_page([write_run(tmp_path, kind, episodes)], max_bytes=0 if kind == "partial" else 1_000_000)
    )
    async with open_browser() as tab:
        await tab.open(page.as_uri())
        text = str(await tab.js("document.body.innerText"))
        assert {"empty": "no finished episode yet", "failed": "EngineUnavailable", "partial": "episodes"}[
            kind
        ] in text
        if kind == "partial":
            await tab.js("location.hash = '#/r/0/e/1'")
            await tab.until("document.body.innerText.includes('agentenv view partial#1')")
        assert tab.complaints == []
    await asyncio.sleep(0)


@needs_browser
@pytest.mark.slow
async def test_the_workers_and_servers_of_a_run_are_tables(tmp_path):
    run = write_run(tmp_path, "crew", [episode(0, 0), episode(1, 0)])
    busy = {"worker": "w1", "node": "gpu-7", "pid": 77, "live": 5, "rss_mb": 80.5, "cpu_s": 2.0}
    busy |= {"done": 3, "lag_p99_s": 0.004, "threads": 9, "abandoned": 2}
    busy["waits"] = {"engine": {"episodes": 4, "longest_s": 61.0}}
    rows = [
        {**busy, "live": 0},
        busy,
        {"worker": "<b>w2</b>", "silent": True},
        {"worker": "driver", "deaths": 1, "retired": 2},
    ]
    server = {"server": "gpu1:8000", "sessions": 12, "in_flight": 7, "version": 3, "failures": 1, "used": 2}
    run_servers = [
        {**server, "processes": 3, "problem": ""},
        {
            **server,
            "server": "gpu2:8000",
            "version": None,
            "used": 0,
            "processes": 3,
            "problem": "<i>hangs</i>",
        },
    ]
    (run.path / "servers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in run_servers))
    (run.path / "workers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "view.html").write_text(build_page([Run(run.path)]))
    async with open_browser() as tab:
        await tab.open((tmp_path / "view.html").as_uri())
        await tab.until("document.body.innerText.includes('gpu-7')")
        text = str(await tab.js("document.body.innerText"))

        assert "engine 4 (61.00 s)" in text
        assert "9 (2 hang)" in text
        assert "<b>w2</b>" in text
        assert "does not answer" in text
        assert "1 workers died" in text
        assert "2 replaced because of hung threads" in text
        lines = [line.split("\t") for line in text.splitlines() if line.startswith("gpu")]
        assert lines == [
            ["gpu1:8000", "12", "7", "3", "1", "2 of 3", ""],
            ["gpu2:8000", "12", "7", "\N{EN DASH}", "1", "0 of 3", "<i>hangs</i>"],
        ]
        assert text.count("gpu-7") == 1
        assert tab.complaints == []


@needs_browser
@pytest.mark.slow
async def test_live_page_keeps_its_place_when_a_run_appears(tmp_path):
    with (
        RunWriter.create("x", runs_dir=tmp_path, run_id="first", env_ids=("shop/Math-v0",)) as writer,
        live(tmp_path) as server,
    ):
        for task in range(60):
            writer.append(episode(task, 0))
        async with open_browser() as tab:
            await tab.open(server.url)
            await tab.until("document.querySelectorAll('.vrow').length > 10")
            await tab.js("document.querySelector('details > summary').click()")
            await tab.js("document.querySelector('.vlist').scrollTop = 700; scrollTo(0, 300)")
            await tab.until("document.querySelector('.vlist').scrollTop === 700 && scrollY === 300")

            write_run(tmp_path, "second", [episode(0, 0)])
            await tab.until("document.querySelector('header').innerText.includes('new run second')")
            assert await tab.js("document.querySelector('header').innerText.includes('first')")
            assert await tab.js("document.querySelector('details').open")
            assert await tab.js("document.querySelector('.vlist').scrollTop") == 700
            assert await tab.js("scrollY") == 300
            assert await tab.js("location.hash") == "#/r/first"

            await tab.js("location.hash = '#/r/0/e/3'")
            await tab.until("document.querySelectorAll('.box').length >= 4")
            write_run(tmp_path, "third", [episode(0, 0)])
            await tab.js("location.hash = '#/r/1'")
            await tab.until("document.querySelector('header').innerText.includes('second')")
            await tab.js("location.hash = '#/'")
            await tab.until("document.querySelectorAll('tr.row').length === 3")
            assert tab.complaints == []


CONTRAST = """(() => {
  const parse = (text) => {
    const n = text.match(/[\\d.]+/g).map(Number);
    const rgb = n.slice(0, 3).map((c) => (text.startsWith("color(") ? 255 * c : c));
    return [...rgb, n.length < 4 ? 1 : n[3]];
  };
  const over = (top, under) => top.slice(0, 3).map((c, n) => c * top[3] + under[n] * (1 - top[3]));
  const light = (rgb) => rgb.map((c) => c / 255).map((c) => (c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
    .reduce((sum, c, n) => sum + c * [0.2126, 0.7152, 0.0722][n], 0);
  const backOf = (node) => {
    const layers = [];
    for (let one = node; one; one = one.parentElement) layers.push(parse(getComputedStyle(one).backgroundColor));
    return layers.reverse().reduce((under, top) => over(top, under), [255, 255, 255]);
  };
  const bad = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode.parentElement;
    if (!walker.currentNode.textContent.trim() || !node.getClientRects().length) continue;
    if (node.closest("button:disabled, script, .same")) continue;
    const back = backOf(node);
    const [a, b] = [light(over(parse(getComputedStyle(node).color), back)), light(back)];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) bad.push(ratio.toFixed(2) + " " + node.className + " " + walker.currentNode.textContent.slice(0, 30));
  }
  return [...new Set(bad)].slice(0, 8);
})()"""
UNREACHABLE = """[...document.querySelectorAll("a, button, input, select, summary")]
  .filter((node) => !(node.textContent.trim() || node.getAttribute("aria-label") || node.closest("label")))
  .map((node) => node.outerHTML.slice(0, 100))"""


@needs_browser
@pytest.mark.slow
@pytest.mark.parametrize("theme", ["light", "dark"])
async def test_pages_fit_small_screens_and_can_be_read(tmp_path, theme):
    runs = [
        write_run(tmp_path, "a-run-with-quite-a-long-name-0", varied()),
        write_training(tmp_path, "t", steps=4),
        write_training(tmp_path, "u", steps=5),
        write_run(tmp_path, "talk", [talk()]),
        write_run(tmp_path, "wide", [episode(0, member, reward=member / 80) for member in range(80)]),
    ]
    page = tmp_path / "view.html"
    page.write_text(build_page(runs))
    routes = [
        "#/",
        "#/r/0",
        "#/r/1",
        "#/r/4",
        "#/compare/1/2",
        "#/r/1/step/2",
        "#/r/1/steps/1/3",
        "#/side/1/3/1/9",
    ]
    async with open_browser() as tab:
        for width in (390, 768, 1280):
            await tab.call(
                "Emulation.setDeviceMetricsOverride",
                width=width,
                height=844,
                deviceScaleFactor=1,
                mobile=width < 500,
            )
            await tab.open(page.as_uri())
            await tab.js(f"document.documentElement.dataset.theme = '{theme}'")
            await tab.js("location.hash = '#/none'")
            for route in [*routes, "#/r/0/e/2", "#/r/3/e/0", "#/r/3/e/0/t/70", "messages"]:
                if route == "messages":
                    await tab.key("s")
                    await tab.until("document.querySelectorAll('.call').length > 0")
                else:
                    await tab.js(
                        f"document.querySelector('header').dataset.old = 1; location.hash = '{route}'"
                    )
                    await tab.until("!document.querySelector('header').dataset.old")
                overflow = "document.documentElement.scrollWidth - innerWidth"
                assert (route, width, await tab.js(overflow)) == (route, width, 0)
                assert (route, width, await tab.js(CONTRAST)) == (route, width, [])
                assert (route, await tab.js(UNREACHABLE)) == (route, [])
        assert tab.complaints == []


@needs_browser
@pytest.mark.slow
async def test_a_token_and_a_step_are_reached_by_the_keyboard(tmp_path):
    page = tmp_path / "view.html"
    page.write_text(build_page([write_training(tmp_path, "t")]))
    async with open_browser() as tab:
        await tab.open(page.as_uri())
        await tab.until("document.querySelectorAll('select option').length === 4")
        await tab.js(
            "(() => { const box = document.querySelector('select'); box.value = '2';"
            " box.dispatchEvent(new Event('change')); })()"
        )
        await tab.until("location.hash.endsWith('/step/2')")
        await tab.js("location.hash = '#/r/0/e/2'")
        await tab.until("document.querySelectorAll('.box').length >= 4")
        await tab.key("j")
        await tab.key("j")
        await tab.key("n")
        await tab.until("location.hash.endsWith('/e/2/t/66')")
        assert tab.complaints == []


@needs_browser
@pytest.mark.slow
async def test_links_name_runs_filters_and_go_from_the_older_run_to_the_newer(tmp_path):
    """A run that comes later takes no address away, and an improvement reads as one."""
    newer = write_run(
        tmp_path, "a-new", [replace(one, reward=1.0) for one in varied(4) if one.reward is not None]
    )
    older = write_run(
        tmp_path, "old 1", [replace(one, reward=0.0) for one in varied(4) if one.reward is not None]
    )
    for run, day in ((older, 1), (newer, 2)):
        replace(run.info, created=f"2026-01-0{day}T00:00:00+00:00", reward_weights={"format": 0.25}).write(
            run.path
        )
    page = tmp_path / "view.html"
    page.write_text(build_page([Run(newer.path), Run(older.path)]))
    async with open_browser() as tab:
        await tab.open(page.as_uri())
        await tab.js("document.querySelectorAll('input[type=checkbox]').forEach((box) => box.click())")
        await tab.js(
            "document.querySelectorAll('input[type=checkbox]:not(:checked)').forEach((box) => box.click())"
        )
        await tab.js(
            "[...document.querySelectorAll('button')].find((b) => b.innerText === 'compare 2').click()"
        )
        await tab.until("location.hash === '#/compare/old%201/a-new'")
        await tab.until("document.querySelector('.cards .card').innerText.includes('+1.00')")

        await tab.js("location.hash = '#/r/old%201?reward%3D0'")
        await tab.until("document.querySelectorAll('.vrow').length > 0")
        assert await tab.js("document.getElementById('filter').value") == "reward=0"
        await tab.js(
            "(() => { const box = document.getElementById('filter'); box.value = 'stop:max_turns';"
            " box.dispatchEvent(new Event('input'));"
            " box.dispatchEvent(new KeyboardEvent('keydown', { key: 'Enter', bubbles: true })); })()"
        )
        await tab.until("/^#\\/r\\/old%201\\/e\\/\\d+$/.test(location.hash)")
        await tab.until("document.querySelectorAll('.outcome').length")
        assert "max_turns" in str(await tab.js("document.querySelector('.outcome').innerText"))
        await tab.js("history.back()")
        await tab.until("document.getElementById('filter')?.value === 'stop:max_turns'")
        assert await tab.js("location.hash") == "#/r/old%201?stop%3Amax_turns"
        await tab.key("u")
        await tab.until("document.querySelectorAll('tr.row').length === 2")
        assert await tab.js("document.getElementById('filter').value") == ""
        await tab.js("location.hash = '#/r/a-new'")
        await tab.until("document.querySelectorAll('.vrow').length")
        assert await tab.js("document.querySelector('.vlist').getBoundingClientRect().top") < 700
        assert tab.complaints == []
