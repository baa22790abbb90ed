"""The JSON of a prompt is always that of the prompt, whatever was kept before."""

from __future__ import annotations

import json
import random

import pytest

from agentenv.engine.vllm import prompt_json
from agentenv.engine.vllm.prompt_json import PromptJSON


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(prompt_json, "MIN_TOKENS", 3)


def written(prompts: PromptJSON, session: str | None, prompt: list[int]) -> list[int]:
    """Return the prompt that the JSON holds."""
    return json.loads(prompts.write(session, list(prompt)))


def test_prompts_that_grow_shrink_or_change_are_written_exactly():
    prompts = PromptJSON()
    rng = random.Random(0)
    live = {name: [1, 2, 3] for name in "abc"}
    for _ in range(600):
        name = rng.choice("abc")
        prompt = live[name]
        step = rng.random()
        if step < 0.7:
            prompt += [rng.randrange(200_000) for _ in range(rng.randrange(4))]
        elif step < 0.8:
            del prompt[rng.randrange(len(prompt)) :]
        elif step < 0.9 and prompt:
            prompt[rng.randrange(len(prompt))] = rng.randrange(200_000)
        else:
            prompts.forget(name)
        assert written(prompts, name, prompt) == prompt
        assert prompts._size == sum(len(kept.text) for kept in prompts._kept.values())


def test_only_new_ids_are_written(monkeypatch):
    sizes = []
    plain = prompt_json.to_json
    monkeypatch.setattr(prompt_json, "to_json", lambda ids: sizes.append(len(ids)) or plain(ids))
    prompts = PromptJSON()

    assert prompts.write("a", [10, 20, 30]) == b"[10,20,30]"
    assert prompts.write("a", [10, 20, 30, 40]) == b"[10,20,30,40]"
    assert prompts.write("a", [10, 20, 30, 40]) == b"[10,20,30,40]"
    assert prompts.write("b", [10, 20, 30, 40]) == b"[10,20,30,40]"
    assert sizes == [3, 1, 4]


def test_what_is_kept_is_bounded_and_dropped_with_the_episode(monkeypatch):
    monkeypatch.setattr(prompt_json, "MAX_BYTES", 40)
    prompts = PromptJSON()
    for name in ("a", "b", "c", "a", "d"):
        prompts.write(name, [111] * 4)  # 16 bytes each

    assert list(prompts._kept) == ["a", "d"]
    prompts.write("long", [111] * 20)
    assert list(prompts._kept) == ["a", "d"]
    prompts.forget("a")
    prompts.forget("nobody")
    assert (list(prompts._kept), prompts._size) == (["d"], 16)


def test_short_prompts_and_requests_of_no_episode_are_not_kept():
    prompts = PromptJSON()

    assert written(prompts, "a", [1, 2]) == [1, 2]
    assert written(prompts, "a", []) == []
    assert written(prompts, None, [1, 2, 3]) == [1, 2, 3]
    assert not prompts._kept
