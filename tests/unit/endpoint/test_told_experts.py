"""The experts that an engine tells are recorded in the sequences of a session, forks included."""

from __future__ import annotations

from dataclasses import replace

import pytest

from agentenv.core import RoutedExperts
from agentenv.engine import ScriptedEngine
from helpers.agents import ASK, by_turn, call, results, served
from helpers.fake_vllm import experts_of


@pytest.fixture(autouse=True)
def _telling(monkeypatch):
    """Let the engine tell experts by which the place of each token is known."""
    generate = ScriptedEngine.generate

    async def told(self, prompt_ids, sampling, **request):
        done = await generate(self, prompt_ids, sampling, **request)
        ids = experts_of(len(prompt_ids) + len(done.token_ids) - 1)
        return replace(done, routed_experts=RoutedExperts.of(ids))

    monkeypatch.setattr(ScriptedEngine, "generate", told)


@pytest.mark.parametrize("edited", [False, True])
async def test_each_sequence_has_the_experts_of_its_tokens(edited):
    script = by_turn(call('{"a": 2, "b": 3}'), "It is 5.", "It is 6.")
    async with served(script) as agent:
        said = await agent.chat([ASK])
        for _ in range(1 + edited):  # the same question again, whose tokens so far are shared
            await agent.chat([ASK, said, *results(said)])
        captured = agent.captured

    assert len(captured.sequences) == 1 + edited
    for sequence in captured.sequences:
        end = max(place for place, trained in enumerate(sequence.loss_mask) if trained)
        assert sequence.routed_experts.array().tolist() == experts_of(end).tolist()
