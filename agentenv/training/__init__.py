"""Train a model on trajectory groups with GRPO and related losses, in a small and exact trainer.

The trainer sees token sequences, loss masks, the sampler's logprobs and rewards; it never sees text,
an environment or a tool. Every normalisation is one weight per token, computed once over the global
batch (`agentenv.training.objective.weighting`), so micro-batches, packing and ranks cannot change a result.

    result = agentenv.train("agentenv/Calculator-v0", "PATH", steps=20)     # a whole run, in a run directory

The command `agentenv train` calls `agentenv.train(...)`; see `agentenv.training.run.train`. Programs that
want a loop of their own use `GRPOTrainer`, on which that function is built:

    config = GRPOConfig(model="PATH", groups_per_step=4, num_generations=8, max_steps=20)
    trainer = GRPOTrainer(config, envs="agentenv/Calculator-v0", limits=RunLimits(max_turns=3))

    trainer.warmup(demonstrations, steps=16, batch_size=8)   # supervised
    metrics = trainer.step(groups)      # one batch of TrajectoryGroups, from any source
    history = trainer.train()           # play, step, sync, evaluate, save, until max_steps
    scores = trainer.evaluate()         # success on held-out tasks, greedy by default
    trainer.save("runs/x/checkpoints/step-20")          # a plain Hugging Face directory
    trainer.resume("runs/x/checkpoints/step-20")        # bit-equal on CPU

`GRPOTrainer(config, *, model=None, tokenizer=None, engine=None, engine_options=None, envs=None,
tasks=None, eval_tasks=None, limits=None, runner=None, advantage_fn=None, loss_fn=None,
callbacks=None)`:

- `model`: a path or Hub id, or a `transformers` model; `config.model` when None.
- `tokenizer`: a `ChatTokenizer`; when None, it is loaded from the model's path. Only playing needs it.
- `engine`: the engine that generates episodes; when None, the in-process transformers engine on the
  trainer's own weights.
- `engine_options`: keyword arguments of the engine that the trainer makes when `engine` is None.
- `envs`: an environment id, an `EnvSpec`, a mapping of ids to weights, or a list of these or of
  `(environment, weight)` pairs.
- `limits`: the limits of each episode (`RunLimits`).
- `runner`: options such as the number of concurrent episodes (`RunnerOptions`).
- `tasks`, `eval_tasks`: task sets; when None, the split "train" and the held-out split of the spec's tasks.
- `advantage_fn(groups)`: your own advantages. It returns, for each group, a list with one advantage per
  member: a number, or for each sequence of the member a list with one number per token. It sees each group
  once: with `refill_rounds` it is called for each round, with the groups of that round.
- `loss_fn(inputs)`: your own surrogate loss. It takes `LossInputs` and returns the loss of each token,
  `[N]`; the trainer then applies the tokens' weights, the corrections and the KL term.
- `callbacks`: functions that are called with metrics and episodes (`Callbacks`).

`demonstrate(spec, tasks, policy, trainer.renderer, limits=..., seed=...)` plays a scripted policy
(messages, task, random -> assistant message) through the runner and returns trajectories that
`warmup` takes. `grpo_loss` and its parts are pure functions of tensors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentenv.core.door import door
from agentenv.core.errors import DependencyMissing

if TYPE_CHECKING:
    from agentenv.training.config import GRPOConfig as GRPOConfig
    from agentenv.training.elsewhere import LearnerElsewhere as LearnerElsewhere
    from agentenv.training.elsewhere import LearnerForm as LearnerForm
    from agentenv.training.loading import find_teacher as find_teacher
    from agentenv.training.loop.callbacks import Callbacks as Callbacks
    from agentenv.training.loop.sft import DemonstrationPolicy as DemonstrationPolicy
    from agentenv.training.loop.sft import demonstrate as demonstrate
    from agentenv.training.objective.advantage import group_advantages as group_advantages
    from agentenv.training.objective.loss import LossInputs as LossInputs
    from agentenv.training.objective.loss import grpo_loss as grpo_loss
    from agentenv.training.objective.loss import kl_penalty as kl_penalty
    from agentenv.training.objective.weighting import token_weights as token_weights
    from agentenv.training.options.evaluation import EvaluationOptions as EvaluationOptions
    from agentenv.training.options.lora import LoraOptions as LoraOptions
    from agentenv.training.options.loss import LossOptions as LossOptions
    from agentenv.training.options.optimizer import OptimizerOptions as OptimizerOptions
    from agentenv.training.options.sampling import SamplingOptions as SamplingOptions
    from agentenv.training.options.stream import StreamOptions as StreamOptions
    from agentenv.training.request import TrainPlan as TrainPlan
    from agentenv.training.run import TrainResult as TrainResult
    from agentenv.training.run import train as train
    from agentenv.training.trainer import GRPOTrainer as GRPOTrainer


def _require_torch(name: str) -> None:
    if name not in {"Callbacks", "GRPOConfig"} and not name.endswith("Options"):
        DependencyMissing.require("torch", "transformers", extra="train", purpose=f"agentenv.training.{name}")


__all__ = door(__name__, require=_require_torch)
