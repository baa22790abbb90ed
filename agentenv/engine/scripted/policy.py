"""An engine that plays a policy: a function of the messages and the task, such as an environment's oracle.

The policy takes part in ordinary episodes, with the runner, the simulated user, the limits and the rewards of
any model. The chat template writes its messages as the model would.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping, Sequence
from random import Random
from typing import cast

from agentenv.core.episode_env import Action, derive_seed
from agentenv.core.errors import UsageError
from agentenv.core.messages import Message, chat_call, copy_of, text_of
from agentenv.core.playing import CurrentEpisode, MessagePolicy, playing
from agentenv.engine.interface import Sampling
from agentenv.engine.scripted.mock import arguments_for
from agentenv.engine.scripted.scripted import ScriptedEngine, ScriptedRequest, ScriptedTurn, TextCodec

__all__ = ["PolicyEngine", "play_random"]

LOGPROB = -0.5
"""Log-probability of each token; it stands for nothing."""
CALL_SHARE = 0.75
"""Probability with which `random` calls a tool, if there are tools."""
RECENT_CHARS = 2000
"""Characters of the last messages from which `random` takes words."""


class PolicyEngine(ScriptedEngine):
    """Plays a policy as if a model had sampled its messages; only a `Runner` can use this engine.

    Args:
        policy: function of the messages so far, the task's fields and the episode's random generator.
        tokenizer: encodes the messages.
        name: the model string, which is stored in records.
        seed: seed of the random generators; each episode has its own.
    """

    keeps_requests = False

    def __init__(
        self, policy: MessagePolicy, tokenizer: TextCodec, *, name: str = "policy", seed: int = 0
    ) -> None:
        super().__init__(self._turn, tokenizer=tokenizer, name=name, logprob=LOGPROB)
        self._policy = policy
        self._seed = seed
        self._generators: dict[str | None, Random] = {}

    async def _turn(self, request: ScriptedRequest) -> ScriptedTurn:
        """Return the policy's next message.

        Raises:
            UsageError: No runner plays an episode, so that there are no messages.
            EnvironmentMisuse: The policy returned neither text nor an assistant message.
        """
        episode = playing.get()
        if episode is None:
            raise UsageError(
                f"{self.name} reads the messages of an episode, but no runner plays one",
                remedy="play it with Runner, ae.evaluate or agentenv eval",
            )
        messages = [copy_of(message) for message in episode.messages]
        rng = self._generator(request.session_id, episode, request.sampling)
        said = self._policy(messages, episode.task, rng)
        message = Action.of(await said if inspect.isawaitable(said) else said).message
        return ScriptedTurn(message=message, finish_reason="stop")

    def _read(self, prompt: tuple[int, ...]) -> str:
        return ""  # a policy reads the messages, and long prompts would be decoded for nothing

    async def release(self, session_id: str) -> None:
        """Forget the episode's random generator."""
        await super().release(session_id)
        self._generators.pop(session_id, None)

    def _generator(self, session_id: str | None, episode: CurrentEpisode, sampling: Sampling) -> Random:
        """Return the generator of an episode; the members of a group have different ones."""
        if session_id not in self._generators:
            self._generators[session_id] = Random(derive_seed(self._seed, episode.seed, sampling.seed or 0))
        return self._generators[session_id]


def play_random(messages: Sequence[Message], task: Mapping[str, object], rng: Random) -> Message | str:
    """Return a random valid call of a random tool, a valid action, or a word of the messages."""
    episode = playing.get()
    if episode is not None and episode.choices:
        return rng.choice(episode.choices)
    recent = "\n".join(map(text_of, messages))[-RECENT_CHARS:]
    if episode is not None and episode.tools and rng.random() < CALL_SHARE:
        function = cast("Mapping[str, str]", rng.choice(episode.tools)["function"])
        arguments = arguments_for(cast("Mapping[str, object]", function["parameters"]), recent, rng)
        call = chat_call("call_0", function["name"], json.dumps(arguments))
        return {"role": "assistant", "content": "", "tool_calls": [call]}
    return rng.choice(recent.split() or ["yes"])
