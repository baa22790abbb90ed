"""Compare a trainer step (forward, loss, backward) with a plain padded step and TRL's, on the same batch.

Every kind of step runs in its own process. The first step yields the peak memory and the gradients. Then the
processes take turns, and the time is the best of them, because other work on the machine disturbs it least.
"plain" is the baseline: a padded batch, logits at completion positions only, log-softmax, backward. "saving"
is agentenv's step with `gradient_checkpointing`. The weights are random and have the shapes of the named
models. Gradients are compared with the same step in the next wider number format.

    python benchmarks/trainer.py --quick
    python benchmarks/trainer.py --json trainer.json --threads 2
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace


@dataclass(frozen=True)
class Cell:
    """A batch: the shape and number format of a model, and the shape of a group."""

    model: str
    dtype: str
    prompt: int
    completion: int
    rows: int
    trained: float = 1.0

    @property
    def name(self) -> str:
        """Description of the cell."""
        part = "" if self.trained == 1 else f", {self.trained:.0%} trained"
        return f"{self.model} {self.dtype} {self.prompt}+{self.completion} 1x{self.rows}{part}"


CELLS = {
    "tiny": Cell("tiny", "float32", 512, 256, 8, trained=0.44),
    "f32": Cell("SmolLM2", "float32", 128, 64, 4),
    "bf16": Cell("SmolLM2", "bfloat16", 128, 64, 4),
    "bf16-long": Cell("SmolLM2", "bfloat16", 256, 128, 8),
    "f32-long": Cell("SmolLM2", "float32", 256, 128, 8),
}
QUICK = ("tiny", "bf16")
HOWS = ("plain", "ours", "saving", "trl")
RATIOS = ("faster_than_plain", "cpu_faster_than_plain", "memory_of_plain")
SHAPES = {
    "SmolLM2": {
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
    },
    "tiny": {
        "vocab_size": 32768,
        "hidden_size": 192,
        "intermediate_size": 512,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
    },
}


def build_model(cell: Cell, dtype: str, device: str):
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(**SHAPES[cell.model], tie_word_embeddings=True, max_position_embeddings=8192)
    model = LlamaForCausalLM(config).to(
        getattr(torch, cell.dtype)
    )  # the cell's weights, whatever the step's format
    return model.to(device=device, dtype=getattr(torch, dtype)).eval()


def build_batch(cell: Cell):
    """Return a group: a shared prompt, random completions, and a mask that leaves out tool output."""
    import torch

    generator = torch.Generator().manual_seed(1)
    top = SHAPES[cell.model]["vocab_size"]
    prompt = torch.randint(0, top, (cell.prompt,), generator=generator)
    completions = torch.randint(0, top, (cell.rows, cell.completion), generator=generator)
    if cell.trained == 1:
        mask = torch.ones(cell.rows, cell.completion, dtype=torch.bool)
    else:
        place = torch.arange(cell.completion) % 32  # turns of the model with a tool's 18 tokens in between
        mask = ((place < 7) | (place >= 25))[None].repeat(cell.rows, 1)
    advantages = torch.randn(cell.rows, generator=generator)
    return SimpleNamespace(prompt=prompt, completions=completions, mask=mask, advantages=advantages)


def our_step(model, batch, **options: bool):
    from agentenv.training.learners.torch.passes import accumulate
    from agentenv.training.metrics import Meter

    policy, rows = our_rows(model, batch, **options)
    return lambda: accumulate(policy, rows, Meter())[0]


def our_rows(model, batch, **options: bool):
    """Return agentenv's policy and the group as its rows."""
    from agentenv.training import GRPOConfig
    from agentenv.training.learners.torch import Policy
    from agentenv.training.rows import Row
    from agentenv.training.step import assign_weights

    config = GRPOConfig(old_logprobs="recompute", tokens_per_micro_batch=8192, **options)
    policy = Policy(model, config)
    rows = []
    for number, completion in enumerate(batch.completions):
        positions = batch.mask[number].nonzero().squeeze(-1) + len(batch.prompt)
        ids = (batch.prompt.tolist() + completion.tolist())[: int(positions[-1]) + 1]
        advantages = batch.advantages[number].double().expand(len(positions))
        rows.append(Row(ids, positions, advantages * 0 - 10, advantages, number, 0))
    rows = assign_weights(rows, config)
    return policy, rows


def plain_step(model, batch):
    import torch

    from agentenv.training import GRPOConfig, grpo_loss

    device = model.device
    count, length = batch.completions.shape
    ids = torch.cat([batch.prompt[None].expand(count, -1), batch.completions], 1).to(device)
    mask = batch.mask.to(device)

    def step() -> float:
        logits = model(
            ids, attention_mask=torch.ones_like(ids), logits_to_keep=length + 1, use_cache=False
        ).logits
        wide = logits[:, :-1] if logits.dtype == torch.float64 else logits[:, :-1].float()
        lp = torch.log_softmax(wide, -1).gather(-1, ids[:, -length:, None]).squeeze(-1)
        loss = grpo_loss(
            lp,
            old_logprobs=lp.detach(),
            advantages=batch.advantages.to(lp)[:, None].expand_as(lp),
            weights=torch.full_like(lp, 1 / int(mask.sum())),
            config=GRPOConfig(),
            loss_mask=mask,
        ).loss
        loss.backward()
        return float(loss.detach())

    return step


def trl_step(model, batch):
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from datasets import Dataset
        from transformers import PreTrainedTokenizerFast
        from trl import GRPOConfig, GRPOTrainer

        from agentenv.render import byte_tokenizer

        backend = byte_tokenizer().backend
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>"
        )
        count, length = batch.completions.shape
        args = GRPOConfig(
            output_dir=tempfile.mkdtemp(),
            per_device_train_batch_size=count,
            num_generations=count,
            max_completion_length=length,
            beta=0.0,
            epsilon_high=0.28,
            use_cpu=model.device.type == "cpu",
            bf16=False,
            gradient_checkpointing=False,
            report_to=[],
        )
        dataset = Dataset.from_list([{"prompt": "x"}] * count)
        trainer = GRPOTrainer(
            model,
            lambda completions, **_: [0.0] * len(completions),
            args,
            dataset,
            processing_class=tokenizer,
        )
    trainer.current_gradient_accumulation_steps = 1
    model = trainer.model
    mask = batch.mask.long().to(model.device)
    inputs = {
        "prompt_ids": batch.prompt[None].repeat(count, 1).to(model.device),
        "prompt_mask": torch.ones(count, len(batch.prompt), dtype=torch.long, device=model.device),
        "completion_ids": batch.completions.to(model.device),
        "completion_mask": torch.ones_like(mask),
        "tool_mask": mask,
        "advantages": batch.advantages.to(model.device),
        "num_items_in_batch": mask.sum(),
    }
    trainer.tools = trainer.tools or ["a tool"]  # so that the mask is read

    def step() -> float:
        model.train()
        loss = trainer.compute_loss(model, inputs)
        loss.backward()
        return float(loss.detach())

    return step


STEPS = {
    "plain": plain_step,
    "ours": our_step,
    "saving": partial(our_step, gradient_checkpointing=True),
    "trl": trl_step,
}


def serve(cell: Cell, how: str, dtype: str, threads: int, device: str, save: str) -> None:
    """Make the first step, then one for each line of stdin; write the figures of each as a line of JSON."""
    import torch

    torch.set_num_threads(threads)
    model = build_model(cell, dtype, device)
    step = STEPS[how](model, build_batch(cell))
    reset_peak(device)
    before = memory_now(device)
    loss = float(step())
    print(json.dumps({"peak_bytes": memory_peak(device) - before, "loss": loss}), flush=True)
    torch.save([one.grad.cpu() for one in model.parameters()], save)
    for _ in sys.stdin:
        model.zero_grad()
        synchronize(device)
        started, cpu_started = time.perf_counter(), time.process_time()
        step()
        synchronize(device)
        took = {
            "seconds": time.perf_counter() - started,
            "cpu_seconds": time.process_time() - cpu_started,
        }
        print(json.dumps(took), flush=True)


def synchronize(device: str) -> None:
    if device == "cuda":
        import torch

        torch.cuda.synchronize()


def reset_peak(device: str) -> None:
    if device == "cuda":
        import torch

        torch.cuda.reset_peak_memory_stats()
        return
    Path("/proc/self/clear_refs").write_text("5")


def memory_now(device: str) -> int:
    if device == "cuda":
        import torch

        return torch.cuda.memory_allocated()
    return _status("VmRSS")


def memory_peak(device: str) -> int:
    if device == "cuda":
        import torch

        return torch.cuda.max_memory_allocated()
    return _status("VmHWM")


def _status(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) * 1024
    return 0


class Child:
    """A process that makes one kind of step."""

    def __init__(self, cell: str, how: str, dtype: str, save: Path, options: argparse.Namespace) -> None:
        command = [sys.executable, __file__, "--child", cell, how, dtype, str(save)]
        command += ["--threads", str(options.threads), "--device", options.device]
        self.how = how
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - open as long as the process lives
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors, text=True
        )
        self.first = self._read()

    def step(self) -> dict[str, float]:
        """Make one more step and return its figures."""
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self._read()

    def close(self) -> None:
        """End the process; if it failed, print the last line of its errors."""
        self.process.communicate()
        if self.process.returncode:
            self.errors.seek(0)
            reason = (self.errors.read().strip().splitlines() or ["no reason given"])[-1]
            print(f"  {self.how} skipped: {reason}", file=sys.stderr)

    def _read(self) -> dict[str, float]:
        for line in self.process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        return {}


def gradient_error(left: Path, truth: Path) -> float:
    import torch

    ours, right = torch.load(left), torch.load(truth)
    gap = sum(float((a.double() - b.double()).square().sum()) for a, b in zip(ours, right, strict=True))
    size = sum(float(b.double().square().sum()) for b in right)
    return (gap / size) ** 0.5


def run_cell(name: str, options: argparse.Namespace, hows: list[str]) -> list[dict]:
    cell = CELLS[name]
    wider = {"float32": "float64", "bfloat16": "float32"}[cell.dtype]
    with tempfile.TemporaryDirectory() as folder:
        saves = {how: Path(folder) / how for how in ("truth", *hows)}
        if not options.no_truth:
            Child(name, "plain", wider, saves["truth"], options).close()
        started = [Child(name, how, cell.dtype, saves[how], options) for how in hows]
        children = [child for child in started if child.first]
        steps = [[child.step() for child in children] for _ in range(1 if options.quick else options.rounds)]
        for child in started:
            child.close()
        rows: list[dict] = []
        for child, taken in zip(children, zip(*steps, strict=True), strict=True):
            best = {key: min(one[key] for one in taken) for key in ("seconds", "cpu_seconds")}
            truth = saves["truth"]
            compared = truth.exists() and saves[child.how].exists()
            error = gradient_error(saves[child.how], truth) if compared else None
            rows.append({"cell": cell.name, "how": child.how, **child.first, **best, "gradient_error": error})
    plain = next((row for row in rows if row["how"] == "plain"), None)
    for row in rows:
        pairs = (("seconds", plain, row), ("cpu_seconds", plain, row), ("peak_bytes", row, plain))
        for name, (key, above, below) in zip(RATIOS, pairs, strict=True):
            row[name] = above[key] / below[key] if plain else None
    return rows


HEADER = (
    "batch",
    "step",
    "wall",
    "CPU",
    "peak extra memory",
    "gradient error",
    "faster, wall",
    "faster, CPU",
    "memory of plain",
)


def show(rows: list[dict]) -> None:
    for row in rows:
        cells = [row["cell"], row["how"], f"{row['seconds']:.3f} s", f"{row['cpu_seconds']:.3f} s"]
        cells += [f"{row['peak_bytes'] / 1e6:.0f} MB", shown(row["gradient_error"], ".1e")]
        cells += [shown(row[name], ".2f") for name in RATIOS]
        print(f"| {' | '.join(cells)} |", flush=True)


def shown(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="two cells, one repeat")
    parser.add_argument("--json", metavar="PATH")
    parser.add_argument("--cells", nargs="*", choices=list(CELLS))
    parser.add_argument("--without", nargs="*", choices=HOWS, default=[], help="leave these steps out")
    parser.add_argument("--no-truth", action="store_true", help="do not compare gradients")
    parser.add_argument("--rounds", type=int, default=5, help="steps after the first")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        cell, how, dtype, save = options.child
        serve(CELLS[cell], how, dtype, options.threads, options.device, save)
        return 0
    print(f"{platform.processor() or platform.machine()}, {options.threads} threads, {options.device}")
    print(f"| {' | '.join(HEADER)} |\n|{'---|' * len(HEADER)}")
    rows: list[dict] = []
    for name in options.cells or (QUICK if options.quick else CELLS):
        found = run_cell(name, options, [how for how in HOWS if how not in options.without])
        rows += found
        show(found)
    if options.json:
        Path(options.json).write_text(json.dumps(rows, indent=2) + "\n")
    # TRL may be missing; our own step may not.
    return not any(row["how"] == "ours" for row in rows)


if __name__ == "__main__":
    sys.exit(main())
