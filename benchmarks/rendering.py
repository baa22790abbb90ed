"""Measure the cost of rendering a turn at different lengths of the conversation, and the cost of start-up.

Each figure is the best of its repeats, with the median beside it: on a shared machine, the best shows the
cost of the work itself, and the median also shows the influence of other processes. The peer renders and
encodes the whole conversation with transformers' `apply_chat_template` in the same run. "encode" is what
encoding the new text alone takes, which no rendering can do without.

    python benchmarks/rendering.py [--quick] [--json PATH]
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from agentenv.core import ToolCall
from agentenv.render import ChatTokenizer, Renderer

DATA = Path(__file__).parents[1] / "tests" / "data" / "tokenizers"
FAMILIES = ("qwen3", "mistral_tekken", "gptoss", "smollm2")
WORDS = ("the", "tool", "found", "a", "few", "results", "about", "weather", "in", "the", "northern", "city")
TOOL = {
    "type": "function",
    "function": {
        "name": "lookup",
        "description": "Look something up.",
        "parameters": {"type": "object", "properties": {"q": {"type": "string", "description": "Words."}}},
    },
}
NEW_TOKENS = 240


def interleaved_ms(runs: Sequence[Callable[[], object]], repeats: int) -> list[list[float]]:
    """Return the CPU milliseconds of each call; the calls alternate, so a busy moment affects all of them."""
    costs: list[list[float]] = [[] for _ in runs]
    for _ in range(repeats):
        for run, spent in zip(runs, costs, strict=True):
            start = time.process_time()
            run()
            spent.append((time.process_time() - start) * 1000)
    return costs


def words(renderer: Renderer, tokens: int, rng: random.Random) -> str:
    """Return text of about this many tokens."""
    text = " ".join(rng.choice(WORDS) for _ in range(tokens))
    return text[: len(text) * tokens // max(1, renderer.count(text))]


def conversation(renderer: Renderer, tokens: int, rng: random.Random) -> list[dict]:
    """Return a conversation of about this many tokens, in turns of a few hundred tokens."""
    messages = [{"role": "user", "content": words(renderer, 200, rng)}]
    text = words(renderer, 250, rng)
    turns = range(max(1, tokens // 270))
    messages += [{"role": ("assistant", "user")[index % 2], "content": text} for index in turns]
    if messages[-1]["role"] == "assistant":
        messages.append({"role": "user", "content": "go on"})
    return messages


def measure(family: str, lengths: tuple[int, ...], repeats: int) -> list[dict]:
    """Return the rows of one family of templates."""
    rng = random.Random(0)
    tokenizer = ChatTokenizer.load(DATA / family)
    renderer = Renderer(tokenizer, [TOOL])
    kind = "call" if "call" in renderer.report.closers else "text"
    sampled = [5, tokenizer.token_id(renderer.report.closers[kind])]
    call = ToolCall("abc123456", "lookup", '{"q": "x"}')
    result = {
        "role": "tool",
        "tool_call_id": call.id,
        "name": call.name,
        "content": words(renderer, NEW_TOKENS - 20, rng),
    }
    histories = [conversation(renderer, length, rng) for length in lengths]
    appends = [
        lambda history=history: renderer.extend(sampled, [call], [result], history=history)
        for history in histories
    ]
    encoding = min(interleaved_ms([lambda: tokenizer.encode(result["content"])], repeats)[0])
    rows = []
    for history, costs in zip(histories, interleaved_ms(appends, repeats), strict=True):
        row = {
            "family": family,
            "conversation_tokens": len(renderer.start(history)),
            "new_tokens": len(appends[0]()),
            "append_ms": min(costs),
            "append_median_ms": statistics.median(costs),
            "encode_ms": encoding,
        }
        if (full := full_render(family, history)) is not None:
            row["full_render_ms"] = min(interleaved_ms([full], 3)[0])
            row["ratio"] = row["full_render_ms"] / row["append_ms"]
        rows.append(row)
    return rows


def full_render(family: str, history: list[dict]) -> Callable[[], object] | None:
    """Return a function that renders the conversation with transformers; None if it is not installed."""
    if importlib.util.find_spec("transformers") is None:
        return None
    from transformers import AutoTokenizer

    auto = AutoTokenizer.from_pretrained(str(DATA / family))
    return lambda: auto.apply_chat_template(history, add_generation_prompt=True, tokenize=True)


def startup(family: str) -> dict:
    """Return the CPU milliseconds to load a tokenizer and to make its first renderer, doctor included."""
    start = time.process_time()
    tokenizer = ChatTokenizer.load(DATA / family)
    loaded = time.process_time()
    renderer = Renderer(tokenizer)
    made = time.process_time()
    bind = min(interleaved_ms([lambda: renderer.bind([TOOL])], 50)[0])
    return {
        "family": family,
        "verdict": renderer.report.verdict,
        "load_ms": (loaded - start) * 1000,
        "doctor_ms": (made - loaded) * 1000,
        "bind_ms": bind,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="short conversations, few repeats")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    lengths = (1_000, 10_000) if options.quick else (1_000, 10_000, 100_000)
    families = FAMILIES[:2] if options.quick else FAMILIES
    starts = [startup(family) for family in families]
    rows = [row for family in families for row in measure(family, lengths, 30 if options.quick else 200)]
    if importlib.util.find_spec("transformers") is None:
        print("transformers is not installed: no figure beside ours")
    heads = ("conversation", "new", "append ms", "median", "encode ms", "full ms", "ratio")
    print(f"{'family':16}" + "".join(f"{head:>14}" for head in heads))
    for row in rows:
        cells = [f"{row['conversation_tokens']}", f"{row['new_tokens']}"]
        cells += [f"{row['append_ms']:.2f}", f"{row['append_median_ms']:.2f}", f"{row['encode_ms']:.2f}"]
        if "ratio" in row:
            cells += [f"{row['full_render_ms']:.1f}", f"{row['ratio']:.0f}x"]
        print(f"{row['family']:16}" + "".join(f"{cell:>14}" for cell in cells))
    print(f"\n{'family':16}{'verdict':>14}{'load ms':>10}{'doctor ms':>11}{'bind ms':>9}")
    for row in starts:
        print(
            f"{row['family']:16}{row['verdict']:>14}{row['load_ms']:>10.1f}{row['doctor_ms']:>11.1f}"
            f"{row['bind_ms']:>9.3f}"
        )
    if options.json:
        options.json.write_text(json.dumps({"turns": rows, "startup": starts}, indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
