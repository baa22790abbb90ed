"""Train a model in SCoRe's two stages to correct its own answers, and show what each stage changed.

A tiny model first imitates a teacher who is right half of the time and mostly repeats itself. Stage I rewards
the second attempt and holds the first one close to that model; stage II rewards both, and progress once more.
The arguments are steps of imitation, steps of a stage, and seed: python examples/score.py 350 40 0
"""

import sys

from transformers import LlamaConfig, LlamaForCausalLM, set_seed

import agentenv as ae
from agentenv.render import byte_tokenizer
from agentenv.training import Callbacks, GRPOConfig, GRPOTrainer, demonstrate
from agentenv_envs.score_self_correction import SelfCorrection

TASKS = [{"question": f"What is {n} + 1?", "answer": n + 1} for n in range(1, 9)]
SPEC = ae.EnvSpec.of("examples/SelfCorrection-v0", SelfCorrection, tasks={"train": TASKS, "test": TASKS})
CREDIT = {"learning_rate": 1e-3, "groups_per_step": 8, "turn_discount": 0.0}
STAGES = {  # the arguments of the environment, and the settings of the trainer
    "stage I": ({"stage": 1, "alpha": 0}, {"beta": (1, 0)}),
    "stage II": ({"stage": 2, "alpha": 2}, {"beta": 0.01}),
}


def teacher(messages, task, rng):
    if len(messages) > 1 and rng.random() < 0.7:
        return messages[1]["content"]
    return str(task["answer"] if rng.random() < 0.5 else rng.randint(2, 9))


def main(warmup: int = 350, steps: int = 40, seed: int = 0) -> None:
    tokenizer, played = byte_tokenizer(), []
    set_seed(seed)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=tokenizer.vocab_size, initializer_range=0.1, **sizes))
    parts = {"limits": ae.RunLimits(max_tokens_per_turn=6), "callbacks": Callbacks(on_held_out=played.append)}
    parts |= {"model": model, "tokenizer": tokenizer}
    common = {"max_steps": steps, "seed": seed, "eval_temperature": 1, "num_generations_eval": 16, **CREDIT}

    def show(name: str) -> None:
        played.clear()
        trainer.evaluate()
        first, second = ([one.rewards.get(f"{n}_correct", 0) for one in played] for n in ("first", "second"))
        up, down = ([*zip(first, second, strict=True)].count(pair) for pair in ((0, 1), (1, 0)))
        shares = [f"{number / len(played):.2f}" for number in (sum(first), sum(second), up, down)]
        print("{}: first {}, second {}, wrong to right {}, right to wrong {}".format(name, *shares))

    trainer = GRPOTrainer(GRPOConfig(**common), envs=SPEC, **parts)
    shown = demonstrate(SPEC, TASKS * 80, teacher, trainer.renderer, seed=seed)
    trainer.warmup(shown, steps=warmup, batch_size=32, learning_rate=2e-3, lr_scheduler_type="cosine")
    show("before")
    for name, (env, train) in STAGES.items():  # the reference of each stage is the model before it
        trainer = GRPOTrainer(GRPOConfig(**common, **train), envs=SPEC.with_kwargs(env), **parts)
        trainer.train()
        show(name)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
