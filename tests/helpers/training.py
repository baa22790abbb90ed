"""Tiny models, made-up episodes and trainers."""

from __future__ import annotations

from pathlib import Path
from zlib import crc32

import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from agentenv.core import SequenceBuilder, StopReason, Trajectory, TrajectoryGroup, Turn
from agentenv.render import byte_tokenizer
from agentenv.training import GRPOConfig, GRPOTrainer, grpo_loss
from agentenv.training.loop import save_tokenizer
from agentenv.training.objective.loss import LossOutput
from agentenv.training.rows import Row


def tiny(seed: int = 0, dtype: torch.dtype = torch.float64, **options) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    settings = {
        "vocab_size": 61,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "initializer_range": 0.3,
        **options,
    }
    return LlamaForCausalLM(LlamaConfig(**settings)).to(dtype).eval()


def saved_tiny(path: Path) -> str:
    """Write a model of one layer, which reads and writes bytes, to a directory; return the directory."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    tokenizer = byte_tokenizer()
    config = LlamaConfig(vocab_size=tokenizer.vocab_size, initializer_range=0.2, **sizes)
    LlamaForCausalLM(config).save_pretrained(path)
    save_tokenizer(tokenizer, path)
    return str(path)


def tiny_gpt2(seed: int = 0, **options) -> GPT2LMHeadModel:
    """Float64 through and through: Llama's norm computes in float32 whatever its weights are."""
    torch.manual_seed(seed)
    sizes = {"vocab_size": 61, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
    config = GPT2Config(initializer_range=0.2, bos_token_id=0, eos_token_id=0, **{**sizes, **options})
    return GPT2LMHeadModel(config).double().eval()


def make_row(ids: list[int], trained: list[int], group: int = 0, weight: float = 1.0) -> Row:
    count = len(trained)
    return Row(
        ids, torch.tensor(trained), torch.full((count,), -2.0), torch.ones(count), group, group, weight=weight
    )


def episode(
    task: str,
    member: int,
    reward: float | None,
    *,
    tokens: int = 5,
    stop: StopReason = StopReason.FINAL_ANSWER,
    version: int = 0,
    top: int = 61,
    **fields,
) -> Trajectory:
    generator = torch.Generator().manual_seed(crc32(f"{task} {member}".encode()))
    prompt = torch.randint(0, top, (6,), generator=torch.Generator().manual_seed(len(task))).tolist()
    sampled = torch.randint(0, top, (tokens,), generator=generator).tolist()
    builder = SequenceBuilder()
    builder.append("prompt", prompt)
    builder.append("model", sampled, logprobs=[-3.5] * tokens, weights_version=version, turn=0)
    builder.append("env", [1, 2], turn=0)
    turn = Turn(0, {"role": "assistant", "content": "x"}, "stop", tokens, start=6, reward=reward or 0.0)
    return Trajectory(
        "test/E-v0",
        task,
        0,
        f"group-{task}",
        stop,
        member=member,
        turns=(turn,),
        sequences=(builder.freeze(),),
        reward=reward,
        **fields,
    )


def group(task: str, rewards: list[float | None], **options) -> TrajectoryGroup:
    return TrajectoryGroup(
        tuple(episode(task, n, reward, tokens=3 + n, **options) for n, reward in enumerate(rewards))
    )


def trainer_of(model=None, **options) -> GRPOTrainer:
    settings = {"learning_rate": 1e-3, "dtype": "float64", **options}
    return GRPOTrainer(GRPOConfig(**settings), model=model or tiny())


def loss_of(
    lp: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor | None = None, weights=None, **given
) -> LossOutput:
    """The loss of tokens, each with the advantage 1 and the weight 1 unless told otherwise.

    Args:
        lp: log-probabilities by the policy.
        old: log-probabilities by the policy before.
        advantages: advantages of the tokens.
        weights: weights of the tokens.
        given: further tensors by the names that `grpo_loss` has for them, and options of the training.
    """
    ones = torch.ones_like(lp.detach())
    tensors = {name: given.pop(name) for name, value in [*given.items()] if isinstance(value, torch.Tensor)}
    return grpo_loss(
        lp,
        old_logprobs=old,
        advantages=ones if advantages is None else advantages,
        weights=ones if weights is None else weights,
        config=GRPOConfig(**given),
        **tensors,
    )
