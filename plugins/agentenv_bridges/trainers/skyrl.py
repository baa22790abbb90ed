"""SkyRL plays our episodes live: a generator (`skyrl.train.generators.base.GeneratorInterface`).

    class Exp(BasePPOExp):
        def get_generator(self, cfg, tokenizer, inference_engine_client):
            return SkyRLGenerator(inference_engine_client, env="shop.py", tokenizer=tokenizer)

Rows of the data carry `env_extras` with `task`, the fields of the task.
"""

from __future__ import annotations

import asyncio
from typing import Any

from agentenv.core import RunLimits, Trajectory
from agentenv.engine import Sampling
from agentenv.envs import EnvSpec
from agentenv_bridges.split import PromptResponse
from agentenv_bridges.trainers.live import CallEngine, Player, only_row

__all__ = ["SkyRLGenerator"]


class SkyRLGenerator:
    """A generator of SkyRL that plays an environment.

    Rewards of turns are put on the last token of each turn, and the rest of the episode's reward on the last
    token of all. A failed episode has a mask of 0 and trains nothing.

    Args:
        client: SkyRL's client of the inference engines.
        env: id, file or specification of the environment.
        tokenizer: the tokenizer of the model, or its directory.
        limits: limits of each episode.
    """

    def __init__(
        self, client: Any, *, env: str | EnvSpec, tokenizer: Any, limits: RunLimits | None = None
    ) -> None:
        self._client, self.player = client, Player(env, tokenizer, limits or RunLimits())

    async def generate(self, input_batch: dict[str, Any], disable_tqdm: bool = False) -> dict[str, Any]:
        """Return SkyRL's `GeneratorOutput` of a `GeneratorInput`, in its order."""
        params = dict(input_batch.get("sampling_params") or {})

        async def call(prompt: list[int], asked: Sampling, stop: list[int], session: str | None) -> Any:
            settings = {**params, "max_tokens": asked.token_limit, "stop_token_ids": stop, "logprobs": 0}
            told = await self._client.generate(
                {"prompt_token_ids": [prompt], "session_ids": [session], "sampling_params": settings}
            )
            return told["response_ids"][0], (told["response_logprobs"] or [None])[0]

        engine = CallEngine("skyrl", call)
        limit = params.get("max_tokens") or params.get("max_generate_length") or 1024
        sampling = Sampling(temperature=params.get("temperature", 1.0), max_tokens=limit)
        extras, ids = input_batch["env_extras"], input_batch.get("trajectory_ids")
        members = [ids[number].repetition_id if ids else number for number in range(len(extras))]
        played = await asyncio.gather(
            *(
                self.player.play(engine, extra["task"], sampling, seed=member, member=member)
                for extra, member in zip(extras, members, strict=True)
            )
        )
        rows = [self._row(one) for one in played]
        return {
            **{name: [row[name] for row in rows] for name in rows[0]},
            "rollout_metrics": {f"agentenv/{name}": float(n) for name, n in self.player.counts.items()},
            "trajectory_ids": ids,
            "is_last_step": None,
        }

    def _row(self, one: Trajectory) -> dict[str, Any]:
        row = only_row(one, "SkyRL", self.player.renderer)
        return {
            "prompt_token_ids": row.prompt_ids,
            "response_ids": row.response_ids,
            "rewards": _rewards(one, row),
            "loss_masks": [int(trained) for trained in row.loss_mask],
            "stop_reasons": str(one.stop_reason),
            "rollout_logprobs": row.logprobs,
        }


def _rewards(one: Trajectory, row: PromptResponse) -> list[float]:
    """Return a reward for each token of the response; their sum is the episode's, or 0 if nothing trains."""
    rewards = [0.0] * len(row.response_ids)
    last = {turn: place for place, turn in enumerate(row.turn_index) if row.loss_mask[place]}
    for turn in one.turns:
        if turn.reward and turn.index in last:
            rewards[last[turn.index]] += turn.reward
    if last:
        rewards[-1] += float(one.reward or 0.0) - sum(rewards)
    return rewards
