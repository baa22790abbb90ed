"""A server says how many tokens its cache holds, from which follows how many episodes it serves at once."""

from __future__ import annotations

import pytest

from helpers.fake_vllm import cache_metrics, connected, engine_on, serving

BLOCKS = {"block_size": 16, "num_gpu_blocks": 40}


@pytest.mark.parametrize(
    ("metrics", "tokens"),
    [
        (cache_metrics(BLOCKS), 640),
        # The engines of one server name the sum of their blocks each, but only their own tokens.
        (cache_metrics(BLOCKS, BLOCKS), 640),
        (cache_metrics(*[BLOCKS | {"kv_cache_size_tokens": 300}] * 2), 600),
        (cache_metrics(BLOCKS | {"kv_cache_size_tokens": None}), 640),
        (cache_metrics({"block_size": 16, "num_gpu_blocks": None}), None),
        (cache_metrics({}), None),
        ("<html>", None),
        ("", None),
    ],
)
async def test_the_probe_reads_the_size_of_the_cache_if_the_server_says_it(metrics, tokens):
    async with serving(metrics=metrics) as fake, engine_on(fake) as engine:
        assert engine.report.cache_tokens == tokens
        assert engine.features.episodes_at_once(64) == (None if tokens is None else tokens // 64)


async def test_every_server_serves_as_many_episodes_as_the_smallest_and_no_more_than_it_is_sent():
    large, small = cache_metrics(BLOCKS | {"num_gpu_blocks": 400}), cache_metrics(BLOCKS)
    async with (
        serving(metrics=large) as one,
        serving(metrics=small) as other,
        connected(one.url, other.url, concurrency=8) as engine,
    ):
        assert [engine.features.episodes_at_once(length) for length in (320, 64, 10_000)] == [4, 16, 2]


async def test_one_server_that_does_not_say_its_size_leaves_all_unknown():
    async with (
        serving(metrics=cache_metrics(BLOCKS)) as one,
        serving() as other,
        connected(one.url, other.url) as engine,
    ):
        assert engine.features.episodes_at_once(64) is None
