"""The memory of the transformers engine stays within its bounds while requests of all sizes come and go."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from random import Random

import pytest
import torch

from agentenv.engine import Sampling
from agentenv.engine.hf.batching import Batch, Room
from agentenv.engine.hf.passes import Rows
from agentenv.engine.hf.request import GenerationRequest
from scenes import language_model

TOKEN_BYTES = 2 * 2 * 2 * 8 * 4
"""Keys and values of a token: two layers, two heads, eight numbers of four bytes."""


@pytest.fixture(scope="module")
def model():
    sizes = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096}
    return language_model(initializer_range=0.02, **sizes)


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
        random=Random(seed),
        loop=loop,
        future=loop.create_future(),
    )


def play(batch: Batch, requests: list[GenerationRequest], check: Callable[[], None]) -> None:
    """Run the requests to their end; `check` is called after each turn."""
    for request in requests:
        batch.take(request)
    while batch.has_work:
        batch.turn()
        check()


def logprobs_of(model, request: GenerationRequest) -> list[float]:
    """Score a completion with one unpadded forward pass without a cache."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([request.context]), use_cache=False).logits[0]
    start = len(request.prompt) - 1
    scores = logits.double().log_softmax(-1)[start:-1]
    return scores.gather(1, torch.tensor(request.tokens)[:, None])[:, 0].tolist()


def cells_of(batch: Batch) -> int:
    """Return rows times columns of the buffers."""
    return batch.stats()["live_bytes"] // TOKEN_BYTES


async def test_the_buffers_keep_to_their_limit_when_a_long_request_joins_the_last_of_many_short_ones(model):
    limit = 1000
    batch = Batch(model, max_batch=64, kept_bytes=0, live_tokens=limit)
    short = [request_of(6, 9 if number == 5 else 2, seed=number) for number in range(64)]
    long = request_of(490, 10, seed=99)
    most = 0

    def check() -> None:
        nonlocal most
        most = max(most, cells_of(batch))

    play(batch, [*short, long], check)

    assert len(long.tokens) == 10
    assert most <= limit
    assert short[5].logprobs == pytest.approx(logprobs_of(model, short[5]), abs=1e-5)
    assert long.logprobs == pytest.approx(logprobs_of(model, long), abs=1e-5)


@pytest.mark.parametrize("seed", range(2))
async def test_no_mix_of_requests_makes_the_buffers_or_what_is_kept_exceed_their_limits(model, seed):
    random, limit, kept = Random(seed), 300, 60 * TOKEN_BYTES
    batch = Batch(model, max_batch=8, kept_bytes=kept, live_tokens=limit)
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
        lone = max((len(each.prompt) + each.max_tokens for each in batch._live), default=0)
        assert cells_of(batch) <= max(limit, lone)
        assert batch.stats()["kept_bytes"] <= kept

    play(batch, requests, check)

    for each in requests:
        assert len(each.tokens) == each.max_tokens
        assert each.logprobs == pytest.approx(logprobs_of(model, each), abs=1e-5)


async def test_a_request_beyond_the_limit_runs_alone_and_its_buffers_grow_in_large_steps(model):
    batch = Batch(model, max_batch=8, kept_bytes=0, live_tokens=50)
    sizes: list[int] = []
    shapes: set[torch.Size] = set()

    def check() -> None:
        sizes.append(cells_of(batch))
        shapes.update(buffer.shape for buffer in batch.rows.tensors)

    play(batch, [request_of(10, 300), request_of(5, 5)], check)

    assert max(sizes) <= 310
    assert len(shapes) <= 10
    assert sizes[-2] <= 50  # the last size is 0: nothing lives any more


async def test_the_prompt_of_a_group_is_computed_once_however_long_it_is(model):
    batch = Batch(model, max_batch=16, kept_bytes=1 << 30, live_tokens=10**6)
    prompt = tokens_of(1000, 7)
    group = [request_for(prompt, 4 + 3 * member, seed=member, session=str(member)) for member in range(6)]

    play(batch, group, lambda: None)

    assert batch.stats()["prefilled"] == 1000
    assert len({tuple(each.tokens[:4]) for each in group}) == 6
    for each in group:
        assert each.logprobs == pytest.approx(logprobs_of(model, each), abs=1e-5)
    for member in range(6):
        batch.release(str(member))
    assert batch.stats()["kept_bytes"] == 0


async def test_a_member_that_comes_later_begins_with_the_prompt_of_a_live_or_a_kept_one(model):
    batch = Batch(model, max_batch=16, kept_bytes=1 << 30, live_tokens=10**6)
    prompt = tokens_of(100, 7)
    first, second = request_for(prompt, 5, seed=1, session="1"), request_for(prompt, 5, seed=2)
    batch.take(first)
    batch.turn()

    play(batch, [second], lambda: None)
    third = request_for([*prompt[:60], *tokens_of(30, 8)], 5, seed=3)
    play(batch, [third], lambda: None)

    assert batch.stats()["prefilled"] == 100 + 1 + 30
    for each in (first, second, third):
        assert each.logprobs == pytest.approx(logprobs_of(model, each), abs=1e-5)


@pytest.mark.parametrize("seed", range(3))
async def test_episodes_that_share_beginnings_have_the_numbers_of_a_fresh_pass_in_all_turns(model, seed):
    # Groups share prompts, prompts share a beginning, and some turns change what was shared.
    random = Random(seed)
    batch = Batch(model, max_batch=9, kept_bytes=600 * TOKEN_BYTES, live_tokens=2000)
    system, played = tokens_of(random.choice([5, 30, 120]), 1), 0
    contexts = {
        f"{group}-{member}": system + tokens_of(random.choice([3, 25]) + group, 10 + group)
        for group in range(4)
        for member in range(random.randint(1, 5))
    }

    def check(turn: int) -> None:
        assert batch.stats()["kept_bytes"] <= 600 * TOKEN_BYTES
        if turn == 2 and random.random() < 0.1:
            batch.forget()

    for turn in range(4):
        requests = {
            name: request_for(context, random.randint(1, 12), seed=turn * 100 + number, session=name)
            for number, (name, context) in enumerate(contexts.items())
        }
        play(batch, list(requests.values()), partial(check, turn))
        for name, request in requests.items():
            played += 1
            assert request.logprobs == pytest.approx(logprobs_of(model, request), abs=1e-5)
            contexts[name] = request.context + tokens_of(random.randint(1, 20), played)
            if random.random() < 0.2:  # a context that was rewritten within its beginning
                contexts[name] = contexts[name][: random.randint(2, 40)] + tokens_of(9, played)
    assert played >= 16


def test_rows_that_shrink_keep_what_the_live_ones_hold():
    rows = Rows()
    rows.limit = 640
    states = torch.arange(2 * 1 * 5 * 4, dtype=torch.float32).reshape(2, 1, 5, 4)
    rows.reserve(10, 60)
    for _ in range(2):
        rows.add((), 0, 0)
    rows.plan(0, [5, 5], torch.device("cpu"))
    rows.update(states, -states, 0)
    rows.lengths = [5, 5]

    rows.reserve(2, 300)

    parts = [rows.part(index) for index in range(2)]
    assert [part.shape[0] * part.shape[2] <= 640 for part in parts] == [True] * 2
    assert parts[0].shape[2] >= 300
    torch.testing.assert_close(parts[0][:2, :, :5], states)
    torch.testing.assert_close(parts[1][:2, :, :5], -states)


async def play_group(model, monkeypatch, together: int, step: int) -> tuple[list[list[float]], int, Rows]:
    """Play two turns of a group; return its log-probabilities, the tokens reused, and the rows."""
    monkeypatch.setattr("agentenv.engine.hf.passes.Rows", partial(Rows, together=together, step=step))
    batch = Batch(model)
    members = [
        request_for(tokens_of(40, 7), 5 + 4 * number, seed=number, session=str(number)) for number in range(5)
    ]
    play(batch, members, lambda: None)
    later = [
        request_for([*each.context, *tokens_of(3, 1)], 6, seed=9, session=each.session_id) for each in members
    ]
    play(batch, later, lambda: None)
    return [each.logprobs for each in (*members, *later)], batch.stats()["reused"], batch.rows


@pytest.mark.parametrize("together", [3, 16])
async def test_parts_that_lie_together_and_wider_passes_change_nothing(model, monkeypatch, together):
    truth, reused, apart = await play_group(model, monkeypatch, 1, 1)
    ours, also, joined = await play_group(model, monkeypatch, together, 8)

    assert also == reused > 0
    for mine, wanted in zip(ours, truth, strict=True):
        assert mine == pytest.approx(wanted, abs=1e-5)
    apart.add((), 0, 0)
    joined.add((), 0, 0)
    assert len(apart.tensors) == 4, "keys and values of two layers"
    assert [len(tensor) for tensor in joined.tensors] == ([3, 1] if together == 3 else [4])


def test_parts_of_other_shapes_lie_in_other_tensors():
    rows = Rows(together=16)
    rows.add((), 0, 0)
    rows.plan(0, [1], torch.device("cpu"))
    for index, numbers in enumerate((4, 8, 4, 8)):
        rows.write(index, torch.full((1, 2, 1, numbers), float(index)))
    rows.clear()
    rows.add((), 0, 0)
    rows.plan(0, [1], torch.device("cpu"))
    for index, numbers in enumerate((4, 8, 4, 8)):
        rows.write(index, torch.full((1, 2, 1, numbers), float(index)))

    assert [tuple(tensor.shape[::4]) for tensor in rows.tensors] == [(2, 4), (2, 8)]
    assert [float(rows.part(index).max()) for index in range(4)] == [0.0, 1.0, 2.0, 3.0]


@pytest.mark.parametrize(
    ("gib", "token_bytes", "live", "prefill"),
    [(80, 114_688, 149_796, 16_384), (20, 114_688, 37_449, 5120), (1, 1 << 30, 1, 2048)],
)
def test_an_engine_takes_what_a_card_has_room_for(gib, token_bytes, live, prefill):
    assert Room.on_a_card(gib << 30, token_bytes) == (256, (gib << 30) // 10, live, prefill)


def test_the_attention_of_cudnn_is_left_out_because_it_plans_for_each_width(model):
    torch.backends.cuda.enable_cudnn_sdp(enabled=True)
    Batch(model)

    assert not torch.backends.cuda.cudnn_sdp_enabled()
