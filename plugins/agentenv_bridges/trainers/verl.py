"""verl plays our episodes live: an agent loop of verl 0.9 (`verl.experimental.agent_loop`).

In a file that verl's workers can import, here `rollout.py`:

    from agentenv_bridges import agent_loop
    from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput

    class MyLoop(agent_loop(AgentLoopBase, AgentLoopOutput, env="shop.py")):
        pass

In a file that `actor_rollout_ref.rollout.agent.agent_loop_config_path` names:

    - name: agentenv
      _target_: rollout.MyLoop

Rows of the data carry `agent_name: agentenv` and `task`, the fields of the task.
"""

from __future__ import annotations

from typing import Any

from agentenv.core import RunLimits, Trajectory
from agentenv.engine import Sampling
from agentenv.envs import EnvSpec
from agentenv_bridges.trainers.live import CallEngine, Player, masked_row, only_row

__all__ = ["agent_loop"]


def agent_loop(base: type, output: type, *, env: str | EnvSpec, limits: RunLimits | None = None) -> type:
    """Return a subclass of verl's `AgentLoopBase` that plays an environment.

    verl makes a loop by the name of its class, so a class of yours has to inherit from it.

    A failed episode returns a row whose mask is 0: verl needs one for each row of the data. It trains
    nothing, but its reward of 0 enters the mean of its group.

    Args:
        base: `AgentLoopBase`.
        output: `AgentLoopOutput`.
        env: id, file or specification of the environment.
        limits: limits of each episode.
    """

    async def run(self: Any, sampling_params: dict[str, Any], **row: Any) -> Any:
        player = vars(self).setdefault("_player", Player(env, self.tokenizer, limits or RunLimits()))

        async def call(prompt: list[int], asked: Sampling, stop: list[int], session: str | None) -> Any:
            settings = {"max_tokens": asked.token_limit, "stop_token_ids": stop, "logprobs": True}
            told = await self.server_manager.generate(
                request_id=session, prompt_ids=prompt, sampling_params={**sampling_params, **settings}
            )
            return told.token_ids, told.log_probs

        length = int(self.rollout_config.response_length)
        sampling = Sampling(temperature=sampling_params.get("temperature", 1.0), max_tokens=length)
        number = int(row.get("index", 0))
        one = await player.play(CallEngine("verl", call), row["task"], sampling, seed=number, member=number)
        return output(**_sample(one, player, int(self.rollout_config.prompt_length), length))

    return type("AgentenvLoop", (base,), {"run": run})


def _sample(one: Trajectory, player: Player, prompt_length: int, response_length: int) -> dict[str, Any]:
    row = only_row(one, "verl", player.renderer)
    facts = {
        "stop_reason": str(one.stop_reason),
        "error": None if one.error is None else one.error.message,
        "turn_scores": [turn.reward for turn in one.turns],
        "tool_rewards": [],
    }
    if len(row.prompt_ids) > prompt_length or len(row.response_ids) > response_length:
        # verl would cut a longer one without a word, and with it the end that was rewarded.
        facts["left_out"] = "longer than max_prompt_length or max_response_length"
        row = masked_row(player.renderer)
    return {
        "prompt_ids": row.prompt_ids,
        "response_ids": row.response_ids,
        "response_mask": [int(trained) for trained in row.loss_mask],
        "response_logprobs": row.logprobs,
        "reward_score": one.reward if any(row.loss_mask) else 0.0,
        "num_turns": sum(message["role"] != "system" for message in one.messages),
        "metrics": {},
        "extra_fields": facts,
    }
