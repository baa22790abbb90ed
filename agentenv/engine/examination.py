"""Test whether an engine keeps its contract: tokens, logprob scale, stop tokens, seeds, abort, limit.

All checks use the common `Engine` interface, so the same checks fit every engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from math import isclose, isfinite
from time import monotonic

from agentenv.core.errors import AgentEnvError, ContextTooLong, DependencyMissing, EngineError
from agentenv.core.sequence import images_of
from agentenv.engine.findings import IMAGES, EngineFinding
from agentenv.engine.forms import LoadedModel
from agentenv.engine.interface import ChatEngine, Completion, Engine, Sampling, features_of, shown
from agentenv.engine.scripted.scripted import ScriptedEngine
from agentenv.engine.vllm.server import VLLMServerEngine
from agentenv.render.renderer import Renderer

__all__ = ["EngineFinding", "examine_engine", "examine_model"]

PROMPT = "I am a"
"""Prompt of the checks; many continuations are likely, so that single draws differ."""
DRAWS = 32
"""Number of tokens sampled at each temperature to find the scale of the log-probabilities."""
SLOPE_ERROR = 0.25
"""Tolerance of the measured factor between the log-probabilities at two temperatures."""


class EngineExamination:
    """The checks of one engine, and the prompt that they use."""

    def __init__(self, engine: Engine, prompt: list[int], pictures: Sequence[list[int]] = ()) -> None:
        self._engine = engine
        self._prompt = prompt
        self._pictures = pictures

    async def run(self) -> list[EngineFinding]:
        """Run all checks; an error in a check becomes a finding and is not raised."""
        questions: dict[str, Callable[[], Awaitable[tuple[bool | None, str]]]] = {
            "tokens": self.tokens,
            "scale": self.scale,
            "stop token": self.stop_token,
            "seed": self.seed,
            "greedy": self.greedy,
            "abort": self.abort,
            "context": self.context,
            **({"images": self.images} if self._pictures else {}),
        }
        findings: list[EngineFinding] = []
        for name, question in questions.items():
            try:
                ok, detail = await question()
            except Exception as error:  # noqa: BLE001 - whatever an engine raises is a finding about it
                ok, detail = False, f"{type(error).__name__}: {error}"
            findings.append(EngineFinding(name, ok, detail))
        return findings

    async def tokens(self) -> tuple[bool | None, str]:
        """Check that each sampled token comes with one finite log-probability."""
        began = monotonic()
        done = await self._draw(max_tokens=16, seed=1)
        size = len(done.token_ids)
        exact = len(done.logprobs) == size == 16 and all(map(isfinite, done.logprobs))
        ranges = done.version_ranges or ((self._engine.weights_version, 0, size),)
        covered = ranges[-1][2] == size
        versions = ", ".join(str(version) for version, _, _ in ranges)
        asked = "" if size == 16 else " of 16 that were asked for, with no stop token"
        counts = f"{size} tokens{asked}, {len(done.logprobs)} log-probabilities, weights version {versions}"
        return exact and covered, f"{counts}, {size / (monotonic() - began):.0f} tokens/s"

    async def scale(self) -> tuple[bool | None, str]:
        """Check that differences between log-probabilities double from T = 1 to T = 0.5."""
        at_one, at_half = await self._table(1.0), await self._table(0.5)
        common = sorted(at_one.keys() & at_half.keys())
        pairs = [(left, right) for left in common for right in common if left < right]
        weight = sum((at_one[left] - at_one[right]) ** 2 for left, right in pairs)
        if weight < 1e-3:
            return None, "undecided: too few different tokens were sampled"
        moved = sum((at_one[a] - at_one[b]) * (at_half[a] - at_half[b]) for a, b in pairs) / weight
        detail = f"factor {moved:.2f} from T = 1 to T = 0.5 over {len(common)} tokens (2 is right)"
        if abs(moved - 1) < SLOPE_ERROR:
            detail += (
                ": not at the sampling temperature; start the server with --logprobs-mode processed_logprobs"
            )
        return abs(moved - 2) < SLOPE_ERROR, detail

    async def stop_token(self) -> tuple[bool | None, str]:
        """Check that the stop token ends the completion and stays in it."""
        free = await self._draw(max_tokens=8, seed=2)
        stop = free.token_ids[min(3, len(free.token_ids) - 1)]
        done = await self._draw(max_tokens=8, seed=2, stop=(stop,))
        kept = done.finish_reason == "stop" and done.token_ids[-1] == stop
        return kept, f"ended with {done.finish_reason!r}, the stop token {'stays' if kept else 'is missing'}"

    async def seed(self) -> tuple[bool | None, str]:
        """Check that a seed reproduces the tokens, alone and beside other requests."""
        alone = await self._draw(max_tokens=12, seed=3)
        among, *_ = await asyncio.gather(*(self._draw(max_tokens=12, seed=seed) for seed in (3, 4, 5, 6)))
        same = alone.token_ids == among.token_ids
        other = (await self._draw(max_tokens=12, seed=7)).token_ids != alone.token_ids
        if not other:
            return False, "a different seed returned the same tokens"
        return same or None, "same tokens alone and in a batch" if same else (
            "not the same tokens in a batch: rounding depends on the batch"
        )

    async def greedy(self) -> tuple[bool | None, str]:
        """Check that temperature 0 always returns the same tokens."""
        first, second = [await self._draw(max_tokens=8, temperature=0.0, seed=seed) for seed in (1, 2)]
        same = first.token_ids == second.token_ids
        return (
            same,
            "the same tokens twice" if same else "the tokens differ, so the engine does not sample greedily",
        )

    async def abort(self) -> tuple[bool | None, str]:
        """Check that a deadline ends a request and the engine still works afterwards."""
        began = monotonic()
        room = (self._engine.max_context_tokens or 4096) - len(self._prompt)
        done = await self._draw(max_tokens=max(1, room), seed=8, deadline_s=0.2)
        took = monotonic() - began
        await self._draw(max_tokens=1, seed=8)
        ended = done.finish_reason == "abort"
        if not ended:
            return None, f"finished before the deadline ({len(done.token_ids)} tokens in {took:.2f} s)"
        return took < 5, f"after {took:.2f} s with {len(done.token_ids)} tokens; the next request worked"

    async def context(self) -> tuple[bool | None, str]:
        """Check that a prompt over the limit is refused with ContextTooLong."""
        limit = self._engine.max_context_tokens
        if limit is None:
            return None, "the engine has no known limit"
        try:
            await self._draw(max_tokens=1, prompt=(self._prompt * (limit // len(self._prompt) + 1))[:limit])
        except ContextTooLong:
            return True, f"{limit} tokens, a longer prompt is refused"
        return False, f"a prompt of {limit} tokens was accepted"

    async def images(self) -> tuple[bool | None, str]:
        """Check that two images of one size, whose token ids are equal, have different log-probabilities."""
        size = images_of(self._pictures[0])[0].length
        red, blue = [await self._table(1.0, prompt) for prompt in self._pictures]
        shared = red.keys() & blue.keys()
        if shared and all(isclose(red[token], blue[token], abs_tol=1e-4) for token in shared):
            return False, f"a red and a blue image of {size} tokens have the same log-probabilities"
        return True, f"one of 64 x 64 pixels is {size} tokens, and other pixels have other log-probabilities"

    async def _table(self, temperature: float, prompt: list[int] | None = None) -> dict[int, float]:
        draws = (
            self._draw(max_tokens=1, temperature=temperature, seed=seed, prompt=prompt)
            for seed in range(DRAWS)
        )
        return {done.token_ids[0]: done.logprobs[0] for done in await asyncio.gather(*draws)}

    async def _draw(
        self,
        *,
        max_tokens: int,
        seed: int = 0,
        temperature: float = 1.0,
        stop: tuple[int, ...] = (),
        deadline_s: float | None = None,
        prompt: list[int] | None = None,
    ) -> Completion:
        done = await self._engine.generate(
            prompt or self._prompt,
            Sampling(max_tokens=max_tokens, seed=seed, temperature=temperature),
            stop_token_ids=stop,
            deadline_s=deadline_s,
            **shown(images_of(prompt or ())),
        )
        if len(done.logprobs) != len(done.token_ids) or not (done.token_ids or deadline_s):
            raise EngineError(
                f"the engine returned {len(done.token_ids)} tokens and {len(done.logprobs)} "
                f"log-probabilities with the finish reason {done.finish_reason!r}"
            )
        return done


async def examine_engine(
    engine: Engine, prompt: list[int], pictures: Sequence[list[int]] = ()
) -> list[EngineFinding]:
    """Run all checks on an engine.

    Args:
        engine: the engine to check.
        prompt: a few tokens of ordinary text.
        pictures: two prompts with the same ids and different images, for a model that sees.
    """
    findings = await EngineExamination(engine, prompt, pictures).run()
    if isinstance(engine, VLLMServerEngine):
        report = engine.report
        findings.insert(
            0, EngineFinding("server", True, f"vLLM {report.version}, {report.model}, route {report.route}")
        )
        findings += [EngineFinding("lacks", None, lack) for lack in report.missing]
    return findings


async def examine_chat(engine: ChatEngine) -> list[EngineFinding]:
    """Check that a chat engine returns an answer, or let it examine its API itself."""
    no_tokens = EngineFinding("tokens", None, "text only: its episodes can be evaluated, not trained on")
    examine = features_of(engine).examine
    if examine is not None:
        return [no_tokens, *await examine()]
    try:
        answer = await engine.chat([{"role": "user", "content": "Say hello."}], (), Sampling(max_tokens=32))
    except AgentEnvError as error:
        return [no_tokens, EngineFinding("chat", False, f"{type(error).__name__}: {error}")]
    usage = answer.usage
    counted = f"{usage.prompt_tokens} prompt and {usage.completion_tokens} completion tokens"
    return [no_tokens, EngineFinding("chat", True, f"answered ({answer.finish_reason}); usage: {counted}")]


async def examine_model(loaded: LoadedModel) -> list[EngineFinding]:
    """Run all checks on a loaded model; `agentenv doctor -m` prints the findings."""
    if isinstance(loaded.engine, ChatEngine) or loaded.tokenizer is None:
        assert isinstance(loaded.engine, ChatEngine)
        return await examine_chat(loaded.engine)
    prompt, pictures = loaded.tokenizer.encode(PROMPT), list[list[int]]()
    unseen: list[EngineFinding] = []
    if features_of(loaded.engine).images and loaded.tokenizer.images is not None:
        renderer = Renderer(loaded.tokenizer)
        try:
            pictures = [renderer.start([{"role": "user", "content": [image]}]) for image in IMAGES]
        except DependencyMissing as error:
            unseen = [EngineFinding("images", None, f"not checked: {error}")]
    findings = [*await examine_engine(loaded.engine, prompt, pictures), *unseen]
    if isinstance(loaded.engine, ScriptedEngine):  # its script need not heed what it is asked for
        return [replace(finding, ok=finding.ok or None) for finding in findings]
    return findings
