"""Connect to vLLM servers: examine them all at once, and make the engine that holds for all of them."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import monotonic, sleep
from typing import Any

from agentenv.core.errors import EngineError, EngineUnavailable, ModelNotFound
from agentenv.core.visible import logger
from agentenv.engine.forms import engine_registry
from agentenv.engine.interface import ChatEngine, Engine
from agentenv.engine.listed import addresses, is_listed
from agentenv.engine.reach import check_answers
from agentenv.engine.vllm.probe import ServerReport, probe
from agentenv.engine.vllm.server import VLLMServerEngine

__all__ = ["connect"]

MOST_AT_ONCE = 64
"""Most servers that are examined at the same time."""
MOST_APART = 0.5
"""Largest difference of log-probabilities between servers of the same weights. Kernels differ by less."""
LOOK_AGAIN_S = 0.5
"""Seconds between two looks at a server that is starting."""

_log = logger(__name__)


def connect(
    url: str,
    *,
    tokenizer: str | None = None,
    model: str | None = None,
    api_key: str | None = None,
    concurrency: int = 256,
    retry_s: float = 120.0,
    request_timeout_s: float = 1800.0,
    hang_s: float = 120.0,
    min_servers: int = 1,
    transfer: str = "disk",
    take_over: bool = False,
    timeout_s: float = 180.0,
    start_timeout_s: float = 0.0,
    examined: Mapping[str, Any] | None = None,
) -> tuple[Engine | ChatEngine, str | None]:
    """Connect to servers: addresses with commas between, or a list of them; see `addresses`.

    Servers that do not answer yet have `start_timeout_s` seconds together to start. Without `api_key` the key
    is the environment's `VLLM_API_KEY`. What another process found out (`examined`) is not asked again.

    Returns:
        The engine and the path of its tokenizer. If the server returns no token ids, a chat engine and
        None, after a warning.

    Raises:
        EngineUnavailable: Fewer than `min_servers` servers answer; the others may join later.
        EngineError: The servers differ, or do not have the model.
        ModelNotFound: The tokenizer is not on this machine.
    """
    api_key = os.environ.get("VLLM_API_KEY") if api_key is None else api_key
    urls = addresses(url)
    examine = partial(probe, model=model, api_key=api_key, timeout_s=timeout_s)
    if examined is None:
        reports = _asked(urls, examine, min_servers, start_timeout_s)
        report, known = _of_all(reports), [other.url for other in reports]
    else:
        report, known = ServerReport.from_json(examined["report"]), examined["urls"]
    if report.route == "chat":
        return _chat(report, api_key), None
    engine = VLLMServerEngine(
        report,
        urls,
        examine=lambda url: require_alike(report, examine(url)),
        examined=known,
        listed=partial(addresses, url) if is_listed(url) else None,
        watch_all=examined is None,
        concurrency=concurrency,
        retry_s=retry_s,
        request_timeout_s=request_timeout_s,
        hang_s=hang_s,
        min_servers=min_servers,
        transfer=transfer,
        api_key=api_key,
        take_over=take_over,
    )
    for lack in report.missing:
        _log.info("%s lacks %s", report.url, lack)
    return engine, tokenizer or tokenizer_path(report)


def _chat(report: ServerReport, api_key: str | None) -> ChatEngine:
    """Return a chat engine on a server that returns no token ids, after a warning."""
    warnings.warn(
        f"{report.url} returns no token ids ({report.detail}), so its episodes can be evaluated but not "
        "trained on",
        stacklevel=4,
    )
    base = f"{report.url}/v1"
    options = {"base_url": base, "api_key": api_key or "none", "name": base}
    engine = engine_registry["openai"].load(report.model, None, options).engine
    assert isinstance(engine, ChatEngine)
    return engine


def _asked(
    urls: Sequence[str], examine: Callable[[str], ServerReport], enough: int, start_timeout_s: float
) -> list[ServerReport]:
    """Examine all servers at once; return the reports of those that answer.

    Raises:
        EngineUnavailable: Fewer than `enough` servers answer.
    """
    until = monotonic() + start_timeout_s
    reports: list[ServerReport] = []
    failures: list[EngineUnavailable] = []
    with ThreadPoolExecutor(min(len(urls), MOST_AT_ONCE), thread_name_prefix="probe") as threads:
        asked = [threads.submit(_started, url, examine, until) for url in urls]
    for answer in asked:
        try:
            reports.append(answer.result())
        except EngineUnavailable as error:
            failures.append(error)
    if failures and len(reports) < enough:
        raise failures[0]
    for failure in failures:
        _log.warning("%s; it is used as soon as it answers", failure.message)
    return reports


def _started(url: str, examine: Callable[[str], ServerReport], until: float) -> ServerReport:
    """Return the report of a server, which may still be starting until a moment of the monotonic clock."""
    while True:
        try:
            check_answers(f"the server {url}", url)
            return examine(url)
        except EngineUnavailable:
            if monotonic() >= until:
                raise
            sleep(LOOK_AGAIN_S)


def _of_all(reports: Sequence[ServerReport]) -> ServerReport:
    """Return a report that holds for all servers: what every one can do, and the newest weights of any.

    Raises:
        EngineError: The servers differ in what must be equal.
    """
    report = reports[0]
    for other in reports[1:]:
        require_alike(report, other)
    labels = [other.weights_label for other in reports]
    newest = max(reports, key=lambda other: other.weights_version)
    if len(set(labels)) > 1:
        _log.warning("the servers have different weights (%s); those with the newest are used", labels)
    limits = [other.max_context_tokens for other in reports if other.max_context_tokens is not None]
    caches = [other.cache_tokens for other in reports if other.cache_tokens is not None]
    return replace(
        report,
        max_context_tokens=min(limits, default=None),
        dev_mode=all(other.dev_mode for other in reports),
        lora=all(other.lora for other in reports),
        checksums=all(other.checksums for other in reports),
        experts=all(other.experts for other in reports),
        grammars=all(other.grammars for other in reports),
        cache_tokens=min(caches) if len(caches) == len(reports) else None,
        weights_label=None if None in labels else newest.weights_label,
    )


def require_alike(report: ServerReport, other: ServerReport) -> None:
    """Make sure that two servers serve the same model in the same way.

    Raises:
        EngineError: They differ.
    """
    remedy = "connect to servers of one model that were started with the same options"
    if (other.model, other.route, other.logprobs) != (report.model, report.route, report.logprobs):
        raise EngineError(
            f"{report.url} and {other.url} differ in their model, route or log-probabilities", remedy=remedy
        )
    if report.weights_label != other.weights_label or not (report.top and other.top):
        return  # they may have different weights, which the next push replaces
    common = report.top.keys() & other.top.keys()
    if not common or max(abs(report.top[token] - other.top[token]) for token in common) > MOST_APART:
        raise EngineError(
            f"{report.url} and {other.url} call their model {report.model!r}, but it is not the same one: "
            f"after the same prompt the likeliest tokens are {sorted(report.top)} and {sorted(other.top)}",
            remedy=remedy,
        )


def tokenizer_path(report: ServerReport) -> str:
    """Return the path of the server's model on this machine.

    Raises:
        ModelNotFound: The model is not on this machine, so the path of the tokenizer must be passed.
    """
    path = report.model_path
    if path is None or not Path(path).exists():
        raise ModelNotFound(
            f"the tokenizer of {report.model} (loaded by the server from {path!r}) is not on this machine",
            remedy="name a directory that has it with --tokenizer",
        )
    return path
