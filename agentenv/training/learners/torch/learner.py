"""The learner on this machine's CPUs and GPUs: a transformers model, its optimiser and its reference."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from agentenv.core.errors import UsageError
from agentenv.core.images import Sees
from agentenv.core.visible import logger
from agentenv.training.config import GRPOConfig
from agentenv.training.learners.learner import LossFn, ScoresRows
from agentenv.training.learners.torch.adapters import adapter_of
from agentenv.training.learners.torch.optim import MasterOptimizer
from agentenv.training.learners.torch.passes import accumulate, score_rows
from agentenv.training.learners.torch.policy import Policy, add_lora, freeze_towers
from agentenv.training.learners.torch.world import World
from agentenv.training.metrics import Meter, applies
from agentenv.training.rows import Row, Scores
from agentenv.training.stop import stop

if TYPE_CHECKING:
    from agentenv.training.learners.torch.blank import Unread
    from agentenv.training.learners.torch.reference import Reference

__all__ = ["TorchLearner", "peak_of"]

log = logger(__name__)


class TorchLearner:
    """The policy in training with its optimiser and its reference; see `agentenv.training.learners.Learner`.

    Args:
        model: a causal language model from transformers.
        config: the run's options.
        teacher: a model in the place of the reference, or what asks one on servers, if any.
        held_still: returns a context in which no engine samples from the weights, so that they can change.
        unread: files with the weights of a model that is to be sharded and has none yet.
        vision: what the model sees with; None if it sees nothing.

    Raises:
        UsageError: The model cannot be trained.
    """

    def __init__(
        self,
        model: Any,
        config: GRPOConfig,
        *,
        teacher: Any = None,
        held_still: Callable[[], AbstractContextManager[None]] = nullcontext,
        unread: Unread | None = None,
        vision: Sees | None = None,
    ) -> None:
        self.config = config
        self._held_still = held_still
        torch.manual_seed(config.seed)
        model = model if config.lora is None else add_lora(model, config.lora)
        world = unread and World(unread.device)
        if vision is not None and not config.train_vision:
            freeze_towers(model)
        if not any(weight.requires_grad for weight in model.parameters()):
            raise UsageError(
                "no weight of the model takes a gradient", remedy="model.requires_grad_(True), or set lora"
            )
        self.policy = Policy(model, config, world=world, vision=vision)
        # Adapters are copied before `shard`, and whole models after it, part by part.
        self.reference: ScoresRows | None = None
        try:
            self._begin(teacher, unread)
        except Exception as error:  # noqa: BLE001 - out of memory, say; it is raised when the others know
            self.world.settle(error, in_a_pass=True)
        self._optimizer: MasterOptimizer | None = None
        self._separate: MasterOptimizer | None = None
        """The optimiser of a `separate_optimizer` context."""
        self._masters: Mapping[torch.Tensor, torch.Tensor] = {}
        """Of the last separate optimiser, until the usual one takes them over."""
        self._meter = Meter()
        """Of the passes since the last optimiser step."""
        self.weights_version = 0
        """Counter that grows by one whenever the weights change, also in a warm-up."""

    def _begin(self, teacher: Any, unread: Unread | None) -> None:
        """Make the weights of all processes equal, add the reference, shard, and check what is exact."""
        self._share_weights(unread)
        first_weights: Reference | None = None
        if teacher is not None or self.config.loss.has_kl:
            # Loaded here, because few trainings have a reference.
            from agentenv.training.learners.torch.reference import Reference, Teacher

            if teacher is None:
                self.reference = first_weights = Reference(self.policy)
            else:
                self.reference = teacher if isinstance(teacher, ScoresRows) else Teacher(teacher, self.config)
        self.policy.shard(unread)
        for finding in self.policy.check():
            log.warning("%s", finding)
        if first_weights is not None:
            first_weights.freeze()
        self.world.settle(None)

    def _share_weights(self, unread: Unread | None) -> None:
        """Make the replicas equal, which an adapter or a head of random weights may not be without a seed."""
        weights: dict[str, torch.Tensor] = self.model.state_dict(keep_vars=True)
        if unread is not None:
            weights = {name: one for name, one in weights.items() if one not in unread.sources}
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
    def adapter(self) -> str | None:
        """Name of the adapter in training; None if all weights are trained."""
        return adapter_of(self.model)

    @property
    def world(self) -> World:
        """The processes that train together."""
        return self.policy.world

    @property
    def max_length(self) -> int | None:
        """Length of the longest sequence that the model accepts; None if there is no limit."""
        return self.policy.max_length

    @property
    def vocab_size(self) -> int:
        """Size of the model's vocabulary."""
        return self.policy.vocab_size

    def score(self, rows: Sequence[Row]) -> list[torch.Tensor]:
        """Return the log-probabilities of each row's trained tokens under the current weights."""
        return score_rows(self.policy, rows)

    def forward_backward(
        self, rows: Sequence[Row], meter: Meter, *, loss_fn: LossFn | None = None, moved: bool = False
    ) -> tuple[float, list[Scores]]:
        """Compute the gradient of the rows' loss; return this process's part of it and its rows' scores."""
        self._meter = meter
        clear = (self._separate or self.optimizer).zero_grad  # an interrupted update may have left gradients
        return accumulate(self.policy, rows, meter, loss_fn=loss_fn, moved=moved, clear=clear)

    def optim_step(self, rate: float) -> float:
        """Add the gradients of all processes and apply them; return their norm before clipping."""
        optimizer = self._separate or self.optimizer
        self.world.add_gradients(optimizer)
        with self._held_still(), stop.writing:
            norm = optimizer.step(rate)
            self.weights_version += applies(norm)
        if (peak := peak_of(self.policy.device)) is not None:  # of the passes and of the step
            self._meter.add_extremes({"memory/held_gb/max": torch.tensor(peak / 1e9)})
        return norm

    @property
    def torn(self) -> bool:
        """Whether an optimiser step was broken off, or still writes: some weights are new and others not."""
        return any(one is not None and one.torn for one in (self._optimizer, self._separate))

    @property
    def optimizer(self) -> MasterOptimizer:
        """The optimiser of the training; it is made when it is first needed, after any warm-up."""
        if self._optimizer is None:
            masters, self._masters = self._masters, {}
            self._optimizer = MasterOptimizer(self.model.named_parameters(), self.config, masters)
        return self._optimizer

    @contextmanager
    def separate_optimizer(self, config: GRPOConfig) -> Generator[None]:
        """Step with an optimiser of its own in this context; the usual one starts afresh afterwards.

        Only the float32 masters go on, which hold what the weights lose by rounding.

        Two optimisers must not exist at once: the hooks of the older one would take the gradients, and its
        masters would later overwrite what the other one has learned.
        """
        self._drop_optimizer()
        # Closed even after an interruption, because its hooks would take the gradients of the next optimiser.
        with closing(MasterOptimizer(self.model.named_parameters(), config)) as optimizer:
            self._separate = optimizer
            try:
                yield
            finally:
                self._separate = None
                self._drop_optimizer()  # a checkpoint in between has made one
                self._masters = dict(zip(optimizer.parameters, optimizer.masters, strict=True))

    def _drop_optimizer(self) -> None:
        if self._optimizer is not None:
            self._optimizer.close()
            self._optimizer = None


def peak_of(device: torch.device) -> int | None:
    """Return the most bytes that tensors held on a device since the last call; None on the CPU."""
    if device.type != "cuda":
        return None
    peak = torch.cuda.max_memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    return peak
