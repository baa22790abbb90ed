"""Self-play that learns: a tiny new model plays both seats of Kuhn poker and becomes hard to exploit.

It first imitates moves by chance, which show it the words of the game and not what they are worth. Then it
only plays against itself. The arguments are training steps and seed: python examples/self_play.py 80 0
"""

import sys

import torch
from tokenizers import AddedToken, Tokenizer
from torch.nn.utils.rnn import pad_sequence
from transformers import LlamaConfig, LlamaForCausalLM, set_seed

import agentenv as ae
from agentenv.render import ChatTokenizer, byte_tokenizer
from agentenv.training import Callbacks, GRPOConfig, GRPOTrainer, demonstrate
from agentenv_envs.kuhn import SITUATIONS, KuhnPoker, deals, exploitability, messages_at

GAME, MOVES = ae.spec("agentenv/KuhnPoker-v0"), ("pass", "bet")
PHRASES = (KuhnPoker.system_prompt, "system\n", "user\n", "assistant\n", "You have ", "So far: ", *MOVES)
BATCH = {"groups_per_step": 12, "num_generations": 16, "num_iterations": 4, "scale_rewards": "none"}
# Seats that answer to each other circle round the best play. The KL to chance and no momentum damp that.
STEADY = {"beta": 0.1, "adam_beta1": 0.0, "lr_scheduler_type": "linear"}


@torch.no_grad()
def measure(trainer: GRPOTrainer) -> tuple[float, float]:
    """Return the exact exploitability, and how likely a valid move is where it is least likely."""
    prompts = [torch.tensor(trainer.renderer.start(messages_at(situation))) for situation in SITUATIONS]
    logits = trainer.model(pad_sequence(prompts, batch_first=True)).logits
    last = torch.stack([logits[n, len(prompt) - 1] for n, prompt in enumerate(prompts)]).softmax(-1)
    moves = last[:, [trainer.tokenizer.encode(move)[0] for move in MOVES]]
    bets = (moves[:, 1] / moves.sum(-1)).tolist()
    return exploitability(dict(zip(SITUATIONS, bets, strict=True))), moves.sum(-1).min().item()


def learn(steps: int = 80, seed: int = 0) -> list[tuple[float, float]]:
    """Return what `measure` says after the imitation and after each step of self-play."""
    set_seed(seed)
    known, measured = byte_tokenizer(), []
    backend = Tokenizer.from_str(known.backend.to_str())
    backend.add_tokens([AddedToken(phrase, normalized=False) for phrase in PHRASES])
    tokenizer = ChatTokenizer(backend, chat_template=known.chat_template, special_tokens=known.special_tokens)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=tokenizer.vocab_size, initializer_range=0.3, **sizes))
    parts = {"model": model, "tokenizer": tokenizer, "limits": ae.RunLimits(max_tokens_per_turn=2)}
    first = GRPOTrainer(GRPOConfig(seed=seed), **parts)
    shown = demonstrate(GAME, deals() * 40, lambda messages, task, rng: rng.choice(MOVES), first.renderer)
    first.warmup(shown, steps=40, batch_size=64, learning_rate=3e-3)
    config = GRPOConfig(max_steps=steps, seed=seed, learning_rate=2e-4, stop=MOVES, **BATCH, **STEADY)
    parts["callbacks"] = Callbacks(on_metrics=lambda step, metrics: measured.append(measure(trainer)))
    trainer = GRPOTrainer(config, envs=GAME.with_kwargs({"opponents": "self"}), **parts)
    measured.append(measure(trainer))
    trainer.train()
    return measured


if __name__ == "__main__":
    for step, (exploited, valid) in enumerate(learn(*map(int, sys.argv[1:]))):
        print(f"step {step}: exploitability {exploited:.3f}, a valid move in at least {valid:.1%}")
