"""The memory of the transformers engine stays within its bounds while requests of all sizes come and go."""

from __future__ import annotations

import asyncio
import mmap
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, LlamaConfig

from agentenv.engine import Sampling
from agentenv.engine.hf.buffers import Pages, RowBuffers
from agentenv.engine.hf.request import GenerationRequest
from agentenv.engine.hf.scheduler import Scheduler

TOKEN_BYTES = 2 * 2 * 2 * 8 * 4
"""Keys and values of a token: two layers, two heads, eight numbers of four bytes."""


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    shape = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    config = LlamaConfig(
        vocab_size=300, hidden_size=32, intermediate_size=64, max_position_embeddings=4096, **shape
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def request_of(length: int, max_tokens: int, *, seed: int = 0, session: str | None = None):
    loop = asyncio.get_running_loop()
    return GenerationRequest(
        prompt=[Random(seed).randrange(300) for _ in range(length)],
        sampling=Sampling(seed=seed, adapter=None),
        stop=frozenset(),
        session_id=session,
        max_tokens=max_tokens,
        deadline=None,
        random=Random(seed),
        loop=loop,
        future=loop.create_future(),
        created=0.0,
    )


def play(scheduler: Scheduler, requests: list[GenerationRequest], check: Callable[[], None]) -> None:
    """Run the requests to their end; `check` is called after each turn."""
    scheduler.take(requests, ())
    while scheduler.has_work:
        scheduler.turn()
        check()


def logprobs_of(model, request: GenerationRequest) -> list[float]:
    """Score a completion with one unpadded forward pass without a cache."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([request.context]), use_cache=False).logits[0]
    start = len(request.prompt) - 1
    scores = logits.double().log_softmax(-1)[start:-1]
    return scores.gather(1, torch.tensor(request.tokens)[:, None])[:, 0].tolist()


def cells_of(scheduler: Scheduler) -> int:
    """Return rows times columns of the buffers."""
    return scheduler.stats()["live_bytes"] // TOKEN_BYTES


async def test_the_buffers_keep_to_their_limit_when_a_long_request_joins_the_last_of_many_short_ones(model):
    limit = 1000
    scheduler = Scheduler(model, max_batch=64, kept_bytes=0, live_tokens=limit)
    short = [request_of(6, 9 if number == 5 else 2, seed=number) for number in range(64)]
    long = request_of(490, 10, seed=99)
    most = 0

    def check() -> None:
        nonlocal most
        most = max(most, cells_of(scheduler))

    play(scheduler, [*short, long], check)

    assert len(long.tokens) == 10
    assert most <= limit
    assert short[5].logprobs == pytest.approx(logprobs_of(model, short[5]), abs=5e-5)
    assert long.logprobs == pytest.approx(logprobs_of(model, long), abs=5e-5)


@pytest.mark.parametrize("seed", range(2))
async def test_no_mix_of_requests_makes_the_buffers_or_what_is_kept_exceed_their_limits(model, seed):
    random, limit, kept = Random(seed), 300, 60 * TOKEN_BYTES
    scheduler = Scheduler(model, max_batch=8, kept_bytes=kept, live_tokens=limit)
    requests = [
        request_of(
            random.choice([3, 5, 20, 60, 400]),
            random.choice([1, 2, 9, 40]),
            seed=number,
            session=str(number % 5),
        )
        for number in range(40)
    ]

    def check() -> None:
        lone = max((len(each.prompt) + each.max_tokens for each in scheduler._live), default=0)
        assert cells_of(scheduler) <= max(limit, lone)
        assert scheduler.stats()["kept_bytes"] <= kept

    play(scheduler, requests, check)

    for each in requests:
        assert len(each.tokens) == each.max_tokens
        assert each.logprobs == pytest.approx(logprobs_of(model, each), abs=5e-5)


async def test_a_request_beyond_the_limit_runs_alone_and_its_buffers_grow_in_large_steps(model):
    scheduler = Scheduler(model, max_batch=8, kept_bytes=0, live_tokens=50)
    sizes: list[int] = []
    shapes: set[torch.Size] = set()

    def check() -> None:
        sizes.append(cells_of(scheduler))
        shapes.update(buffer.shape for buffer in scheduler.core.buffers.keys)

    play(scheduler, [request_of(10, 300), request_of(5, 5)], check)

    assert max(sizes) <= 310
    assert len(shapes) <= 10
    assert sizes[-2] <= 50  # the last size is 0: nothing lives any more


async def test_a_long_request_leaves_room_for_short_ones_beside_it(model):
    scheduler = Scheduler(model, max_batch=16, kept_bytes=0, live_tokens=1000)
    requests = [request_of(500, 20), *(request_of(10, 20, seed=number) for number in range(1, 12))]
    rows: list[int] = []

    play(scheduler, requests, lambda: rows.append(scheduler.core.live))

    assert rows[0] == 12
    for each in requests:
        assert each.logprobs == pytest.approx(logprobs_of(model, each), abs=5e-5)


def committed() -> int:
    """Return the bytes of memory that this process holds."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux")
def test_short_rows_beside_a_long_one_take_memory_for_their_own_columns():
    buffers = RowBuffers(by_tokens=True)
    rows, columns, wide = 16, 8000, 64
    counts = [columns, *[100] * (rows - 1)]
    before = committed()

    buffers.reserve(rows, columns)
    for _ in range(rows):
        buffers.append(None, 0)
    for row, count in enumerate(counts):
        buffers.plan_prefill(row, [count])
        buffers.update(torch.ones(1, 2, count, wide), torch.ones(1, 2, count, wide), 0)
        buffers.lengths[row] = count

    whole = rows * columns * 2 * 2 * wide * 4
    taken = committed() - before
    assert buffers.nbytes == sum(counts) * 2 * 2 * wide * 4
    assert taken < whole / 4  # a ninth is written; the rest is the temporary ones
    buffers.remove(0)  # the last of the short rows moves into its place
    assert committed() - before < taken - whole / rows / 2
    assert buffers.keys[0][0, :, :100].eq(1).all()
    assert buffers.keys[0][0, :, 100:].eq(0).all()


@given(
    st.integers(0, 3),
    st.lists(st.integers(0, 3000), min_size=2, max_size=2).map(sorted),
    st.sampled_from([1, 3, 16]),
)
def test_columns_that_are_given_back_are_zero_and_all_others_unchanged(row, ends, numbers):
    pages = Pages(torch.empty(0), (4, 2, 3000, numbers * 16))
    want = torch.rand(pages.tensor.shape)
    pages.tensor.copy_(want)
    want[row, :, ends[0] : ends[1]] = 0

    pages.give_back(row, *ends)

    assert torch.equal(pages.tensor, want)


def test_buffers_that_shrink_keep_what_the_live_rows_hold():
    buffers = RowBuffers()
    buffers.limit = 640
    states = torch.arange(2 * 1 * 5 * 4, dtype=torch.float32).reshape(2, 1, 5, 4)
    buffers.reserve(10, 60)
    for _ in range(2):
        buffers.append(None, 0)
    buffers.plan_prefill(0, [5, 5])
    buffers.update(states, -states, 0)
    buffers.lengths = [5, 5]

    buffers.reserve(0, 300)

    assert buffers.keys[0].shape[0] * buffers.keys[0].shape[2] <= 640
    assert buffers.keys[0].shape[2] >= 300
    torch.testing.assert_close(buffers.keys[0][:2, :, :5], states)
    torch.testing.assert_close(buffers.values[0][:2, :, :5], -states)
