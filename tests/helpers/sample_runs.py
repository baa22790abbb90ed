"""Runs that show what real ones can: several turns, trims, failures, hostile text, broken characters."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from agentenv.core import (
    EpisodeError,
    StopReason,
    TokenSequence,
    TokenSpan,
    ToolCall,
    ToolErrorKind,
    ToolResult,
    Trajectory,
    Turn,
)
from agentenv.render import byte_tokenizer
from agentenv.runs.stats import clustered_mean
from agentenv.runs.store import Run, RunWriter
from agentenv.runs.store.vocabulary import TokenTexts

HOSTILE = '</script><script>window.hacked=1</script><img src=x onerror="window.hacked=1">'
ODD = "right\u202eleft\u0007bell naïve 漢字\n"
TOKENIZER = byte_tokenizer()


def span(source: str, text: str, turn: int = -1, slope: float = 0.05) -> TokenSpan:
    """A span of one token for each byte; logprobs fall and rise again."""
    ids = tuple(TOKENIZER.encode(text))
    values = tuple(-slope * (place % 40) for place in range(len(ids))) if source == "model" else None
    return TokenSpan(source, ids, values, 12 if source == "model" else None, turn)


def episode(
    task: int,
    member: int,
    *,
    reward: float | None = 1.0,
    stop: StopReason = StopReason.FINAL_ANSWER,
    output: str = "391",
    answer: str = "17 boxes hold 391 pencils.",
    error: EpisodeError | None = None,
    trimmed: bool = False,
) -> Trajectory:
    """Two turns with one tool call between them."""
    call_text = '<tool_call>{"name": "calc", "arguments": {"expression": "17*23"}}</tool_call>'
    prompt = span("prompt", f"A shop sells 17 boxes of 23 pencils (order {task}). How many pencils?\n")
    said = span("model", call_text, 0)
    heard = span("env", f"\ntool: {output}\n", 0)
    last = span("model", answer, 1, slope=0.1 + 0.02 * member)
    call = ToolCall("c1", "calc", '{"expression": "17*23"}')
    kind = ToolErrorKind.BAD_ARGUMENTS if "bad arguments" in output else None
    result = ToolResult(
        "c1", "calc", output, kind, duration_s=0.041, trimmed=trimmed, full_chars=9000 if trimmed else None
    )
    start = len(prompt)
    messages = (
        {"role": "user", "content": "How many pencils?"},
        {"role": "assistant", "content": None, "tool_calls": [call.to_message()]},
        result.to_message(),
        {"role": "assistant", "content": answer},
    )
    turns = (
        Turn(0, messages[1], "stop", len(said), start=start, tool_calls=(call,), tool_results=(result,)),
        Turn(
            1,
            messages[3],
            "stop",
            len(last),
            start=start + len(said) + len(heard),
            reward=reward or 0.0,
        ),
    )
    return Trajectory(
        env_id="shop/Math-v0",
        task_id=f"order-{task:04}",
        seed=task,
        group_id=f"shop/Math-v0:order-{task:04}",
        member=member,
        stop_reason=stop,
        turns=turns,
        sequences=(TokenSequence((prompt, said, heard, last)),),
        messages=messages,
        reward=None if error else reward,
        rewards={} if error else {"correct": reward, "format": 0.1},
        error=error,
        untrainable_reason="failed" if error else "",
        task={"boxes": 17, "pencils": 23, "order": task},
        metrics={"turns": 2.0},
        timings={"generate_s": 1.42, "tools_s": 0.041, "queue_s": 0.08, "total_s": 1.6},
    )


PNG = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAABgAAAAYCAIAAABvFaqvAAAAH0lEQVR4nGM4oSFCFcQwatCoQaMGjRo0atCo"
    "QQNvEADdNUkfJE5WTgAAAABJRU5ErkJggg=="
)


def talk() -> Trajectory:
    """An episode with an image, thinking, a failed call, long JSON, a simulated user, and two contexts."""
    plain = episode(0, 0)
    call = plain.turns[0].tool_calls[0]
    failed = ToolResult(
        "c1", "calc", "no such price", ToolErrorKind.EXCEPTION, detail="Traceback: KeyError", duration_s=0.041
    )
    image = {"type": "image_url", "image_url": {"url": PNG}}
    foreign = {"type": "image_url", "image_url": {"url": "https://example.org/x.png"}}
    messages = (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "What is in the picture?"}, image, foreign]},
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "I look it up. " * 40,
            "tool_calls": [call.to_message()],
        },
        failed.to_message(),
        {"role": "user", "content": json.dumps({"rows": [{"id": n, "name": "x" * 20} for n in range(120)]})},
        {"role": "assistant", "content": f"<think>Almost.</think>17 boxes hold 391 pencils. {HOSTILE}"},
        {"role": "assistant", "content": "Another way: 391."},
    )
    prompt = plain.sequences[0].spans[0]
    said = span("model", "Another way: 391.", 2)
    turns = (
        replace(plain.turns[0], message=messages[2], tool_results=(failed,)),
        replace(plain.turns[1], message=messages[5]),
        Turn(2, messages[6], "stop", len(said), sequence=1, start=len(prompt)),
    )
    return replace(
        plain,
        messages=messages,
        turns=turns,
        sequences=(plain.sequences[0], TokenSequence((prompt, said))),
        metrics={"user_turns": 1.0},
    )


def write_training(
    root: Path, name: str, *, steps: int = 3, slope: float = 0.2, metrics=None, scored: bool = False
) -> Run:
    """A training: two tasks a step, the same two held out after each step, and one demonstration."""
    with RunWriter.create(
        name,
        runs_dir=root,
        run_id=name,
        env_ids=("shop/Math-v0",),
        model="example",
        kind="train",
        terms=("128 tasks of the split train, held out: test", "temperature 1.0"),
    ) as writer:
        shown = replace(episode(99, 0), group_id="demonstrations")
        writer.append(shown)
        writer.annotate(shown, role="demonstration")
        if scored:
            log_metrics(writer, {"step": 0} | held_out_scores(0.0))
        for step in range(1, steps + 1):
            for task in (10 * step, 10 * step + 1):
                for member in range(2):
                    played = replace(
                        episode(task, member, reward=float(member or task % 2)), group_id=f"{task}@{step}"
                    )
                    writer.append(played)
                    writer.annotate(played, step=step, advantage=0.5)
            for task in (0, 1):
                held = replace(
                    episode(task, 0, reward=float(task or step > 2)),
                    group_id=f"held-out-{step}:order-{task:04}",
                )
                writer.append(held)
                writer.annotate(held, role="held-out")
            log_metrics(
                writer,
                {"step": step, "reward": slope * step, "entropy": 2 - slope * step, "weights_version": step}
                | (held_out_scores(slope * step) if scored else {})
                | (metrics or {}),
            )
        writer.write_vocabulary(TokenTexts(TOKENIZER.backend).fresh([range(TOKENIZER.vocab_size)]))
    return Run(writer.path)


def held_out_scores(share: float, tasks: int = 20) -> dict[str, float]:
    """The metrics of an evaluation on held-out tasks."""
    won = round(share * tasks)
    interval = clustered_mean({str(task): [float(task < won)] for task in range(tasks)})
    scores = {"": interval.mean, "_low": interval.low, "_high": interval.high}
    return {f"eval/success{end}": value for end, value in scores.items()} | {"eval/tasks": float(tasks)}


def log_metrics(writer: RunWriter, metrics) -> None:
    """Write a line as a training writes one for each step."""
    with (writer.path / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(metrics) + "\n")


def write_run(
    root: Path, name: str, episodes, *, metrics=(), notes: bool = False, terms: tuple[str, ...] = ()
) -> Run:
    """Write a run and return it."""
    with RunWriter.create(
        name,
        runs_dir=root,
        run_id=name,
        env_ids=("shop/Math-v0",),
        model="example",
        kind="train" if metrics else "eval",
        terms=terms,
    ) as writer:
        ids: set[int] = set()
        for one in episodes:
            writer.append(one)
            ids |= {token for sequence in one.sequences for token in sequence.token_ids}
            if notes:
                length = len(one.sequences[-1])
                flat = one.sequences[-1].logprobs
                writer.annotate(
                    one,
                    advantage=0.5,
                    entropy=[0.1 * (i % 50) for i in range(length)],
                    new_logprobs=[v - 0.2 for v in flat],
                )
        for line in metrics:
            log_metrics(writer, line)
        writer.write_vocabulary(TokenTexts(TOKENIZER.backend).fresh([ids]))
    return Run(writer.path)


def branch(record: Trajectory, member: int, *, turn: int = 1, reward: float = 1.0, **changes) -> Trajectory:
    """A branch that shares the first turns of an episode."""
    place = f"{record.group_id}/{record.member}@turn-{turn}"
    played = replace(
        episode(0, member, reward=reward), task_id=record.task_id, group_id=place, branch_of=record.member
    )
    metrics = {**played.metrics, "shared_turns": float(turn)}
    return replace(played, shared_turns=turn, metrics=metrics, **changes)


def write_branches(root: Path, name: str, source: Run, branches: Sequence[Trajectory]) -> Run:
    """Write a run of branches, as `agentenv replay RUN --from-turn N` does."""
    config = {"branched_from": source.id, "from_turn": branches[0].shared_turns}
    names = {"env_ids": ("shop/Math-v0",), "model": "example", "kind": "branch", "config": config}
    with RunWriter.create(name, runs_dir=root, run_id=name, **names) as writer:
        for one in branches:
            writer.append(one)
        writer.write_vocabulary(TokenTexts(TOKENIZER.backend).fresh([range(TOKENIZER.vocab_size)]))
    return Run(writer.path)


def varied(tasks: int = 12, size: int = 4):
    """Episodes of many kinds."""
    for task in range(tasks):
        for member in range(size):
            kind = (task * 7 + member * 3) % 11
            if kind == 0:
                yield episode(task, member, reward=0.0, stop=StopReason.MAX_TURNS, answer="I do not know")
            elif kind == 1:
                yield episode(
                    task,
                    member,
                    reward=0.0,
                    stop=StopReason.TOOL_OUTPUT_OVERFLOW,
                    output="DEBUG row 0000000 ok\n" * 6,
                    trimmed=True,
                )
            elif kind == 2:
                yield episode(
                    task,
                    member,
                    stop=StopReason.ERROR,
                    error=EpisodeError("env", "KeyError", f"no price for {task % 2}", "Traceback ..."),
                )
            elif kind in (3, 4):
                yield episode(
                    task,
                    member,
                    reward=0.1,
                    answer="About 400.",
                    output="bad arguments for calc: expression: field required",
                )
            else:
                yield episode(task, member)
