"""Branches of an episode as a tree: in a run of their own, off other branches, and in a group of a training."""

from __future__ import annotations

from dataclasses import replace

import pytest

from agentenv.runs.view import build_page
from helpers.browser import CHROMIUM, open_browser
from helpers.sample_runs import branch, episode, write_branches, write_run

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine"),
    pytest.mark.slow,
]
LINES = """[...document.querySelectorAll('.family li')].map((line) => {
  let depth = 0;
  for (let node = line; node.closest('.family'); node = node.parentElement) depth += node.tagName === 'UL';
  return `${depth} ${line.querySelector(':scope > a').innerText}`.trim();
})"""
CHOSEN = "[...document.querySelectorAll('.family [aria-current]')].map((link) => link.innerText)"


async def tree(tab, route: str) -> list[str]:
    await tab.js(f"document.querySelector('header').dataset.old = 1; location.hash = '{route}'")
    await tab.until("!document.querySelector('header').dataset.old")
    return [" ".join(line.split()) for line in await tab.js(LINES)]


async def test_branches_of_other_runs_stand_below_the_episode_that_they_continue(tmp_path):
    first, second = episode(0, 0, reward=0.0), episode(0, 1)
    source = write_run(tmp_path, "eval", [first, second])
    branches = [branch(first, member, reward=float(member)) for member in range(2)]
    middle = write_branches(tmp_path, "branches", source, branches)
    last = write_branches(tmp_path, "more", middle, [branch(branches[1], 0, turn=2)])
    page = tmp_path / "view.html"
    page.write_text(build_page([last, middle, source]))
    want = [
        "1 #0 r 0.00",
        "2 #0 r 0.00 from turn 2 in branches",
        "2 #1 r 1.00 from turn 2 in branches",
        "3 #0 r 1.00 from turn 3 in more",
    ]

    async with open_browser() as tab:
        await tab.open(page.as_uri() + "#/none")
        of_source = await tree(tab, "#/r/2/e/0")
        mean = await tab.js("document.querySelector('.family .dim:not(a .dim)').innerText")
        of_leaf = await tree(tab, "#/r/0/e/0")
        chosen = await tab.js(CHOSEN)
        of_other = await tree(tab, "#/r/2/e/1")

    assert of_source == want
    assert mean == "2 branches, mean 0.50"
    assert len(of_leaf) == len(want)
    assert len(chosen) == 1
    assert "from turn 3" in chosen[0]
    assert of_other == []


async def test_branches_in_a_group_of_a_training_stand_below_their_member(tmp_path):
    members = [episode(0, 0), episode(0, 1, reward=0.0)]
    grown = [
        replace(branch(members[1], 0, reward=float(n)), group_id=members[1].group_id, member=2 + n)
        for n in range(2)
    ]
    page = tmp_path / "view.html"
    page.write_text(build_page([write_run(tmp_path, "train", [*members, *grown])]))

    async with open_browser() as tab:
        await tab.open(page.as_uri() + "#/none")
        found = await tree(tab, "#/r/0/e/3")
        alone = await tree(tab, "#/r/0/e/0")

    assert found == ["1 #1 r 0.00", "2 #2 r 0.00 from turn 2", "2 #3 r 1.00 from turn 2"]
    assert alone == []


async def test_a_branch_whose_source_is_not_on_the_page_names_it(tmp_path):
    first = episode(0, 0)
    source = write_run(tmp_path, "eval", [first])
    lonely = write_branches(tmp_path, "branches", source, [branch(first, 0)])
    page = tmp_path / "view.html"
    page.write_text(build_page([lonely]))

    async with open_browser() as tab:
        await tab.open(page.as_uri() + "#/none")
        found = await tree(tab, "#/r/0/e/0")
        head = str(await tab.js("document.querySelector('header').innerText"))

    assert found == []
    assert "branched from eval" in head
