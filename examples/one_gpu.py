"""Train on one GPU: vLLM samples and the trainer updates, in turn.

python examples/one_gpu.py MODEL [STEPS]        (pip install '.[train,vllm]')
python examples/one_gpu.py MODEL STEPS http://HOST:PORT/v1   # vLLM on another GPU: agentenv serve MODEL

vLLM sleeps while the trainer updates: it frees its weights and its cache, and takes them back with the new
weights. `agentenv plan` says beforehand whether a model fits.
"""

import sys

import agentenv as ae


def main(model: str, steps: int = 20, server: str = "", tokens: int = 200) -> None:
    result = ae.train(
        "agentenv/Calculator-v0",
        model,
        steps=steps,
        group_size=8,
        groups_per_step=8,
        learning_rate=1e-5,
        lora=None if server else {"r": 16},  # moments and gradients of the adapter only
        gradient_checkpointing=True,
        tokens_per_micro_batch=8192,
        demos="none",
        limits={"max_turns": 4, "max_tokens_per_turn": tokens},
        eval_tasks=32,
        on_metrics=show,
        **({"train": {"engine": server}} if server else vllm_here(model)),
    )
    print(f"agentenv view {result.run.id}")


def vllm_here(model: str) -> dict[str, object]:
    return {"train": {"engine": f"vllm:{model}"}, "engine": {"sleep": True, "memory_share": 0.5}}


def show(step: int, metrics: dict[str, float]) -> None:
    spent = [f"{name} {metrics[f'time/{name}']:.1f} s" for name in ("rollout", "update", "sync")]
    print(f"step {step}: reward {metrics['reward']:.2f}, {', '.join(spent)}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:3]), *sys.argv[3:4], *map(int, sys.argv[4:]))
