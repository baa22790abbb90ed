"""slime plays our episodes live: a function for `--custom-generate-function-path`.

In a file that slime imports:

    from slime.utils.http_utils import post
    from agentenv_bridges import generate_function

    generate = generate_function(post, env="shop.py", tokenizer="/models/Qwen3-8B")

    slime ... --custom-generate-function-path rollout.generate --metadata-key metadata

`metadata` of each row holds `task`, the fields of the task. The reward is set here, so no `--custom-rm-path`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from agentenv.core import RunLimits, Trajectory
from agentenv.engine import Sampling
from agentenv.envs import EnvSpec
from agentenv_bridges.trainers.live import CallEngine, Player, masked_row, rows_of

__all__ = ["generate_function"]


def generate_function(
    post: Callable[..., Awaitable[Any]],
    *,
    env: str | EnvSpec,
    tokenizer: Any,
    limits: RunLimits | None = None,
) -> Callable[..., Awaitable[Any]]:
    """Return slime's `async generate(args, sample, sampling_params)` for an environment.

    It returns a sample, or a list of samples of one `rollout_id` where the history was rewritten. A failed
    episode is `ABORTED` with a mask of zeros. Its reward is 0.0, because slime makes a tensor of all rewards,
    so that it enters the mean of its group.

    Args:
        post: `slime.utils.http_utils.post`, or any function of an address, a body and headers.
        env: id, file or specification of the environment.
        tokenizer: the tokenizer of the model, or its directory.
        limits: limits of each episode.
    """
    player = Player(env, tokenizer, limits or RunLimits())

    async def generate(args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
        url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"

        async def call(prompt: list[int], asked: Sampling, stop: list[int], session: str | None) -> Any:
            # Without these two, SGLang would take stop tokens and special tokens out of its answer.
            whole = {"no_stop_trim": True, "skip_special_tokens": False}
            length = {"max_new_tokens": asked.token_limit, "stop_token_ids": stop}
            settings = {**sampling_params, **length, **whole}
            body = {"input_ids": prompt, "return_logprob": True, "sampling_params": settings}
            # The router sends the turns of one key to the engine that has their beginning in its cache.
            told = await post(url, body, headers={"X-SMG-Routing-Key": sample.session_id or session})
            pairs = told["meta_info"]["output_token_logprobs"]
            return [pair[1] for pair in pairs], [pair[0] for pair in pairs]

        temperature, limit = sampling_params.get("temperature", 1.0), sampling_params["max_new_tokens"]
        sampling = Sampling(temperature=temperature, max_tokens=limit)
        number = int(sample.index or 0)
        task = sample.metadata["task"]
        one = await player.play(CallEngine("slime", call), task, sampling, seed=number, member=number)
        return _samples(sample, one, player)

    return generate


def _samples(sample: Any, one: Trajectory, player: Player) -> Any:
    """Return the samples of an episode, each a copy of the one that slime asked for."""
    status, rows = type(sample).Status, rows_of(one)
    ended = status.TRUNCATED if one.truncated else status.COMPLETED
    facts = {
        "stop_reason": str(one.stop_reason),
        "error": None if one.error is None else one.error.message,
        "turn_rewards": [turn.reward for turn in one.turns],
    }
    made = [
        _filled(
            sample,
            tokens=[*row.prompt_ids, *row.response_ids],
            response=player.renderer.decode(row.response_ids),
            response_length=len(row.response_ids),
            reward=one.reward if rows else 0.0,
            loss_mask=[int(trained) for trained in row.loss_mask],
            rollout_log_probs=row.logprobs,
            status=ended if rows else status.ABORTED,
            rollout_id=int(sample.index or 0),
            metadata={**sample.metadata, **facts},
        )
        for row in rows or [masked_row(player.renderer)]
    ]
    return made[0] if len(made) == 1 else made


def _filled(sample: Any, **fields: Any) -> Any:
    """Return a copy of a sample with these fields, as far as its release of slime has them."""
    filled = type(sample)(**vars(sample))
    for name, value in fields.items():
        if hasattr(filled, name):
            setattr(filled, name, value)
    return filled
