"""The verifier of stored runs: whether tokens, messages, rewards and log-probabilities agree."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentenv.core.door import door

if TYPE_CHECKING:
    from agentenv.runs.verify.findings import Finding as Finding
    from agentenv.runs.verify.findings import Verification as Verification
    from agentenv.runs.verify.tokens import Drift as Drift
    from agentenv.runs.verify.verify import Score as Score
    from agentenv.runs.verify.verify import verify_episode as verify_episode
    from agentenv.runs.verify.verify import verify_run as verify_run

__all__ = door(__name__)
