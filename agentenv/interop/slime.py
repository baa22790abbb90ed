"""slime plays our episodes live: a function for `--custom-generate-function-path`.

In a file that slime imports:

    from slime.utils.http_utils import post
    from agentenv.interop import generate_function

    generate = generate_function(post, env="shop.py", tokenizer="/models/Qwen3-8B")

    slime ... --custom-generate-function-path rollout.generate --metadata-key metadata

`metadata` of each row holds `task`, the fields of the task. The reward is set here, so no `--custom-rm-path`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from agentenv.core.limits import RunLimits
from agentenv.core.trajectory import Trajectory
from agentenv.engine.base import Sampling
from agentenv.envs.spec import EnvSpec
from agentenv.interop.live import CallEngine, Player, parts_of

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
        post: `slime.utils.http_utils.post`, or any function of an address and a body.
        env: id, file or specification of the environment.
        tokenizer: the tokenizer of the model, or its directory.
        limits: limits of each episode.
    """
    player = Player(env, tokenizer, limits or RunLimits())

    async def generate(args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
        url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"

        async def call(prompt: list[int], asked: Sampling, stop: list[int], _: str | None) -> Any:
            # Without these two, SGLang would take stop tokens and special tokens out of its answer.
            whole = {"no_stop_trim": True, "skip_special_tokens": False}
            settings = {
                **sampling_params,
                "max_new_tokens": asked.max_tokens,
                "stop_token_ids": stop,
                **whole,
            }
            told = await post(url, {"input_ids": prompt, "return_logprob": True, "sampling_params": settings})
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
    status, number = type(sample).Status, int(sample.index or 0)
    facts = {**sample.metadata, "stop_reason": str(one.stop_reason)}
    made = [
        _filled(
            sample,
            tokens=[*part.prompt_ids, *part.response_ids],
            response=player.renderer.decode(part.response_ids),
            response_length=len(part.response_ids),
            reward=one.reward,
            loss_mask=[int(trained) for trained in part.loss_mask],
            rollout_log_probs=part.logprobs,
            status=status.TRUNCATED if one.truncated else status.COMPLETED,
            rollout_id=number,
            metadata={**facts, "turn_rewards": [turn.reward for turn in one.turns]},
        )
        for _, part in parts_of(one)
    ]
    if made:
        return made[0] if len(made) == 1 else made
    return _filled(
        sample,
        tokens=(list(player.renderer.stop_token_ids[:1]) or [0]) * 2,
        response_length=1,
        reward=0.0,
        loss_mask=[0],
        rollout_log_probs=[0.0],
        status=status.ABORTED,
        rollout_id=number,
        metadata={**facts, "error": None if one.error is None else one.error.message},
    )


def _filled(sample: Any, **fields: Any) -> Any:
    """Return a copy of a sample with these fields, as far as its release of slime has them."""
    filled = type(sample)(**vars(sample))
    for name, value in fields.items():
        if hasattr(filled, name):
            setattr(filled, name, value)
    return filled
