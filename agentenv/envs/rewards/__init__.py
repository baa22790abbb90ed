"""Rewards: functions with weights, a model as judge, mathematics, and rewards that compare a group."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentenv.core.door import door

if TYPE_CHECKING:
    from agentenv.envs.rewards.group import GroupReward as GroupReward
    from agentenv.envs.rewards.group import rescore as rescore
    from agentenv.envs.rewards.group import score_group as score_group
    from agentenv.envs.rewards.judge import Judge as Judge
    from agentenv.envs.rewards.judge import JudgeStats as JudgeStats
    from agentenv.envs.rewards.reward import Reward as Reward
    from agentenv.envs.rewards.reward import RewardFunction as RewardFunction

__all__ = door(__name__)
