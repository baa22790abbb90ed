"""What a renderer appends is what the template would have written, token for token, and nothing else."""

from __future__ import annotations

import pytest

from agentenv.render import ChatTokenizer, byte_tokenizer
from helpers import chat_cases as cases
from helpers.render_truth import Checker

TRL = cases.trl_templates()


@pytest.mark.parametrize("family", ["bytes", *cases.FAMILIES])
def test_appended_tokens_are_the_tail_of_the_full_render(family: str) -> None:
    tokenizer = byte_tokenizer() if family == "bytes" else ChatTokenizer.load(cases.TOKENIZERS / family)
    checker = Checker(tokenizer)

    for seed in range(25):
        checker.play(seed)

    assert checker.turns >= 40
    assert checker.compared >= 10 or checker.verdict != "fast" or checker.moves


@pytest.mark.skipif(not TRL, reason="trl is not installed")
@pytest.mark.parametrize("name", sorted(TRL))
def test_templates_of_trl_are_exact_or_refused(name: str) -> None:
    checker = Checker(cases.tokenizer_for(TRL[name]))

    assert checker.verdict != "refused", checker.renderer.report.reasons
    for seed in range(2):
        checker.play(seed)


@pytest.mark.slow
@pytest.mark.skipif(not TRL, reason="trl is not installed")
@pytest.mark.parametrize("name", sorted(TRL))
def test_templates_of_trl_are_exact_over_many_conversations(name: str) -> None:
    checker = Checker(cases.tokenizer_for(TRL[name]))

    for seed in range(40):
        checker.play(seed, turns=5)

    assert checker.turns >= 40
