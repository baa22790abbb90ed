"""`agentenv/Search-v0`: a corpus of made-up facts, and questions that take several searches."""

import pytest

from agentenv.core import ToolError
from agentenv.envs import spec
from agentenv.testing import oracle_of, play
from agentenv_envs.search import Search
from agentenv_envs.search.corpus import Index, Page, index, questions, world

ENTRY = spec("agentenv_envs.search:Search")


@pytest.mark.parametrize("split", ["train", "test"])
async def test_the_oracle_answers_questions_of_each_kind(split):
    tasks = ENTRY.task_set(split).take(60)

    played = [await play(ENTRY, oracle_of(ENTRY), task) for task in tasks]

    assert {episode.reward for episode in played} == {1.0}
    assert {len(episode.tool_results) for episode in played} == {2, 3}


def test_no_person_is_asked_about_in_both_splits_and_names_are_unique():
    asked = [
        str(row["question"]).partition(" works for")[0].split(" that ")[-1]
        for split in ("train", "test")
        for row in questions(split)
    ]

    assert len(set(asked)) == len(asked) == 1200
    assert len({page.title for page in world().pages}) == 2100


def test_the_page_with_a_name_is_the_first_result():
    titles = [page.title for page in world().pages[::50]]

    assert [index().search(title, 3)[0].title for title in titles] == titles


def test_pages_are_ranked_by_rare_words_and_by_length():
    pages = [Page("a", "red red fox"), Page("b", "a red bird that sings"), Page("c", "blue")]

    found = Index(pages).search("red fox", 3)

    assert [page.title for page in found] == ["a", "b"]
    assert Index(pages).search("green", 3) == []
    rare = [Page("x", "red one two"), Page("y", "fox one two"), Page("z", "red three four")]
    assert [page.title for page in Index(rare).search("red fox", 3)] == ["y", "x", "z"]


@pytest.mark.parametrize(
    ("answer", "target", "reward"),
    [
        ("Karo.", "Karo", 1.0),
        ("karo", "Karo", 1.0),
        ("It is Karo", "Karo", 0.0),
        ("It has 12,500.", "12500", 1.0),
        ("from 1 to 9", "1", 0.0),
        ("", "5", 0.0),
    ],
)
def test_answers_are_compared_with_the_target(answer, target, reward):
    assert Search().reward(answer, target, "final_answer") == reward
    assert Search().reward(answer, target, "max_turns") == 0.0


def test_a_long_query_is_refused():
    with pytest.raises(ToolError, match="at most 500"):
        Search().search("x" * 501)
