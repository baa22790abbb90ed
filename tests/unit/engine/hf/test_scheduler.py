"""The memory of the transformers engine stays within its bounds while requests of all sizes come and go."""

from __future__ import annotations

import asyncio
import mmap
from collections.abc import Callable
from functools import partial
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


def tokens_of(length: int, seed: int) -> list[int]:
    random = Random(seed)
    return [random.randrange(300) for _ in range(length)]


def request_of(length: int, max_tokens: int, *, seed: int = 0, session: str | None = None):
    return request_for(tokens_of(length, seed), max_tokens, seed=seed, session=session)


def request_for(prompt: list[int], max_tokens: int, *, seed: int = 0, session: str | None = None):
    loop = asyncio.get_running_loop()
    return GenerationRequest(
        prompt=prompt,
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


def sharing(model, **options) -> Scheduler:
    scheduler = Scheduler(model, **{"max_batch": 16, "kept_bytes": 1 << 30, "live_tokens": 10**6} | options)
    scheduler.core.buffers.least_shared = 8
    return scheduler


async def test_the_prompt_of_a_group_is_computed_and_held_once_however_long_it_is(model):
    scheduler = sharing(model)
    prompt = tokens_of(1000, 7)
    group = [request_for(prompt, 4 + 3 * member, seed=member, session=str(member)) for member in range(6)]
    sizes: list[int] = []

    play(scheduler, group, lambda: sizes.append(cells_of(scheduler)))

    assert scheduler.stats()["prefilled"] == 1000
    assert max(sizes) <= 1000 + sum(len(each.tokens) for each in group)
    assert scheduler.stats()["kept_bytes"] <= (1000 + sum(len(each.tokens) for each in group)) * TOKEN_BYTES
    assert len({tuple(each.tokens[:4]) for each in group}) == 6
    for each in group:
        assert each.logprobs == pytest.approx(logprobs_of(model, each), abs=1e-5)
    scheduler.take([], [str(member) for member in range(6)])
    assert scheduler.stats()["kept_bytes"] == 0


async def test_a_short_prompt_is_copied_to_each_member(model):
    scheduler = sharing(model)
    scheduler.core.buffers.least_shared = 41

    scheduler.take([request_for(tokens_of(40, 7), 9, seed=member) for member in range(6)], ())
    scheduler.turn()

    assert scheduler.stats()["prefilled"] == 40
    assert scheduler.core.buffers.shared == [None] * 6


@pytest.mark.parametrize("seed", range(3))
async def test_episodes_that_share_beginnings_have_the_numbers_of_a_fresh_pass_in_all_turns(model, seed):
    # Groups share prompts, prompts share a beginning, and some turns change what was shared.
    random = Random(seed)
    scheduler = sharing(model, max_batch=9, kept_bytes=600 * TOKEN_BYTES, live_tokens=2000)
    system, played = tokens_of(random.choice([5, 30, 120]), 1), 0
    contexts = {
        f"{group}-{member}": system + tokens_of(random.choice([3, 25]) + group, 10 + group)
        for group in range(4)
        for member in range(random.randint(1, 5))
    }

    def check(turn: int) -> None:
        assert scheduler.stats()["kept_bytes"] <= 600 * TOKEN_BYTES
        assert min(scheduler.core.buffers.own, default=0) >= 0
        if turn == 2 and random.random() < 0.1:
            scheduler.set_version(scheduler._version + 1, stale=random.random() < 0.5)

    for turn in range(4):
        requests = {
            name: request_for(context, random.randint(1, 12), seed=turn * 100 + number, session=name)
            for number, (name, context) in enumerate(contexts.items())
        }
        play(scheduler, list(requests.values()), partial(check, turn))
        for name, request in requests.items():
            played += 1
            assert request.logprobs == pytest.approx(logprobs_of(model, request), abs=1e-5)
            contexts[name] = request.context + tokens_of(random.randint(1, 20), played)
            if random.random() < 0.2:  # a context that was rewritten within its beginning
                contexts[name] = contexts[name][: random.randint(2, 40)] + tokens_of(9, played)
    assert played >= 16


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
        buffers.append(None)
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
        buffers.append(None)
    buffers.plan_prefill(0, [5, 5])
    buffers.update(states, -states, 0)
    buffers.lengths = [5, 5]

    buffers.reserve(0, 300)

    assert buffers.keys[0].shape[0] * buffers.keys[0].shape[2] <= 640
    assert buffers.keys[0].shape[2] >= 300
    torch.testing.assert_close(buffers.keys[0][:2, :, :5], states)
    torch.testing.assert_close(buffers.values[0][:2, :, :5], -states)
