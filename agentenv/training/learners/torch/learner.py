"""The learner: the model in training, its optimiser and reference, and the update of its weights.

The learner knows token ids, masks, log-probabilities and rewards. `GRPOTrainer` adds the parts that play
episodes (engines, environments, text) and that report on a run (metrics, notes, files).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from typing import Any

import torch

from agentenv.core.errors import UsageError
from agentenv.core.seeds import derive_seed
from agentenv.core.trajectory import Trajectory, TrajectoryGroup
from agentenv.training.batch import Advantage, AdvantageFn, TrainBatch, add_demonstrations, build_batch
from agentenv.training.config import GRPOConfig
from agentenv.training.learners.torch.blank import Unread
from agentenv.training.learners.torch.optim import MasterOptimizer, learning_rate
from agentenv.training.learners.torch.policy import Policy, add_lora
from agentenv.training.learners.torch.reference import Reference, ScoresRows, Teacher, episode_kl
from agentenv.training.learners.torch.world import World
from agentenv.training.objective.loss_inputs import LossInputs
from agentenv.training.once import OncePerGroup
from agentenv.training.rows import Row
from agentenv.training.sums import Meter, applies
from agentenv.training.update import accumulate, assign_weights, minibatches, score_rows

__all__ = ["Learner"]

log = logging.getLogger(__name__)


class Learner:
    """The policy in training with its optimiser, its reference and its counters.

    Args:
        model: a causal language model from transformers.
        config: the run's options.
        advantage_fn: the user's function for advantages, if any.
        loss_fn: the user's surrogate loss, if any.
        teacher: a model in the place of the reference, or what asks one on servers, if any.
        held_still: returns a context in which no engine samples from the weights, so that they can change.
        unread: files with the weights of a model that is to be sharded and has none yet.

    Raises:
        UsageError: The model cannot be trained, or an option has no effect with an `advantage_fn`.
    """

    def __init__(
        self,
        model: Any,
        config: GRPOConfig,
        *,
        advantage_fn: AdvantageFn | None = None,
        loss_fn: Callable[[LossInputs], torch.Tensor] | None = None,
        teacher: Any = None,
        held_still: Callable[[], AbstractContextManager[None]] = nullcontext,
        unread: Unread | None = None,
    ) -> None:
        if advantage_fn is not None:
            _check_own_advantages(config)
        self.config = config
        self.advantage_fn, self.loss_fn = advantage_fn, loss_fn
        self._held_still = held_still
        torch.manual_seed(config.seed)
        model = model if config.lora is None else add_lora(model, config.lora)
        world = unread and World(unread.device, timeout_s=config.process_timeout_s)
        self.policy = Policy(model, config, world=world)
        self._share_weights(unread)
        # Adapters are copied before `shard`, and whole models after it, part by part.
        self.reference: ScoresRows | None = None
        if teacher is not None:
            self.reference = teacher if isinstance(teacher, ScoresRows) else Teacher(teacher, config)
        elif config.beta:
            self.reference = Reference(self.policy)
        self.policy.shard(unread)
        for finding in self.policy.check():
            log.warning("%s", finding)
        if isinstance(self.reference, Reference):
            self.reference.freeze()
        self._optimizer: MasterOptimizer | None = None
        self._masters: Mapping[torch.Tensor, torch.Tensor] = {}
        """Of the last separate optimiser, until `update` has one."""
        self._given_advantages = OncePerGroup[Sequence[Advantage]](self.world.total)
        self._kl = OncePerGroup[Sequence[float | None]](self.world.total)
        self.steps_done = 0
        """Number of batches so far, including those without a trained token."""
        self.updates_done = 0
        """Number of optimiser steps that `update` applied."""
        self.tokens_seen = 0
        """Number of tokens of all episodes so far, including prompts and observations."""
        self.weights_version = 0
        """Counter that grows by one whenever the weights change, also in a warm-up."""

    def _share_weights(self, unread: Unread | None) -> None:
        """Make the replicas equal, which an adapter or a head of random weights may not be without a seed."""
        weights: dict[str, torch.Tensor] = self.model.state_dict(keep_vars=True)
        if unread is not None:
            weights = {name: one for name, one in weights.items() if one not in unread.names}
            digests = self.world.gather([unread.digest()])
            if any(one != digests[0] for one in digests):
                raise UsageError(
                    f"the processes read different models at {self.model.name_or_path}",
                    remedy="put the same files on all machines",
                )
        unequal = self.world.share_weights(weights)
        if unequal:
            log.warning(
                "%d weights were not the same in all processes (%s ...); all now have those of the first one",
                len(unequal),
                unequal[0],
            )

    @property
    def model(self) -> Any:
        """The model in training; an engine in this process may share it."""
        return self.policy.model

    @property
    def world(self) -> World:
        """The processes that train together."""
        return self.policy.world

    @property
    def optimizer(self) -> MasterOptimizer:
        """The optimiser of `update`; it is made when it is first needed, after any warm-up."""
        if self._optimizer is None:
            masters, self._masters = self._masters, {}
            self._optimizer = MasterOptimizer(self.model.named_parameters(), self.config, masters)
        return self._optimizer

    @contextmanager
    def separate_optimizer(self, config: GRPOConfig) -> Generator[MasterOptimizer]:
        """Yield an optimiser for other updates than `update`, whose optimiser starts afresh afterwards.

        Only the float32 masters go on, which hold what the weights lose by rounding.

        Two optimisers must not exist at once: the hooks of the older one would take the gradients, and its
        masters would later overwrite what the other one has learned.
        """
        self._drop_optimizer()
        # Closed even after an interruption, because its hooks would take the gradients of the next optimiser.
        with closing(MasterOptimizer(self.model.named_parameters(), config)) as optimizer:
            try:
                yield optimizer
            finally:
                self._drop_optimizer()  # a checkpoint in between has made one
                self._masters = dict(zip(optimizer.parameters, optimizer.masters, strict=True))

    def _drop_optimizer(self) -> None:
        if self._optimizer is not None:
            self._optimizer.close()
            self._optimizer = None

    # From episodes to rows ----------------------------------------------------------------

    def batch(
        self, groups: Sequence[TrajectoryGroup], demonstrations: Sequence[Trajectory] = ()
    ) -> TrainBatch:
        """Return the rows to train on, with their advantages; see `train.batch.build_batch`.

        Raises:
            UsageError: The trajectories were made with another tokenizer.
        """
        try:
            batch = self._build(groups)
        finally:
            self._given_advantages.forget()
            self._kl.forget()
        add_demonstrations(batch, demonstrations, self.policy.max_length, self.policy.vocab_size)
        return batch

    def _build(self, groups: Sequence[TrajectoryGroup]) -> TrainBatch:
        """Return the rows of groups, of which some may have been passed for this step before."""
        reference = self.reference if self.config.kl_in == "reward" else None
        bounds: dict[str, Any] = {
            "max_length": self.policy.max_length,
            "vocab_size": self.policy.vocab_size,
        }
        kl = None
        if reference is not None:
            kl = self._kl.get(groups, lambda new: episode_kl(reference, new, self.config, **bounds))
        own = self.advantage_fn
        return build_batch(
            groups,
            self.config,
            **bounds,
            weights_version=self.weights_version,
            advantage_fn=own and (lambda groups: self._given_advantages.get(groups, own)),
            kl_in_reward=kl,
            gather=self.world.gather,
        )

    def count_mixed(self, groups: Sequence[TrajectoryGroup]) -> int:
        """Return how many groups of all processes have a gradient.

        Advantages of the user's function, and the KL in the reward, are kept for the step's own `batch`.
        """
        rows = self._build(groups).rows
        return int(self.world.total(len({row.group for row in rows if row.advantages_n.any()})))

    def minibatches(self, rows: Sequence[Row], groups: Sequence[TrajectoryGroup]) -> list[list[Row]]:
        """Deal the rows of this step out to its optimiser steps, whole groups at a time."""
        seed = derive_seed(self.config.seed, "minibatches", self.steps_done)
        count = self.config.num_minibatches
        return minibatches(rows, groups, count, seed=seed, gather=self.world.gather)

    # From rows to new weights -----------------------------------------------------------

    def score_before(self, rows: Sequence[Row], *, passes: int) -> None:
        """Score the rows under the proximal policy and the reference, which stay fixed during a step.

        If the step makes a single update, the proximal policy is the policy itself and needs no extra pass.
        """
        if self.config.proximal == "recompute" and passes > 1:
            for row, old_n in zip(rows, score_rows(self.policy, rows), strict=True):
                row.old_n = old_n
        if self.reference is not None:
            self.reference.score(rows)

    @property
    def learning_rate(self) -> float:
        """The learning rate of the next update."""
        return learning_rate(self.config, self.updates_done)

    def update(self, rows: Sequence[Row], meter: Meter, *, moved: bool = False) -> tuple[float, float]:
        """Make the next update of the run on these rows; return its loss and gradient norm.

        Args:
            rows: the rows of one optimiser step, with those that only count in the weights.
            meter: collects the sums of the micro-batches.
            moved: whether an earlier update of the same batch has changed the weights.
        """
        loss, norm = self.apply(rows, self.optimizer, self.learning_rate, meter, moved=moved)
        self.updates_done += applies(norm)
        return loss, norm

    def apply(
        self,
        rows: Sequence[Row],
        optimizer: MasterOptimizer,
        rate: float,
        meter: Meter,
        *,
        moved: bool = False,
    ) -> tuple[float, float]:
        """Make one step of an optimiser on the rows; return loss and gradient norm."""
        trained = [row for row in rows if not row.counted_only]
        if not self.world.total(len(trained)):
            return 0.0, 0.0
        optimizer.zero_grad()  # an interrupted update may have left gradients
        assign_weights(rows, self.config, total=self.world.total)
        loss = accumulate(self.policy, trained, meter, loss_fn=self.loss_fn, moved=moved)
        self.world.add_gradients(optimizer)
        with self._held_still():
            norm = optimizer.step(rate)
            self.weights_version += applies(norm)
        return loss, norm

    # For checkpoints ----------------------------------------------------------------------

    def counters(self) -> dict[str, int]:
        """Return the counters that describe the progress of the training."""
        return {
            "steps_done": self.steps_done,
            "updates_done": self.updates_done,
            "tokens_seen": self.tokens_seen,
            "weights_version": self.weights_version,
        }

    def restore(self, counters: Mapping[str, int]) -> None:
        """Set the counters to what `counters` returned in an earlier process."""
        self.steps_done = counters["steps_done"]
        self.updates_done = counters["updates_done"]
        self.tokens_seen = counters["tokens_seen"]
        self.weights_version = counters["weights_version"]


def _check_own_advantages(config: GRPOConfig) -> None:
    """Refuse options that change rewards, which the user's own advantages do not see."""
    unused = {
        "overlong_penalty_tokens": bool(config.overlong_penalty_tokens),
        "kl_in='reward'": bool(config.beta) and config.kl_in == "reward",
    }
    for option, is_set in unused.items():
        if is_set:
            raise UsageError(
                f"{option} has no effect with an advantage_fn, whose advantages replace those of the rewards",
                remedy="leave the option out and apply it in the function",
            )
