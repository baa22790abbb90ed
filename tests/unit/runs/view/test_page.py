"""The viewer's page: small, self-contained, and deaf to what hostile text asks of it."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from agentenv.core import EpisodeError, Rewrite, StopReason, TokenSequence, TokenSpan, Trajectory, Turn
from agentenv.core.images import ImageTokens, hash_of
from agentenv.runs import compare, report_on
from agentenv.runs.store import Run, RunWriter, list_runs
from agentenv.runs.store.vocabulary import TokenTexts, token_bytes
from agentenv.runs.view import build_page, show
from agentenv.runs.view.data import episode_data, page_json, run_data, safe_json
from agentenv.runs.view.page import asset, frame
from helpers.browser import CHROMIUM, open_browser, viewer
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

_missing = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")


def in_browser(test):
    return pytest.mark.slow(_missing(test))


class Tags(HTMLParser):
    """Collects what a browser would see as elements."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))


def missing_in(text: object, *words: str) -> list[str]:
    return [word for word in words if word not in str(text)]


# The page without a browser -----------------------------------------------------------------


def test_page_without_data_is_small_and_has_the_licence_of_the_library_that_it_contains(tmp_path):
    """Without the library that draws the curves, which is about 50 kB, it has less than 125 kB."""
    page = build_page([write_run(tmp_path, "empty", [])])

    assert len(page.encode()) - len(asset("vendor/uPlot.js").encode()) < 128_000
    assert asset("vendor/uPlot.LICENSE") in page
    assert "Permission is hereby granted, free of charge" in page


def test_page_reaches_for_nothing_outside_itself_and_its_own_script_is_the_only_one(tmp_path):
    hostile = episode(9, 0, output=HOSTILE, answer=HOSTILE)
    page = build_page([write_run(tmp_path, "one", [*varied(2), hostile])])
    tags = Tags(page).tags
    scripts = {str(attrs.get("type")) for tag, attrs in tags if tag == "script"}
    own = page.replace("/*! https://github.com/leeoniya/uPlot (v1.6.32) */", "")

    assert scripts == {"None", "application/json", "application/octet-stream"}
    assert not [tag for tag, attrs in tags if tag == "img" or "src" in attrs or "href" in attrs]
    assert "connect-src &#x27;none&#x27;" in page
    assert not re.search(r"https?://(?!www\.w3\.org)", own)


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
    ((tag, attrs),) = Tags(shown._repr_html_()).tags

    assert (tag, attrs["sandbox"]) == ("iframe", "allow-scripts")


def test_text_of_a_task_stands_once_in_the_page_and_forks_have_their_causes(tmp_path):
    asked = [replace(episode(n // 4, n % 4), task={"answer": n // 4}) for n in range(12)]
    data = run_data(write_run(tmp_path, "asked", asked), vocabulary={})

    assert data["tasks"] == [("How many pencils?", answer) for answer in "012"]
    assert [row["Q"] for row in data["episodes"]] == [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2]
    told = [(one["cause"], one["parent"], one["shared_tokens"]) for one in episode_data(forked())["rewrites"]]
    assert told == [("new", None, 0), ("forked", 0, 65)]


def test_vocabulary_entries_become_the_bytes_they_stand_for():
    of_bytes = {"Ġthe": b" the", "Ċ": b"\n", "æ¼": b"\xe6\xbc"}
    of_pieces = {"▁the": b" the", "<0x0A>": b"\n"}
    for byte_level, entries in ((True, of_bytes), (False, of_pieces)):
        assert {piece: token_bytes(piece, byte_level=byte_level) for piece in entries} == entries

    text = f"<|im_start|>user\n{ODD}{HOSTILE}"
    ids = TOKENIZER.encode(text)
    words = TokenTexts(TOKENIZER.backend).fresh([ids])
    assert "".join(words[token] for token in ids).encode("latin-1").decode() == text


HOSTILE_FILES = {
    "run.json": ["[" * 100_000, '{"id": "bad", "config": {"success_at": ' + "[" * 900 + "]" * 900 + "}}"],
    "trajectories.jsonl": ["[" * 100_000, '{"messages": [5]}'],
    "index.jsonl": [
        "[" * 100_000,
        json.dumps(
            {"env_id": 1, "task_id": [], "group_id": {}, "member": "x", "stop_reason": "max_turns"}
            | {"reward": "x", "tools": [[1, "x"]], "metrics": 5, "timings": {"total_s": []}}
            | {"offset": 0, "size": 9}
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
    with live(tmp_path) as server:
        status, answer = fetch(server.url)

    assert status == 200
    for shown in (build_page(runs), answer):
        data = json.loads(shown.split('id="page">', 1)[1].split("</script>", 1)[0])
        assert "good" in [run["id"] for run in data["runs"]]


def forked() -> Trajectory:
    """An episode of an agent that had a sub-agent, and asked one turn again."""
    old = talk()
    prompt, said = old.sequences[1].spans
    other = Turn(2, {"role": "assistant", "content": "Sub"}, "stop", 3, sequence=1, start=len(prompt))
    sub = TokenSequence((prompt, span("model", "Sub", 2)))
    again = TokenSequence((prompt, TokenSpan("model", said.token_ids, said.logprobs, 0, turn=3)))
    return replace(
        old,
        turns=(*old.turns[:2], other, replace(old.turns[2], index=3, sequence=2)),
        messages=(*old.messages[:-1], other.message, old.messages[-1]),
        sequences=(old.sequences[0], sub, again),
        rewrites=(
            Rewrite(2, "new", old.messages[:1]),
            Rewrite(3, "forked", old.messages[:2], parent=0, shared_tokens=len(prompt)),
        ),
    )


# The page in a browser ----------------------------------------------------------------------


@in_browser
async def test_pages_in_a_real_browser(tmp_path):
    metrics = [{"step": n, "reward": n / 10, "entropy": 2 - n / 10} for n in range(1, 11)]
    first = write_run(tmp_path, "b", varied(), metrics=metrics, notes=True)
    async with viewer(tmp_path, first, write_run(tmp_path, "a", varied(9))) as tab:
        await tab.wait("tr.row", "== 2")
        for _ in range(2):
            await tab.click("input[type=checkbox]:not(:checked)")
        await tab.go("#/compare/0/1")
        await tab.shows("tasks better")

        await tab.go("#/r/0")
        await tab.wait(".vrow", "> 10")
        await tab.wait(".plot canvas", "== 1")
        assert "env: KeyError: no price for" in await tab.text()

        await tab.go("#/r/0/e/1")
        await tab.wait(".box", ">= 4")
        await tab.shows("A shop sells 17 boxes", ".centre")
        assert "TOOL calc" in await tab.text(".centre")
        assert await tab.count(".box.prompt .t:not(.off), .box.model .t.off") == 0
        assert "✓ yes" in await tab.text(".right")
        assert "+0.50" in await tab.text(".mem")
        names = ("mask", "entropy", "ratio", "diff", "messages", "logprob")
        for key, name in zip("merdsl", names, strict=True):
            await tab.key(key)
            await tab.until(f"document.querySelector('.tabs .on').textContent === '{name}'")
        await tab.key("ArrowRight")
        await tab.until("document.querySelector('.mem.on b').textContent === '#2'")
        await tab.key("j")
        await tab.key("j")
        assert await tab.count(".box.now") == 1
        await tab.key("t")
        assert await tab.js("document.documentElement.dataset.theme") == "dark"
        await tab.key("u")
        await tab.until("/^#\\/r\\/[^/]+$/.test(location.hash)")


@in_browser
async def test_hostile_and_odd_text_is_shown_and_never_run(tmp_path):
    bad = [episode(0, member, output=HOSTILE + ODD, answer=HOSTILE + ODD) for member in range(2)]
    async with viewer(tmp_path, write_run(tmp_path, "hostile", bad)) as tab:
        await tab.go("#/r/0/e/0")
        await tab.wait(".box", ">= 4")
        text = await tab.text(".centre")
        await tab.key("s")
        await tab.shows("messages", ".tabs .on")

        assert missing_in(text, HOSTILE, "漢字", "U+202E") == []
        assert "\u202e" not in text
        assert await tab.js("window.hacked") is None
        assert await tab.count("img") == 0


def _asking(task: int, question: str):
    plain = episode(task, 0)
    said = ({"role": "user", "content": question}, *plain.messages[1:])
    return replace(plain, messages=said, task={"answer": "391"})


@in_browser
async def test_lists_say_what_each_task_was(tmp_path):
    head = "Answer with a number and nothing else. "
    asked = write_run(tmp_path, "asked", [_asking(n, f"{head}What is {n} + 1?") for n in range(3)])
    twins = write_run(tmp_path, "twins", [_asking(task, f"Play. {HOSTILE}") for task in range(2)])
    async with viewer(tmp_path, asked, twins) as tab:
        await tab.go("#/r/0")
        await tab.wait(".vrow", "== 3")
        first = await tab.text(".vrow")
        assert "… 0 + 1?" in first
        assert first.index("391") < first.index("1.000")
        assert "… 2 + 1?" in await tab.text(".grid")

        await tab.go("#/r/1")
        await tab.wait(".vrow", "== 2")
        assert "order-0001 · Play. </script>" in await tab.text()

        await tab.go("#/r/0/e/1")
        await tab.wait(".outcome")
        outcome = await tab.text(".outcome")
        assert missing_in(outcome, "What is 1 + 1?", "17 boxes hold", "391", "1.000") == []


@in_browser
@pytest.mark.parametrize("whole_numbers", [True, False])
async def test_figures_follow_the_filter_and_are_those_of_the_report(tmp_path, whole_numbers):
    """A filter that selects what the report counts gives the report's own figures."""
    episodes = list(varied(12))
    if whole_numbers:
        episodes = [one if one.reward is None else replace(one, reward=round(one.reward)) for one in episodes]
    run = write_run(tmp_path, "a", episodes)
    cut = write_run(tmp_path, "b", [one for one in episodes if one.stop_reason is StopReason.MAX_TURNS])

    async with viewer(tmp_path, run, cut, route="#/r/0") as tab:
        for text, chosen in [("reward>-9", run), ("reward>-9 stop:max_turns", cut)]:
            report = report_on(one for one in chosen.summaries if one.scored)
            await tab.wait(".vrow")
            await tab.fill("#filter", text)
            await tab.shows(f"{report.num_scored} of", ".filter")
            cards = " ".join((await tab.text("main .cards")).split())
            assert report.reward
            assert not missing_in(
                cards,
                f"{report.reward.mean:.3f}",
                f"95 % {report.reward.low:.3f} to {report.reward.high:.3f}",
                f"{report.num_tasks} tasks",
                " ".join(f"@{k} {value:.2f}" for k, value in report.pass_at.items()),
                f"{report.num_groups_with_spread}/{report.num_groups}",
            )
            assert await tab.count(".grid a") == report.num_scored


@in_browser
async def test_list_of_runs_has_figures_and_the_comparison_its_interval(tmp_path):
    metrics = [{"step": n, "reward": n / 40} for n in range(1, 38)]
    graded = [episode(task, 0, reward=task % 3 / 2) for task in range(20)]
    solved = [episode(task, 0, reward=1.0) for task in range(20)]
    before = write_run(tmp_path, "a", graded, terms=("temperature 0",))
    after = write_run(tmp_path, "b", solved, metrics=metrics, terms=("temperature 1",))
    difference = compare(before, after).difference
    assert difference
    async with viewer(tmp_path, before, after) as tab:
        assert missing_in(await tab.text("main"), "37", "0 s", " to ") == []
        assert await tab.count("th.num") == 4
        await tab.fill("#filter", "train")
        await tab.wait("tr.row", "== 1")

        await tab.go("#/compare/0/1")
        await tab.shows("change of the mean reward")
        shown = re.findall(r"[+\u2212][\d.]+", await tab.text(".cards .card"))
        mean, low, high = (float(number.replace("\u2212", "-")) for number in shown)
        assert await tab.text("main > .warn") == (
            "not the same in both runs: " + "; ".join(compare(before, after).changed)
        )
        assert mean == pytest.approx(difference.mean, abs=0.006)
        assert (low, high) == pytest.approx((difference.low, difference.high), abs=0.03)


@in_browser
async def test_messages_mark_errors_show_images_and_fold_what_is_long(tmp_path):
    async with viewer(tmp_path, write_run(tmp_path, "talk", [talk()])) as tab:
        await tab.wait(".box", ">= 6")
        assert "USER · AFTER TURN" not in await tab.text(".centre")
        await tab.key("s")
        await tab.shows("messages", ".tabs .on")
        text, failed = await tab.text(".centre"), await tab.text(".box.failed")
        folds = await tab.texts(".fold summary")

        assert await tab.texts(".box h4 > b") == [
            *("SYSTEM", "USER · opening", "ASSISTANT · TURN 1", "TOOL calc"),
            *("USER · simulated", "ASSISTANT · TURN 2", "ASSISTANT · TURN 3"),
        ]
        assert missing_in(failed, "✕ exception", "no such price") == []
        assert missing_in(folds, "thinking, 560", "thinking, 7", "JSON · ", "not shown to the model") == []
        shown = (HOSTILE, "image, not loaded: https://example.org/x.png", "65 tokens of 1, then 17 own")
        assert missing_in(text, *shown) == []
        assert "<think>" not in text
        await tab.until("[...document.images].every((image) => image.naturalWidth === 24)")
        assert await tab.count("img") == 1
        assert await tab.js("window.hacked") is None
        await tab.click(".box .copy", "copy")
        await tab.js("[...document.querySelectorAll('.tree button')][1].click()")
        await tab.until("location.hash.endsWith('/t/223')")


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


@in_browser
async def test_images_stand_among_the_tokens_with_their_places(tmp_path):
    there, lost = plain_png((200, 30, 30), 24, 20), plain_png((30, 30, 200), 24, 20)
    run = write_run(tmp_path, "seen", [looked_at(there, lost)])
    (run.path / "images" / f"{hash_of(lost)}.png").unlink()
    async with viewer(tmp_path, run) as tab:
        await tab.wait(".box img.shown", "== 1")
        await tab.until("document.images[0].naturalWidth === 24")
        assert await tab.js("document.images[0].alt") == "image, tokens 3 to 6 (4)"
        told = ("image, tokens 3 to 6 (4)", "its file is missing: image, tokens 12 to 15 (4)")
        assert missing_in(await tab.text(".centre"), *told) == []
        shown = await tab.js("[...document.querySelectorAll('[data-place]')].map((t) => +t.dataset.place)")
        assert shown == [0, 1, 2, 7, 8, 9, 10, 11, 16, 17, 18]  # no text stands for an image's tokens


@in_browser
async def test_the_tree_of_contexts_says_the_cause_of_each_fork(tmp_path):
    async with viewer(tmp_path, write_run(tmp_path, "forks", [forked()])) as tab:
        await tab.wait(".box", ">= 6")
        await tab.key("s")
        await tab.wait(".tree button", "== 3")
        lines = await tab.js(
            "[...document.querySelectorAll('.tree button')].map((b) => [...b.children].map((c) => c.textContent))"
        )
        inner = await tab.js("document.querySelector('.tree ul ul').textContent")
        titles = await tab.js("[...document.querySelectorAll('.tree .pill')].map((p) => p.title)")
        text = await tab.js("document.querySelector('.centre').textContent")

        assert [line[0] for line in lines] == ["context 1", "context 3", "context 2"]
        assert [line[1] for line in lines[1:]] == ["forked", "new"]
        assert inner.startswith("context 3forked 65 tokens of 1, then 17 own")
        assert titles == ["goes on from an earlier reply", "another conversation"]
        assert "2 messages instead of those above (forked: goes on from an earlier reply)" in text


def of_one_turn(text: str, **changes) -> Trajectory:
    spans = (span("prompt", "go\n"), span("model", text, 0))
    turn = Turn(0, {"role": "assistant", "content": text}, "stop", len(spans[1]), start=len(spans[0]))
    return replace(episode(0, 0), turns=(turn,), sequences=(TokenSequence(spans),), **changes)


@in_browser
async def test_an_address_leads_to_a_token(tmp_path):
    run = write_run(tmp_path, "long", [of_one_turn("row 0123456789 " * 200, reward=0.0), episode(0, 1)])
    async with viewer(tmp_path, run, route="#/r/0/e/0/t/2900") as tab:
        await tab.wait(".t.chosen", "== 1")
        assert missing_in(await tab.text(".tokenbar"), "token 2900", "logp") == []
        assert await tab.js("document.querySelector('.t.chosen').getBoundingClientRect().top < innerHeight")

        await tab.key("n")
        await tab.until("location.hash === '#/r/long/e/0/t/2901'")
        await tab.click(".box.prompt .t")
        await tab.until("location.hash === '#/r/long/e/0/t/0'")
        assert "not trained" in await tab.text(".tokenbar")
        await tab.key("Escape")
        await tab.until("location.hash.endsWith('/e/0')")
        assert await tab.count(".tokenbar, .t.chosen") == 0
        await tab.key("ArrowRight")
        await tab.until("location.hash === '#/r/long/e/1'")


@in_browser
async def test_curves_of_a_training_lead_to_its_steps(tmp_path):
    others = {f"{group}/{name}": 1.0 for group in ("logprobs", "packing", "tasks") for name in "ab"}
    metrics = {HOSTILE: 1.0, "workers/alive": 2.0, **others}
    async with viewer(tmp_path, write_training(tmp_path, "t", metrics=metrics, scored=True)) as tab:
        await tab.wait(".plot canvas", "== 2")
        assert await tab.texts(".charts .chart b") == ["held-out success", "reward"]
        head = await tab.text("main")
        assert not missing_in(
            head,
            *("before the first step", "best during it, step 2", "after step 3", "demonstration 1"),
            *("figures of step 3, the last of 3", "2 tasks, 4 scored"),
        )
        assert "#0\n" not in head  # what the model was shown stands apart
        assert await tab.texts(".folds summary") == ["inside the training (2)", "eval (2)", "flat (9)"]
        tops = "[...document.querySelectorAll('.folds > details')].map((fold) => fold.offsetTop)"
        assert len(set(await tab.js(tops))) == 1  # on one line, as long as they are closed
        await tab.js("document.querySelectorAll('details > summary').forEach((fold) => fold.click())")
        assert len(set(await tab.js(tops))) == 3
        await tab.shows("onerror", ".folds")

        left, top, width, height = await tab.js(
            "(() => { const box = document.querySelectorAll('.u-over')[1].getBoundingClientRect();"
            " return [box.left, box.top, box.width, box.height]; })()"
        )
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            at = {"x": left + width - 2, "y": top + height / 2}
            await tab.call("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, **at)
            if kind == "mouseMoved":
                await tab.until("document.querySelectorAll('.chart')[1].innerText.includes('step 3 0.600')")
        await tab.until("location.hash.endsWith('/step/3')")
        await tab.shows("groups, best first")  # the address changes before the page of the step is drawn
        assert missing_in(await tab.text(), "held-out at this step", "step 1") == []
        assert await tab.count("tr.row") > 2
        await tab.key("ArrowLeft")
        await tab.until("location.hash.endsWith('/step/2')")

        await tab.go("#/r/0/steps/1/3")
        await tab.shows("1 task better")
        await tab.click("a", "side by side")
        await tab.wait(".side .box", ">= 8")
        assert "tokens agree" in await tab.text()
        await tab.click(".side a.copy")
        await tab.wait(".tokenbar", "== 1")
        assert await tab.js("window.hacked") is None


@in_browser
async def test_roles_and_steps_are_chosen_and_a_token_is_reached_by_the_keyboard(tmp_path):
    async with viewer(tmp_path, write_training(tmp_path, "t")) as tab:
        for name, count in [("trained on", 12), ("held-out 6", 6), ("demonstration 1", 1), ("all", 19)]:
            await tab.wait(".filter button", "== 4")
            await tab.click(".filter button", name)
            await tab.shows(f"{count} of 19", ".filter")
        await tab.wait("select option", "== 4")
        await tab.fill("select", "2", event="change")
        await tab.until("location.hash.endsWith('/step/2')")
        await tab.go("#/r/0/e/2")
        await tab.wait(".box", ">= 4")
        for key in "jjn":
            await tab.key(key)
        await tab.until("location.hash.endsWith('/e/2/t/66')")


@in_browser
async def test_curves_of_several_runs_lie_over_each_other(tmp_path):
    runs = [write_training(tmp_path, name, steps=steps) for name, steps in [("a", 3), ("b", 5), ("c", 2)]]
    async with viewer(tmp_path, *runs) as tab:
        for _ in runs:
            await tab.click("input[type=checkbox]:not(:checked)")
        await tab.click("button", "compare 3")
        await tab.wait(".plot canvas", "== 1")
        assert await tab.count(".swatch") == 3
        assert "last 0.600 1 0.400" in " ".join((await tab.text(".chart")).split())

        for control, value in [("range", "value = 0.6"), ("checkbox", "checked = true")]:
            await tab.js("window.old = document.querySelector('canvas')")
            await tab.js(
                f"(() => {{ const one = document.querySelector('input[type={control}]'); one.{value};"
                " one.dispatchEvent(new Event('change')); })()"
            )
            await tab.until(
                "document.querySelector('canvas') && document.querySelector('canvas') !== window.old"
            )
        assert "0.600" not in await tab.text(".chart")


@in_browser
async def test_rewards_of_zero_are_painted_as_the_lowest(tmp_path):
    episodes = [episode(task, member, reward=0.0) for task in range(2) for member in range(64)]
    async with viewer(tmp_path, write_run(tmp_path, "zero", episodes), width=1280) as tab:
        await tab.wait(".grid a", "== 128")
        colours = "[...new Set([...document.querySelectorAll('.grid a')].map((cell) => getComputedStyle(cell).backgroundColor.match(/[\\d.]+/g).map((c) => Math.round(255 * c)).join()))]"
        assert await tab.js(colours) == ["240,242,246"]
        assert await tab.js("document.querySelector('.grid').clientWidth > 780")
        assert (await tab.text(".ends")).split() == ["0.00", "0.50", "1.00"]
        await tab.click("button.column:enabled")
        await tab.until("document.getElementById('filter').value === 'reward>=0 reward<0.05'")
        assert "128 of 128" in await tab.text(".filter")


@in_browser
async def test_a_run_has_more_rewards_than_a_call_has_arguments(tmp_path):
    data = run_data(write_run(tmp_path, "long", [episode(0, 0)]), vocabulary={})
    (row,) = data["episodes"]
    data["episodes"] = [{**row, "i": n, "k": f"t{n}", "g": f"t{n}"} for n in range(150_000)]
    page = page_json([safe_json(data)], live=False, single=True, sort="")
    (tmp_path / "view.html").write_text(frame([f'<script type="application/json" id="page">{page}</script>']))
    async with open_browser() as tab:
        await tab.open((tmp_path / "view.html").as_uri())

        await tab.wait(".vrow", "> 10")
        assert tab.complaints == []


@in_browser
async def test_of_big_runs_and_long_episodes_a_part_is_drawn(tmp_path):
    many = [episode(task, member) for task in range(1250) for member in range(4)]
    long = of_one_turn("row 0123456789 " * 6_600, task_id="long", group_id="long", reward=-1.0)
    run = write_run(tmp_path, "big", [*many, long])
    async with viewer(tmp_path, run, route="#/r/0", max_bytes=2_000_000) as tab:
        await tab.wait(".vrow", "> 10")
        assert await tab.count(".vrow") < 60
        await tab.js("document.querySelector('.vlist').scrollTop = 28 * 4990")
        await tab.until(
            "[...document.querySelectorAll('.vrow')].some((row) => row.textContent.includes('#4995'))"
        )
        await tab.go("#/r/0/e/5000")
        await tab.wait(".box.model .t", "> 100")
        assert await tab.count(".t") < 20_000 < 98_000 < len(long.sequences[0])


@in_browser
@pytest.mark.parametrize(
    ("kind", "text"),
    [("empty", "no finished episode yet"), ("failed", "EngineUnavailable"), ("partial", "episodes")],
)
async def test_runs_without_the_usual_are_shown_sensibly(tmp_path, kind, text):
    lost = EpisodeError("engine", "EngineUnavailable", "503")
    episodes = {
        "empty": [],
        "failed": [episode(0, m, stop=StopReason.ABORTED, error=lost) for m in range(3)],
        "partial": [episode(0, 0), episode(1, 0)],
    }[kind]
    room = 0 if kind == "partial" else 1_000_000
    async with viewer(tmp_path, write_run(tmp_path, kind, episodes), max_bytes=room) as tab:
        assert text in await tab.text()
        if kind == "partial":
            await tab.go("#/r/0/e/1")
            await tab.shows("agentenv view partial#1")


@in_browser
async def test_the_workers_and_servers_of_a_run_are_tables(tmp_path):
    run = write_run(tmp_path, "crew", [episode(0, 0), episode(1, 0)])
    busy = {"worker": "w1", "node": "gpu-7", "pid": 77, "live": 5, "rss_mb": 80.5, "cpu_s": 2.0}
    busy |= {"done": 3, "lag_p99_s": 0.004, "threads": 9, "abandoned": 2}
    busy["waits"] = {"engine": {"episodes": 4, "longest_s": 61.0}}
    workers = [{**busy, "live": 0}, busy, {"worker": "<b>w2</b>", "silent": True}]
    workers += [{"worker": "driver", "deaths": 1, "retired": 2}]
    server = {"server": "gpu1:8000", "sessions": 12, "in_flight": 7, "version": 3, "failures": 1, "used": 2}
    server |= {"processes": 3, "problem": ""}
    servers = [
        server,
        {**server, "server": "gpu2:8000", "version": None, "used": 0, "problem": "<i>hangs</i>"},
    ]
    for name, rows in (("workers", workers), ("servers", servers)):
        (run.path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    async with viewer(tmp_path, Run(run.path)) as tab:
        await tab.shows("gpu-7")
        text = await tab.text()

        told = ("engine 4 (61.00 s)", "9 (2 hang)", "<b>w2</b>", "does not answer", "1 workers died")
        assert missing_in(text, *told, "2 replaced because of hung threads") == []
        assert [line.split("\t") for line in text.splitlines() if line.startswith("gpu")] == [
            ["gpu1:8000", "12", "7", "3", "1", "2 of 3", ""],
            ["gpu2:8000", "12", "7", "\N{EN DASH}", "1", "0 of 3", "<i>hangs</i>"],
        ]
        assert text.count("gpu-7") == 1


@in_browser
async def test_live_page_follows_a_running_run_and_keeps_its_place_when_another_appears(tmp_path):
    with (
        RunWriter.create("x", runs_dir=tmp_path, run_id="first", env_ids=("shop/Math-v0",)) as writer,
        live(tmp_path) as server,
    ):
        async with open_browser() as tab:
            await tab.open(server.url)
            await tab.shows("no finished episode yet")
            writer.append(episode(0, 0))
            await tab.wait(".vrow", "== 1")
            for task in range(1, 60):
                writer.append(episode(task, 0))
            await tab.wait(".vrow", "> 10")
            await tab.click("details > summary")
            await tab.js("document.querySelector('.vlist').scrollTop = 700; scrollTo(0, 300)")
            await tab.until("document.querySelector('.vlist').scrollTop === 700 && scrollY === 300")

            write_run(tmp_path, "second", [episode(0, 0)])
            await tab.shows("new run second", "header")
            assert "first" in await tab.text("header")
            assert await tab.js(
                "[document.querySelector('details').open, document.querySelector('.vlist').scrollTop,"
                " scrollY, location.hash]"
            ) == [True, 700, 300, "#/r/first"]

            await tab.go("#/r/0/e/3")
            await tab.wait(".box", ">= 4")
            write_run(tmp_path, "third", [episode(0, 0)])
            await tab.go("#/r/1")
            await tab.shows("second", "header")
            await tab.go("#/")
            await tab.wait("tr.row", "== 3")
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
ROUTES = [
    "#/",
    "#/r/0",
    "#/r/1",
    "#/r/4",
    "#/compare/1/2",
    "#/r/1/step/2",
    "#/r/1/steps/1/3",
    "#/side/1/3/1/9",
]
ROUTES += ["#/r/0/e/2", "#/r/3/e/0", "#/r/3/e/0/t/70", "messages"]


@in_browser
@pytest.mark.parametrize("theme", ["light", "dark"])
async def test_pages_fit_small_screens_and_can_be_read(tmp_path, theme):
    runs = [
        write_run(tmp_path, "a-run-with-quite-a-long-name-0", varied()),
        write_training(tmp_path, "t", steps=4),
        write_training(tmp_path, "u", steps=5),
        write_run(tmp_path, "talk", [talk()]),
        write_run(tmp_path, "wide", [episode(0, member, reward=member / 80) for member in range(80)]),
    ]
    async with viewer(tmp_path, *runs) as tab:
        for width in (390, 768, 1280):
            screen = {"width": width, "height": 844, "deviceScaleFactor": 1, "mobile": width < 500}
            await tab.call("Emulation.setDeviceMetricsOverride", **screen)
            await tab.open((tmp_path / "view.html").as_uri())
            await tab.js(f"document.documentElement.dataset.theme = '{theme}'")
            await tab.go("#/none")
            for route in ROUTES:
                if route == "messages":
                    await tab.key("s")
                    await tab.wait(".call")
                else:
                    await tab.js(
                        f"document.querySelector('header').dataset.old = 1; location.hash = '{route}'"
                    )
                    await tab.until("!document.querySelector('header').dataset.old")
                overflow = await tab.js("document.documentElement.scrollWidth - innerWidth")
                found = [overflow, await tab.js(CONTRAST), await tab.js(UNREACHABLE)]
                assert (route, width, found) == (route, width, [0, [], []])


@in_browser
async def test_links_name_runs_filters_and_go_from_the_older_run_to_the_newer(tmp_path):
    """A run that comes later takes no address away, and an improvement reads as one."""
    scored = [one for one in varied(4) if one.reward is not None]
    runs = []
    for day, name, reward in ((2, "a-new", 1.0), (1, "old 1", 0.0)):
        run = write_run(tmp_path, name, [replace(one, reward=reward) for one in scored])
        made = f"2026-01-0{day}T00:00:00+00:00"
        replace(run.info, created=made, reward_weights={"format": 0.25}).write(run.path)
        runs.append(Run(run.path))
    async with viewer(tmp_path, *runs) as tab:
        for _ in runs:
            await tab.click("input[type=checkbox]:not(:checked)")
        await tab.click("button", "compare 2")
        await tab.until("location.hash === '#/compare/old%201/a-new'")
        await tab.shows("+1.00", ".cards .card")

        await tab.go("#/r/old%201?reward%3D0")
        await tab.wait(".vrow")
        assert await tab.js("document.getElementById('filter').value") == "reward=0"
        await tab.fill("#filter", "stop:max_turns")
        await tab.js(
            "document.getElementById('filter')"
            ".dispatchEvent(new KeyboardEvent('keydown', { key: 'Enter', bubbles: true }))"
        )
        await tab.until("/^#\\/r\\/old%201\\/e\\/\\d+$/.test(location.hash)")
        await tab.wait(".outcome")
        assert "max_turns" in await tab.text(".outcome")
        await tab.js("history.back()")
        await tab.until("document.getElementById('filter')?.value === 'stop:max_turns'")
        assert await tab.js("location.hash") == "#/r/old%201?stop%3Amax_turns"
        await tab.key("u")
        await tab.wait("tr.row", "== 2")
        assert await tab.js("document.getElementById('filter').value") == ""
        await tab.go("#/r/a-new")
        await tab.wait(".vrow")
        assert await tab.js("document.querySelector('.vlist').getBoundingClientRect().top") < 700
