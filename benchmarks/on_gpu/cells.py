"""What the parts of `make gpu` share: figures that are kept as they come, and models of a card's size.

Each part is a script with the same arguments, a process of its own, and needs neither vLLM nor a model file:

    python benchmarks/on_gpu/exact.py --device cuda --json build/gpu/exact.json
    python benchmarks/on_gpu/exact.py --device cpu --small      # tries the same code without a GPU
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from agentenv.training.rows import Row

SHAPES: dict[str, dict[str, Any]] = {
    "0.6B": {"hidden_size": 1024, "num_hidden_layers": 28, "intermediate_size": 3072},
    "1.7B": {"hidden_size": 2048, "num_hidden_layers": 28, "intermediate_size": 6144},
}
"""What differs between the models of Qwen3 with these names."""
COMMON = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936}
SMALL = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 1024,
}


class Bench:
    """The arguments of a part, and its figures."""

    def __init__(self, doc: str | None) -> None:
        parser = argparse.ArgumentParser(
            description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
        parser.add_argument("--small", action="store_true", help="small shapes and few repeats")
        parser.add_argument("--json", type=Path, help="write the figures to this file, each as it is known")
        given = parser.parse_args()
        self.device: str = given.device
        self.cuda = self.device == "cuda"
        self.small: bool = given.small
        self._file: Path | None = given.json
        self._told: list[dict[str, Any]] = []
        self._failed = False

    def tell(self, what: str, **values: Any) -> None:
        """Keep figures, and print them."""
        self._told.append({"what": what, **values})
        if self._file is not None:
            self._file.write_text(json.dumps(self._told, indent=1, default=str) + "\n")
        shown = (
            f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
            for name, value in values.items()
        )
        print(f"{what}: {', '.join(shown)}", flush=True)

    @contextmanager
    def cell(self, what: str) -> Generator[None]:
        """Measure something whose failure leaves the others their figures."""
        try:
            yield
        except Exception as error:
            self._failed = True
            traceback.print_exc(limit=-6)
            self.tell(what, failed=f"{type(error).__name__}: {str(error)[:300]}")
        finally:
            gc.collect()
            if self.cuda:
                torch.cuda.empty_cache()

    def end(self) -> None:
        """End the process, with the exit code 1 if a cell failed."""
        sys.exit(int(self._failed))

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.cuda:
            torch.cuda.synchronize()

    def seconds(self, call: Callable[[], object], *, repeats: int = 3, warm: int = 1) -> float:
        """Return the median time of a call."""
        for _ in range(warm):
            call()
        taken: list[float] = []
        for _ in range(1 if self.small else repeats):
            self.synchronize()
            began = time.perf_counter()
            call()
            self.synchronize()
            taken.append(time.perf_counter() - began)
        return statistics.median(taken)

    @contextmanager
    def peak(self) -> Generator[dict[str, float]]:
        """Give the most memory that what runs inside takes beyond what was held before, in GB."""
        found: dict[str, float] = {}
        before = 0
        if self.cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        yield found
        if self.cuda:
            found["extra_GB"] = (torch.cuda.max_memory_allocated() - before) / 1e9

    def profiled(self, call: Callable[[], object], repeats: int, table: str) -> dict[str, float]:
        """Return what a call does on the device, each time; the whole table is kept beside the figures."""
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * self.cuda]) as seen:
            for _ in range(repeats):
                call()
            self.synchronize()
        events = seen.key_averages()
        if self._file is not None:
            key = "self_cuda_time_total" if self.cuda else "self_cpu_time_total"
            kept = self._file.with_name(f"{self._file.stem}-{table}.txt")
            kept.write_text(events.table(sort_by=key, row_limit=40))

        def counted(*names: str) -> float:
            return sum(event.count for event in events if event.key.startswith(names)) / repeats

        return {
            "device_ms": sum(event.self_device_time_total for event in events) / repeats / 1e3,
            "launches": counted("cudaLaunchKernel", "cuLaunchKernel"),
            "waits": counted("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize"),
            "copies": counted("cudaMemcpy"),
        }

    def model(
        self, shape: str, dtype: torch.dtype, *, layers: int | None = None, peaked: bool = False
    ) -> Any:
        """Return a Qwen3 with random weights.

        Args:
            shape: name of its shape.
            dtype: number format.
            layers: number of layers, if not all.
            peaked: whether it has a head of its own, and logits that vary by 4 as a trained model's do.
        """
        torch.manual_seed(0)
        sizes = SMALL if self.small else COMMON | SHAPES[shape]
        own = {} if layers is None else {"num_hidden_layers": layers}
        config = Qwen3Config(**(sizes | own), max_position_embeddings=40_960, tie_word_embeddings=not peaked)
        with torch.device(self.device):
            model = Qwen3ForCausalLM(config)
        if peaked:
            model.model.norm.weight.data.mul_(24.0 if self.small else 6.0)
        return model.to(dtype).eval()


def group_rows(count: int, prompt: int, length: int, vocabulary: int) -> list[Row]:
    """Return the rows of one group: a common prompt, and completions of up to `length` tokens."""
    draw = torch.Generator().manual_seed(count + prompt + length)
    start = torch.randint(1, vocabulary, (prompt,), generator=draw).tolist()
    rows: list[Row] = []
    for member in range(count):
        own = length - (member * 37) % max(1, length // 3)
        ids = [*start, *torch.randint(1, vocabulary, (own,), generator=draw).tolist()]
        positions_n = torch.arange(prompt, len(ids))
        sampled_n = torch.full((own,), -5.0, dtype=torch.float64)
        advantages_n = torch.full((own,), float(member % 3 - 1), dtype=torch.float64)
        rows.append(Row(ids, positions_n, sampled_n, advantages_n, member, 0))
    return rows


def gaps(ours: Sequence[float] | Tensor, truth: Sequence[float] | Tensor) -> dict[str, float]:
    """Return how far log-probabilities are apart, with their estimated divergence (k3)."""
    gap = torch.as_tensor(truth, dtype=torch.float64) - torch.as_tensor(ours, dtype=torch.float64)
    return {
        "mean": float(gap.abs().mean()),
        "max": float(gap.abs().max()),
        "k3": float((gap.exp() - 1 - gap).mean()),
    }
