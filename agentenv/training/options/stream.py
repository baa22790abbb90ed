"""Episodes that another policy sampled than the one in training: older weights, or an engine's numbers."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Annotated, Literal

from annotated_types import Gt, Lt

from agentenv.core.fields import NonNegativeInt, check_fields

__all__ = ["StreamOptions"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamOptions:
    """How far episodes are played ahead, and what corrects for the policy that sampled them.

    Raises:
        UsageError: A value is outside its range.
    """

    max_ahead: NonNegativeInt = 0
    """Play a stream of groups while batches train: each step trains on the first groups that finish. A group
    is trained at most this many steps after it began, and at most `(max_ahead + 1) * groups_per_step` groups
    are under way. 0 plays each batch when the last one was trained. An in-process engine then samples from a
    copy of the weights. Results depend on timing, so a run does not repeat bit by bit."""
    old_logprobs: Literal["sampler", "recompute"] | None = None
    """Logprobs of the proximal policy: the sampler's own, or recomputed by the trainer before the first
    update. None means `recompute` with a separate `engine`, whose numbers differ from the trainer's, as long
    as each step plays its own batch; and with `importance_sampling_level="sequence"`, whose clip is narrower
    than such differences. Otherwise it means `sampler`."""
    importance_correction: (
        Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask", "off"] | None
    ) = None
    """TIS (truncate) or MIS/IcePop (mask) on exp(old - sampler), per token or per sequence. This needs
    recomputed logprobs; otherwise old and sampler logprobs are equal. None means `token_truncate` for
    recomputed logprobs with a separate `engine` and where episodes are played ahead, and otherwise `off`."""
    importance_cap: Annotated[float, Gt(1), Lt(inf)] = 2.0
    """Upper bound of the importance correction, 2 as in the TIS paper. The `_mask` modes keep ratios from
    1 / this to this."""
    off_policy_mask_threshold: float | None = None
    """OPSM: leave out sequences with a negative advantage whose mean of sampler - policy logprobs exceeds
    this."""
    router_replay: bool = False
    """Send each token of a mixture of experts to the experts that the engine chose for it (rollout routing
    replay, R3, arXiv 2510.11370), in all passes of the policy and its reference. The routers still weight the
    experts and are trained. The engine must tell its choices; see `training.learners.torch.routers`."""

    def __post_init__(self) -> None:
        check_fields(self)
