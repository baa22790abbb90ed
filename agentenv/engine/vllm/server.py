"""The engine for running vLLM servers, which exchanges token ids and log-probabilities with them.

1. Token ids go through `/inference/v1/generate` if the server has it, else through `/v1/completions`
   with `return_token_ids`, and never through text.
2. The end-of-sequence settings of the server are switched off: only the stop ids of a request end it.
3. A change of weights has these steps: pause, update, drop the prefix cache, set the version, resume.
4. A completion whose weights are not known is not used; its request is sent again.
5. A server that comes back after a failure is used once it has the expected weights (`server_weights`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from time import monotonic
from typing import Any

from pydantic_core import to_json

from agentenv.core.errors import ContextTooLong, EngineError, EngineUnavailable, UsageError
from agentenv.core.images import ImageTokens
from agentenv.core.visible import logger
from agentenv.engine.exact import exact_completion, room_for, version_ranges
from agentenv.engine.interface import Completion, Features, OnTokens, Sampling, refuse_grammar
from agentenv.engine.vllm.client import ModelMissing, Server
from agentenv.engine.vllm.events import TokenTeller
from agentenv.engine.vllm.experts import decode_experts
from agentenv.engine.vllm.grammars import grammar_of, grammar_refused
from agentenv.engine.vllm.pool import ServerPool
from agentenv.engine.vllm.probe import PROBE_IDS, ServerReport
from agentenv.engine.vllm.prompt_json import PromptJSON
from agentenv.engine.vllm.seeing import ServerSight
from agentenv.engine.vllm.server_weights import ExpectedWeights, ServerWeights
from agentenv.engine.vllm.streams import MemoryDirectory, WeightStreams
from agentenv.engine.vllm.supports import MOST_LOGPROBS, allowed_logprobs, num_logprobs, with_supports
from agentenv.engine.weight_files import require_weights, vocab_size
from agentenv.render.vision.rules import ImageRule

__all__ = ["VLLMServerEngine"]

ANSWER_BYTES, SENT_BYTES, TOKEN_BYTES, LOGPROB_BYTES, EXPERTS_BYTES = 1_000_000, 100, 1_000, 200, 8_000
"""Most bytes of an answer: of itself, of each token that was sent, of each sampled one, which may be an event
of its own, of each likely one, and of the experts of each token of a server that names them."""
NOT_EXACT = (
    "the server's log-probabilities are {}, not at the sampling temperature; "
    "start it with --logprobs-mode processed_logprobs"
)
"""Why completions must not be trained on, with what the server returns instead."""

_log = logger(__name__)


class VLLMServerEngine:
    """Samples from one or several vLLM servers of the same model.

    Args:
        report: report of the probe; it must hold for all servers.
        urls: addresses of the servers, without `/v1`; that of the report if None.
        concurrency: most requests in flight to each server; further requests wait.
        retry_s: seconds for which a request is retried after its first failure.
        request_timeout_s: time limit of one request; it must suffice for the longest completion.
        hang_s: seconds without any answer after which a server counts as hung and is taken out of use.
        min_servers: number of servers that must take new weights; with fewer the update fails.
        transfer: how full weights reach the servers: they read a directory that they share with this process
            ("disk"), or this process sends the weights to them ("gloo" between CPUs, "nccl" between GPUs).
        api_key: key that is sent as a bearer token.
        take_over: whether to push weights to servers that another training has pushed to; that training ends.
        examine: raises if a server that did not answer at the start, or joins later, is not like the others;
            None if none will.
        examined: servers that the report holds for.
        listed: reads the addresses of the servers again, so that servers join and leave; None if they stay.
        watch_all: whether all servers are checked from the start, and not only those that were needed once.

    Raises:
        UsageError: `min_servers` is more than there are servers, or there is no such `transfer`.
    """

    def __init__(
        self,
        report: ServerReport,
        urls: Sequence[str] | None = None,
        *,
        concurrency: int = 256,
        retry_s: float = 120.0,
        request_timeout_s: float = 1800.0,
        hang_s: float = 120.0,
        min_servers: int = 1,
        transfer: str = "disk",
        api_key: str | None = None,
        take_over: bool = False,
        examine: Callable[[str], object] | None = None,
        examined: Iterable[str] = (),
        listed: Callable[[], Sequence[str]] | None = None,
        watch_all: bool = True,
    ) -> None:
        urls = urls or [report.url]
        if not 1 <= min_servers <= len(urls):
            raise UsageError(f"min_servers is {min_servers}, but must be from 1 to {len(urls)}")
        self.report = report
        self.name = f"{report.url}/v1"
        self.max_context_tokens = report.max_context_tokens
        self._concurrency = concurrency
        self._pool = ServerPool(
            urls,
            concurrency=concurrency,
            retry_s=retry_s,
            request_timeout_s=request_timeout_s,
            hang_s=hang_s,
            api_key=api_key,
            socket=report.socket,
            # Through the other route, each completion names the weights that sampled it.
            confirm=report.route == "completions" and report.weights_label is not None,
            listed=listed,
            watch_all=watch_all,
        )
        self._prompts = PromptJSON()
        streams = None if transfer == "disk" else WeightStreams(self._pool, transfer)
        self._staged = None if streams is None else MemoryDirectory()
        self._weights = ServerWeights(
            self._pool,
            report,
            min_servers=min_servers,
            sample=self._sample_token,
            streams=streams,
            take_over=take_over,
        )
        self._examine, self._examined = examine, set(examined)
        self._pool.check, self._pool.left = self._check, self._weights.leave
        self._remote = report.model_path is None or not Path(report.model_path).exists()
        self._vocab_size = None if report.model_path is None else vocab_size(report.model_path)
        self._sight: ServerSight | None = None
        self._most_logprobs = MOST_LOGPROBS
        """Most likeliest tokens that the servers tell, as far as is known."""

    def see(self, rule: ImageRule | None) -> None:
        """Take images from now on, by the rule of the model's tokenizer, where that is exact.

        vLLM joins line breaks of the whole prompt of Gemma 3, sampled ones too, and only one route takes
        images. Other servers take none.
        """
        exact = rule is not None and rule.family != "gemma3" and self.report.route == "generate"
        self._sight = ServerSight(rule) if exact and rule is not None else None

    @property
    def features(self) -> Features:
        """What the probe found, and how the servers are doing."""
        exact = self.report.logprobs == "processed"
        return Features(
            images=self._sight is not None,
            grammars=self.report.grammars,
            experts=self.report.experts,
            untrainable="" if exact else NOT_EXACT.format(self.report.logprobs),
            stream=self.stream,
            disconnect=self.disconnect,
            servers=self.servers,
            examined=self.examined,
            episodes_at_once=self.episodes_at_once,
        )

    async def _check(self, server: Server) -> None:
        """Check a server before it is used; one that was not there at the start is examined first."""
        if self._examine is not None and server.url not in self._examined:
            await asyncio.to_thread(self._examine, server.url)
            self._examined.add(server.url)
        await self._weights.check(server)

    @property
    def num_servers(self) -> int:
        """Number of servers, those out of use included."""
        return len(self._pool.servers)

    def examined(self) -> dict[str, Any]:
        """Return what was found out about the servers; see `agentenv.engine.Features`."""
        return {"report": asdict(self.report), "urls": sorted(self._examined)}

    def servers(self) -> list[dict[str, Any]]:
        """Return how each server is doing; see `agentenv.engine.Features`."""
        version = self.weights_version
        return [
            {**server.facts(), "version": version if server.alive else None} for server in self._pool.known
        ]

    def episodes_at_once(self, context_tokens: int) -> int | None:
        """Return how many episodes of this length the servers hold; see `agentenv.engine.Features`."""
        cached = self.report.cache_tokens
        if cached is None:
            return None
        # Each server gets the same number of episodes, and further requests would wait.
        return self.num_servers * max(1, min(cached // context_tokens, self._concurrency))

    @property
    def weights_directory(self) -> Path | None:
        """Directory of this machine in which weights wait to be sent; None if the servers must read them."""
        return None if self._staged is None else self._staged.path

    @property
    def weights_version(self) -> int:
        """Version of the weights that the servers must have; set it where another process pushed them."""
        return self._weights.expected.version

    @weights_version.setter
    def weights_version(self, version: int) -> None:
        self._weights.expect(version)

    async def claim(self, run: str) -> None:
        """Push weights as this training; see `agentenv.engine.weights.SharesServers`."""
        await self._weights.claim(run)

    def follow(self, run: str, version: int) -> None:
        """Expect weights that another process of a training pushed; see `SharesServers`."""
        self._weights.follow(run, version)

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        *,
        stop_token_ids: Sequence[int],
        session_id: str | None = None,
        deadline_s: float | None = None,
        images: Sequence[ImageTokens] = (),
    ) -> Completion:
        """Sample one completion; see `agentenv.engine.Engine`.

        Raises:
            ContextTooLong: The prompt leaves no room for a single token.
            EngineUnavailable: No server could be reached in time.
            EngineError: The server refused the request, or returned no exact tokens and logprobs.
            UsageError: The grammar cannot be followed.
        """
        return await self._generate(
            prompt_ids, sampling, stop_token_ids, session_id, deadline_s, images=images
        )

    async def stream(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        on_tokens: OnTokens,
        *,
        stop_token_ids: Sequence[int],
        session_id: str | None = None,
        deadline_s: float | None = None,
        images: Sequence[ImageTokens] = (),
    ) -> Completion:
        """Sample one completion and tell its tokens; see `agentenv.engine.Features`."""
        teller = TokenTeller(on_tokens)
        request = prompt_ids, sampling, stop_token_ids, session_id, deadline_s
        if images:  # a stream need not tell what the server made of them
            return await self._generate(*request, images=images)
        try:
            return await self._generate(*request, teller=teller)
        except (ContextTooLong, EngineUnavailable):
            raise
        except EngineError:
            if teller.told:
                raise
            # Some releases of vLLM cannot stream token ids.
            return await self._generate(*request)

    async def _generate(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        stop_token_ids: Sequence[int],
        session_id: str | None,
        deadline_s: float | None,
        *,
        teller: TokenTeller | None = None,
        images: Sequence[ImageTokens] = (),
    ) -> Completion:
        if not self.report.grammars:
            refuse_grammar(self.name, sampling)
        prompt = list(prompt_ids)
        room = room_for(self.name, prompt, sampling.token_limit, self.max_context_tokens)
        asked = num_logprobs(sampling, self._most_logprobs, self._vocab_size)
        path, body = self._body(sampling, room, stop_token_ids, asked)
        if teller is not None:
            body["stream"] = True
        sent = self._shown(body, prompt, images)
        data = self._data(body, self._prompts.write(session_id, sent))
        expected = self._weights.expected
        adapter = sampling.adapter_or(None if self.report.base is None else self.report.model)
        served = adapter and self._weights.served_name(adapter)
        stop = frozenset(stop_token_ids)

        def read(answer: Mapping[str, Any], waited: float) -> Completion:
            try:
                if images and self._sight is not None:
                    self._sight.check(answer, prompt, self.name)
                done = self._completion(answer, room, expected, waited, stop=stop, strings=sampling.stop)
                if not asked:
                    return done
                told = self._likeliest(answer["choices"][0]["logprobs"])
                return with_supports(done, told, asked, sampling)
            except (KeyError, TypeError, IndexError, ValueError) as error:
                raise EngineError(
                    f"the answer of {self.name} is not a completion: {type(error).__name__}: {error}"
                ) from error

        try:
            async with asyncio.timeout(deadline_s):
                most = self._most_bytes(len(prompt), room, asked)
                done = await self._pool.post(
                    path, data, read, session_id=session_id, teller=teller, max_tokens=room, max_bytes=most
                )
        except TimeoutError:
            return Completion((), (), "abort")
        except EngineError as error:
            if sampling.grammar and (why := grammar_refused(str(error))) is not None:
                raise UsageError(f"the grammar of the completion cannot be followed: {why}") from error
            if not self._asks_otherwise(error, asked, adapter, served):
                raise
            return await self._generate(
                prompt_ids, sampling, stop_token_ids, session_id, deadline_s, teller=teller, images=images
            )
        if adapter is not None:
            self._weights.sampled_adapters.add(adapter)
        return done

    def _asks_otherwise(
        self, error: EngineError, asked: int, adapter: str | None, served: str | None
    ) -> bool:
        """Return whether the same request is another one by now, because of what a server refused."""
        allowed = allowed_logprobs(str(error))
        if allowed is not None and allowed < asked:
            self._most_logprobs = allowed
            return True
        # Its version of the adapter may have been replaced while it waited.
        return (
            isinstance(error, ModelMissing) and bool(adapter) and served != self._weights.served_name(adapter)
        )

    def _shown(self, body: dict[str, Any], prompt: list[int], images: Sequence[ImageTokens]) -> list[int]:
        """Add images to the body of a request; return the prompt as the servers take it.

        Raises:
            UsageError: The servers cannot be shown images with exact tokens.
        """
        if self._sight is not None:
            body |= self._sight.parts(images)
            body["sampling_params"]["logit_bias"] = self._sight.bias
            return self._sight.collapsed(prompt, images)
        if images:
            raise UsageError(
                f"{self.name} cannot be shown images with exact tokens",
                remedy="serve a model of a family with a rule (not Gemma 3) with --enable-scale-out",
            )
        return prompt

    async def release(self, session_id: str) -> None:
        """Forget to which server an episode belongs."""
        self._pool.release(session_id)
        self._prompts.forget(session_id)

    async def close(self) -> None:
        """Close the connections; the servers keep running, and another training may have them."""
        await self.disconnect()
        if self._staged is not None:
            self._staged.delete()

    async def disconnect(self) -> None:
        """Close the connections of this event loop; until it pushes again, others may have the servers."""
        await self._pool.stop_watching()  # or a server would get back what it is to give up
        await self._weights.give_up()
        await self._pool.close()

    async def load_adapter(self, name: str, path: str | Path, *, version: int | None = None) -> int:
        """Load a LoRA adapter from a directory that the servers can read, beside those of other trainings.

        Requests in flight end with the version that they began with, and nothing is paused.

        Returns:
            The new weights version.

        Raises:
            EngineError: A server has no `/v1/load_lora_adapter`, or refuses the adapter.
            EngineUnavailable: Fewer than `min_servers` servers took it.
        """
        if not self.report.lora:
            raise EngineError(f"{self.name} cannot load adapters: {self.report.missing[-1]}")
        return await self._weights.update_adapter(name, path, version)

    async def load_weights(self, path: str | Path, *, version: int | None = None) -> int:
        """Load the full weights from a directory that the servers can read, or send them (`transfer`).

        Each server pauses its own requests in flight meanwhile, which continue with the new weights; it drops
        its prefix cache, which holds keys and values of the old ones.

        Returns:
            The new weights version.

        Raises:
            EngineError: A server is not in development mode, or the weights do not fit its model.
            EngineUnavailable: Fewer than `min_servers` servers took them.
        """
        self._need_dev_mode()
        require_weights(path, self.report.model_path, remote=self._remote)
        began = monotonic()

        new = await self._weights.update(path, version)
        _log.info("loaded weights %s from %s in %.2f s", new, path, monotonic() - began)
        return new

    def _need_dev_mode(self) -> None:
        if not self.report.dev_mode:
            raise EngineError(
                f"{self.name} does not allow its weights to be changed",
                remedy="start it with VLLM_SERVER_DEV_MODE=1, on a network that only you can reach",
            )

    async def _sample_token(self, server: Server) -> None:
        path, body = self._body(Sampling(seed=0), 1, ())
        body[self._prompt_name] = PROBE_IDS
        await self._pool.command(server, path, body, limit_s=self._pool.hang_s)

    @property
    def _prompt_name(self) -> str:
        return "token_ids" if self.report.route == "generate" else "prompt"

    def _data(self, body: Mapping[str, Any], prompt: bytes) -> bytes:
        """Return the JSON of a request and of its prompt, which was written before."""
        return b'%b,"%b":%b}' % (to_json(body)[:-1], self._prompt_name.encode(), prompt)

    def _body(
        self, sampling: Sampling, room: int, stop: Sequence[int], logprobs: int = 0
    ) -> tuple[str, dict[str, Any]]:
        """Return the path and the body of a request, without its prompt."""
        drawn: dict[str, Any] = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "max_tokens": room,
            "logprobs": logprobs,
            "stop_token_ids": list(stop),
            "ignore_eos": True,
        }
        if sampling.seed is not None:
            drawn["seed"] = sampling.seed
        if sampling.stop:
            # vLLM finds them in the text, in which control tokens must be shown as the runner shows them.
            drawn |= {"stop": list(sampling.stop), "skip_special_tokens": False}
        if sampling.grammar:
            drawn |= grammar_of(sampling.grammar, stop)
        own = self.report.model
        adapter = sampling.adapter_or(None if self.report.base is None else own)
        model = (self.report.base or own) if adapter is None else self._weights.served_name(adapter)
        if self.report.route == "generate":
            return "/inference/v1/generate", {"model": model, "sampling_params": drawn}
        if logprobs:
            drawn["return_tokens_as_token_ids"] = True
        return "/v1/completions", {"model": model, "return_token_ids": True, **drawn}

    def _most_bytes(self, sent: int, room: int, asked: int) -> int:
        """Return how many bytes an answer may have, which depends on what was asked for.

        It is decoded on the event loop. A thread would hold that up as well, because the decoder keeps the
        interpreter's lock.
        """
        tokens = sent * SENT_BYTES + room * (TOKEN_BYTES + asked * LOGPROB_BYTES)
        return ANSWER_BYTES + tokens + (sent + room) * EXPERTS_BYTES * self.report.experts

    def _likeliest(self, logprobs: Mapping[str, Any]) -> list[list[tuple[int, float]]]:
        """Return the likeliest tokens at each position of an answer, with their log-probabilities."""
        if self.report.route == "generate":
            content: list[dict[str, Any]] = logprobs["content"] or []
            return [[(one["token_id"], one["logprob"]) for one in entry["top_logprobs"]] for entry in content]
        tops: list[dict[str, float]] = logprobs["top_logprobs"]
        return [[(int(name.removeprefix("token_id:")), value) for name, value in top.items()] for top in tops]

    def _completion(
        self,
        answer: Mapping[str, Any],
        room: int,
        expected: ExpectedWeights,
        waited: float,
        *,
        stop: frozenset[int],
        strings: Sequence[str],
    ) -> Completion:
        choice = answer["choices"][0]
        tokens = tuple(choice["token_ids"])
        if self.report.route == "generate":
            content: list[dict[str, Any]] = choice["logprobs"]["content"] or []
            logprobs = tuple(entry["logprob"] for entry in content)
        else:
            logprobs = tuple(choice["logprobs"]["token_logprobs"])
        spans = [
            (str(span["version"]), span["start"], span["end"]) for span in choice.get("weight_versions") or ()
        ]
        return exact_completion(
            self.name,
            tokens,
            logprobs,
            choice["finish_reason"],
            stop=stop,
            max_tokens=room,
            stop_strings=strings,
            ranges=self._ranges(spans, len(tokens), expected),
            vocab_size=self._vocab_size,
            queue_s=waited,
            routed_experts=decode_experts(choice.get("routed_experts")),
        )

    def _ranges(
        self, spans: Sequence[tuple[str, int, int]], length: int, expected: ExpectedWeights
    ) -> tuple[tuple[int, int, int], ...]:
        if expected.label is None:  # the labels never change, so they say nothing
            spans = ()
        return version_ranges(spans, length, expected.version, expected.label, expected.run)
