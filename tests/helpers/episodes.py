"""Small finished episodes."""

from __future__ import annotations

from agentenv.core import StopReason, TokenSequence, TokenSpan, Trajectory, Turn


def episode(
    task: int = 0, member: int = 0, *, reward: float | None = 1.0, tokens: int = 6, **values
) -> Trajectory:
    """One small episode; `tokens` sampled ones in a single turn."""
    sampled = TokenSpan("model", tuple(range(tokens)), tuple(-0.1 * i for i in range(tokens)), 3, 0)
    sequence = TokenSequence((TokenSpan("prompt", (1, 2, 3)), sampled))
    defaults = {
        "env_id": "demo/Adder-v0",
        "task_id": f"t{task}",
        "seed": task,
        "group_id": f"g{task}",
        "member": member,
        "stop_reason": StopReason.FINAL_ANSWER,
        "turns": (
            Turn(0, {"role": "assistant", "content": "42"}, "stop", tokens, start=3, reward=reward or 0.0),
        ),
        "sequences": (sequence,),
        "messages": ({"role": "user", "content": "?"}, {"role": "assistant", "content": "42"}),
        "reward": reward,
    }
    return Trajectory(**{**defaults, **values})
